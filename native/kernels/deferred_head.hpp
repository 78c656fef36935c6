// The output head of a pass, computed after the pass and for some of its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

struct ggml_tensor;

namespace esp::kernels {

struct CpuDevice;

// What the head would have been multiplied with. The kernels hand it over instead of multiplying: for a pass that was
// decoded in a Scope, where the head is a matrix of theirs and nothing comes behind it (no bias, scale or cap).
// Everywhere else n_rows is 0 and the logits are in their place.
class DeferredHead {
  public:
    DeferredHead();
    ~DeferredHead();
    DeferredHead(const DeferredHead &) = delete;
    DeferredHead &operator=(const DeferredHead &) = delete;

    // While it lives, passes that this thread decodes leave their heads to this object, which forgets the last pass.
    class Scope {
      public:
        explicit Scope(DeferredHead &head);
        ~Scope();
        Scope(const Scope &) = delete;
        Scope &operator=(const Scope &) = delete;
    };

    // Rows that wait, in the order in which llama.cpp keeps their logits.
    std::int64_t n_rows() const { return n_rows_; }

    // Logits of the rows [first, first + n), as the pass would have written them: float[n, n_vocab]. Throws
    // std::runtime_error where ggml fails.
    void compute(std::int64_t first, std::int64_t n, float *logits, int n_threads);

    // For the kernels. The head that waits for this product, null where it is to be computed: asked by the thread that
    // decodes, before any other starts on the pass.
    static DeferredHead *for_product(const ggml_tensor *op);
    // Keeps this thread's share of the rows of the product asked for last.
    void keep(const ggml_tensor *op, int thread, int n_threads);

  private:
    const ggml_tensor *weights_ = nullptr;
    std::vector<float> rows_; // [n_rows, width]
    std::int64_t n_rows_ = 0;
    std::int64_t kept_from_ = 0; // first row of the product asked for last
    std::unique_ptr<CpuDevice> device_;
    int n_threads_ = 0; // of the device
};

} // namespace esp::kernels
