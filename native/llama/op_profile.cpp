#include "llama/op_profile.hpp"

#include <algorithm>
#include <cstring>
#include <exception>

namespace esp {

namespace {

// Views of other nodes: no backend computes them.
bool is_empty(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_TRANSPOSE || op == GGML_OP_VIEW ||
           op == GGML_OP_PERMUTE;
}

std::int64_t bytes_of(const ggml_tensor &tensor, std::int64_t n_rows) {
    return static_cast<std::int64_t>(ggml_row_size(tensor.type, tensor.ne[0])) * n_rows;
}

// Matrices of a product with experts that are read: every row may choose others, so this is the most there can be.
std::int64_t rows_of_experts(const ggml_tensor &weights, const ggml_tensor &out) {
    return weights.ne[1] * std::min(weights.ne[2], out.ne[1] * out.ne[2]);
}

void count(const ggml_tensor &tensor, OpProfile::Node &node) {
    const ggml_tensor &first = *tensor.src[0];
    switch (tensor.op) {
    case GGML_OP_MUL_MAT:
        node.n_bytes = bytes_of(first, ggml_nrows(&first));
        node.macs = first.ne[0] * ggml_nelements(&tensor);
        break;
    case GGML_OP_MUL_MAT_ID:
        node.n_bytes = bytes_of(first, rows_of_experts(first, tensor));
        node.macs = first.ne[0] * ggml_nelements(&tensor);
        break;
    case GGML_OP_FLASH_ATTN_EXT: { // q [head_dim, rows, heads], k and v [head_dim, cells, heads]
        const ggml_tensor &k = *tensor.src[1];
        const ggml_tensor &v = *tensor.src[2];
        node.n_bytes = bytes_of(k, ggml_nrows(&k)) + bytes_of(v, ggml_nrows(&v));
        node.macs = ggml_nrows(&first) * k.ne[1] * (k.ne[0] + v.ne[0]);
        node.type = k.type;
        break;
    }
    case GGML_OP_GET_ROWS:
        node.n_bytes = bytes_of(first, ggml_nrows(&tensor));
        break;
    default:
        break;
    }
}

} // namespace

bool OpProfile::on_tensor(ggml_tensor *tensor, bool ask, void *self) noexcept {
    auto &profile = *static_cast<OpProfile *>(self);
    if (profile.ctx_ == nullptr) {
        return false;
    }
    if (!ask) {
        profile.nodes_.back().us = std::chrono::duration<double, std::micro>(Clock::now() - profile.begin_).count();
        return true;
    }
    try {
        if (!profile.stamps_.empty()) {
            profile.assign(); // the first node of the next graph
        }
        const bool alone = profile.list(*tensor) && profile.separate;
        profile.begin_ = Clock::now();
        return alone;
    } catch (const std::exception &) { // no exception may pass through llama.cpp
        profile.fail("there is not enough memory for the profile");
        return false;
    }
}

bool OpProfile::on_node(void *self) noexcept {
    auto &profile = *static_cast<OpProfile *>(self);
    if (profile.stamps_.size() == profile.stamps_.capacity()) {
        profile.fail("more nodes were computed than listed");
    } else {
        profile.stamps_.push_back(Clock::now());
    }
    return false; // go on
}

bool OpProfile::list(const ggml_tensor &tensor) {
    const ggml_tensor *before = last_;
    last_ = &tensor;
    if (is_empty(tensor.op) || (tensor.flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
        return false;
    }
    Node node;
    node.op = tensor.op;
    std::memcpy(node.name, tensor.name, sizeof(node.name));
    if (tensor.src[0] != nullptr) {
        std::memcpy(node.weights, tensor.src[0]->name, sizeof(node.weights));
        node.type = tensor.src[0]->type;
        count(tensor, node);
    }
    node.scales_norm = tensor.op == GGML_OP_MUL && before != nullptr && before->op == GGML_OP_RMS_NORM &&
                       (tensor.src[0] == before || tensor.src[1] == before);
    nodes_.push_back(node);
    stamps_.reserve(nodes_.size()); // never while the graph is computed
    return true;
}

void OpProfile::assign() {
    const auto first = nodes_.begin() + static_cast<std::ptrdiff_t>(n_assigned_);
    const auto n_nodes = static_cast<std::size_t>(nodes_.end() - first);
    const auto n_fusable = std::count_if(first, nodes_.end(), [](const Node &node) { return node.scales_norm; });
    const bool fused = stamps_.size() + static_cast<std::size_t>(n_fusable) == n_nodes;
    if (!fused && stamps_.size() != n_nodes) {
        fail("the backend did not tell the end of every node");
    }
    Clock::time_point before = begin_;
    auto stamp = stamps_.begin();
    for (auto node = first; node != nodes_.end() && stamp != stamps_.end(); ++node) {
        if (fused && node->scales_norm) {
            continue;
        }
        node->us = std::chrono::duration<double, std::micro>(*stamp - before).count();
        before = *stamp++;
    }
    n_assigned_ = nodes_.size();
    stamps_.clear();
}

void OpProfile::start(llama_context *ctx) {
    nodes_.clear();
    stamps_.clear();
    n_assigned_ = 0;
    last_ = nullptr;
    problem_ = "";
    ctx_ = ctx;
    llama_set_abort_callback(ctx, separate ? nullptr : &OpProfile::on_node, this);
}

void OpProfile::stop() {
    if (ctx_ == nullptr) {
        return;
    }
    llama_set_abort_callback(ctx_, nullptr, nullptr);
    ctx_ = nullptr;
    if (!separate) {
        assign();
    }
}

} // namespace esp
