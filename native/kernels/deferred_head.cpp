#include "kernels/deferred_head.hpp"

#include <cstring>

#include "kernels/cpu_device.hpp"

namespace esp::kernels {
namespace {

thread_local DeferredHead *waiting = nullptr;

// llama.cpp gives this name to what it takes the logits from. A head with something behind it has another one.
bool gives_logits(const ggml_tensor *op) { return std::strcmp(op->name, "result_output") == 0; }

} // namespace

DeferredHead::DeferredHead() = default;
DeferredHead::~DeferredHead() = default;

DeferredHead::Scope::Scope(DeferredHead &head) {
    head.n_rows_ = 0;
    waiting = &head;
}

DeferredHead::Scope::~Scope() { waiting = nullptr; }

DeferredHead *DeferredHead::for_product(const ggml_tensor *op) {
    DeferredHead *const head = waiting;
    if (head == nullptr || !gives_logits(op)) {
        return nullptr;
    }
    const std::int64_t width = op->src[1]->ne[0];
    head->weights_ = op->src[0];
    head->kept_from_ = head->n_rows_;
    head->n_rows_ += ggml_nrows(op->src[1]);
    head->rows_.resize(static_cast<std::size_t>(head->n_rows_ * width));
    return head;
}

void DeferredHead::keep(const ggml_tensor *op, int thread, int n_threads) {
    const ggml_tensor *const x = op->src[1];
    const std::int64_t n = ggml_nrows(x), width = x->ne[0];
    for (std::int64_t row = n * thread / n_threads; row < n * (thread + 1) / n_threads; ++row) {
        const auto *const from = static_cast<const std::byte *>(x->data) + x->nb[1] * static_cast<std::size_t>(row);
        std::memcpy(rows_.data() + (kept_from_ + row) * width, from, sizeof(float) * static_cast<std::size_t>(width));
    }
}

void DeferredHead::compute(std::int64_t first, std::int64_t n, float *logits, int n_threads) {
    if (device_ == nullptr || n_threads_ != n_threads) {
        device_ = std::make_unique<CpuDevice>(n_threads);
        n_threads_ = n_threads;
    }
    constexpr std::size_t n_nodes = 8;
    const auto context = new_context(n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false));
    auto *const weights = const_cast<ggml_tensor *>(weights_);
    ggml_tensor *const x = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, weights->ne[0], n);
    x->data = rows_.data() + first * weights->ne[0];
    ggml_tensor *const y = ggml_mul_mat(context.get(), weights, x);
    y->data = logits;
    ggml_cgraph *const graph = ggml_new_graph_custom(context.get(), n_nodes, false);
    ggml_build_forward_expand(graph, y);
    device_->compute(graph);
}

} // namespace esp::kernels
