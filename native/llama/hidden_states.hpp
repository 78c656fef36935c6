// What every layer of a model hands to the next one, read through llama.cpp's evaluation callback.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml.h"

namespace esp {

// Records the hidden states of the last pass of one context: the tensors its graph names "l_out-<layer>", from 0,
// float[n_rows, n_embd]. Their rows are those of the batch, in its order; in the last layer most graphs keep only the
// rows whose logits were asked for, so ask for all.
//
// on_tensor and the address of this object go into llama_context_params (cb_eval); it must outlive the context.
class HiddenStates {
  public:
    // Throws std::invalid_argument.
    HiddenStates(std::int32_t n_layers, std::int64_t n_embd);
    HiddenStates(const HiddenStates &) = delete; // a context knows the address
    HiddenStates &operator=(const HiddenStates &) = delete;

    // A ggml_backend_sched_eval_callback. Never ends the computation: trouble is told by problem().
    static bool on_tensor(ggml_tensor *tensor, bool ask, void *self) noexcept;

    void start(); // forgets the last pass; the next one is recorded, until stop
    void stop() { recording_ = false; }

    std::int32_t n_layers() const { return static_cast<std::int32_t>(layers_.size()); }
    std::int64_t n_embd() const { return n_embd_; }
    std::int64_t n_rows(std::int32_t layer) const;   // 0 where nothing was recorded; throws std::out_of_range
    const char *problem() const { return problem_; } // why the record cannot be used; empty when it can

    const float *row(std::int32_t layer, std::int64_t row) const; // [n_embd]; throws std::out_of_range

    // Remembers one row of every layer across passes.
    void keep(std::int64_t row);
    // out[n_layers]: cosine between a row and the remembered one, 0 where either is zero or not finite.
    void cosines(std::int64_t row, double *out) const;

  private:
    struct Layer {
        std::int64_t n_rows = 0;
        std::vector<float> values;
    };
    void record(const ggml_tensor &tensor);

    std::int64_t n_embd_;
    std::vector<Layer> layers_;
    std::vector<float> kept_; // [n_layers, n_embd], empty before the first keep
    bool recording_ = false;
    const char *problem_ = "";
};

} // namespace esp
