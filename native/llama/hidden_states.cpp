#include "llama/hidden_states.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "ggml-backend.h"

namespace esp {

namespace {

constexpr char prefix[] = "l_out-";
constexpr std::size_t prefix_length = sizeof(prefix) - 1;

// Layer of a tensor named l_out-<layer>, else -1. Views carry a name behind the number, such as "l_out-3 (view)".
std::int32_t layer_of(const ggml_tensor &tensor) {
    const char *name = ggml_get_name(&tensor);
    if (std::strncmp(name, prefix, prefix_length) != 0) {
        return -1;
    }
    const char *end = name + std::strlen(name);
    std::int32_t layer = -1;
    const auto [stop, error] = std::from_chars(name + prefix_length, end, layer);
    return error == std::errc() && stop == end ? layer : -1;
}

double cosine(const float *a, const float *b, std::int64_t n) {
    double ab = 0.0;
    double aa = 0.0;
    double bb = 0.0;
    for (std::int64_t i = 0; i < n; ++i) {
        ab += static_cast<double>(a[i]) * b[i];
        aa += static_cast<double>(a[i]) * a[i];
        bb += static_cast<double>(b[i]) * b[i];
    }
    const double length = std::sqrt(aa) * std::sqrt(bb);
    const double found = ab / length;
    return length > 0.0 && std::isfinite(found) ? std::clamp(found, -1.0, 1.0) : 0.0;
}

} // namespace

HiddenStates::HiddenStates(std::int32_t n_layers, std::int64_t n_embd) : n_embd_(n_embd) {
    if (n_layers < 1 || n_embd < 1) {
        throw std::invalid_argument("hidden states need a model with layers and a width");
    }
    layers_.resize(static_cast<std::size_t>(n_layers));
}

bool HiddenStates::on_tensor(ggml_tensor *tensor, bool ask, void *self) noexcept {
    auto &states = *static_cast<HiddenStates *>(self);
    if (ask) {
        return states.recording_ && layer_of(*tensor) >= 0;
    }
    try {
        states.record(*tensor);
    } catch (const std::exception &) { // no exception may pass through llama.cpp
        states.problem_ = "there is not enough memory for the hidden states";
    }
    return true;
}

void HiddenStates::record(const ggml_tensor &tensor) {
    const std::int32_t index = layer_of(tensor);
    if (index < 0 || index >= n_layers()) {
        return; // a layer behind the model's own, such as those that draft
    }
    if (tensor.type != GGML_TYPE_F32 || tensor.ne[0] != n_embd_ || tensor.ne[2] != 1 || tensor.ne[3] != 1 ||
        tensor.nb[0] != sizeof(float)) {
        problem_ = "a layer's output is not one float row of the model's width for each row of the pass";
        return;
    }
    Layer &layer = layers_[static_cast<std::size_t>(index)];
    if (layer.n_rows != 0) {
        problem_ = "llama.cpp ran the pass in several parts";
        return;
    }
    const auto width = static_cast<std::size_t>(n_embd_);
    layer.values.resize(static_cast<std::size_t>(tensor.ne[1]) * width);
    for (std::int64_t row = 0; row < tensor.ne[1]; ++row) {
        const auto at = static_cast<std::size_t>(row);
        ggml_backend_tensor_get(&tensor, layer.values.data() + at * width, at * tensor.nb[1], width * sizeof(float));
    }
    layer.n_rows = tensor.ne[1];
}

void HiddenStates::start() {
    for (Layer &layer : layers_) {
        layer.n_rows = 0;
    }
    problem_ = "";
    recording_ = true;
}

std::int64_t HiddenStates::n_rows(std::int32_t layer) const {
    if (layer < 0 || layer >= n_layers()) {
        throw std::out_of_range("layer " + std::to_string(layer) + " is not one of " + std::to_string(n_layers()));
    }
    return layers_[static_cast<std::size_t>(layer)].n_rows;
}

const float *HiddenStates::row(std::int32_t layer, std::int64_t row) const {
    const std::int64_t rows = n_rows(layer);
    if (row < 0 || row >= rows) {
        throw std::out_of_range("row " + std::to_string(row) + " is not one of the " + std::to_string(rows) +
                                " that layer " + std::to_string(layer) + " gave in the last pass");
    }
    return layers_[static_cast<std::size_t>(layer)].values.data() + row * n_embd_;
}

void HiddenStates::keep(std::int64_t row) {
    std::vector<float> kept;
    kept.reserve(layers_.size() * static_cast<std::size_t>(n_embd_));
    for (std::int32_t layer = 0; layer < n_layers(); ++layer) {
        const float *values = this->row(layer, row);
        kept.insert(kept.end(), values, values + n_embd_);
    }
    kept_ = std::move(kept);
}

void HiddenStates::cosines(std::int64_t row, double *out) const {
    if (kept_.empty()) {
        throw std::logic_error("cosines need a row to compare with: keep one first");
    }
    for (std::int32_t layer = 0; layer < n_layers(); ++layer) {
        out[layer] = cosine(this->row(layer, row), kept_.data() + layer * n_embd_, n_embd_);
    }
}

} // namespace esp
