// ggml's CPU device and what it takes to compute a graph of one's own on it.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

namespace esp::kernels {

template <typename T> T *made(T *result, const char *what) {
    if (result == nullptr) {
        throw std::runtime_error(std::string("ggml cannot make ") + what);
    }
    return result;
}

// Found by name as llama.cpp does: the backend may be a library of its own.
struct CpuDevice {
    ggml_backend_dev_t device;
    ggml_backend_ptr backend;
    ggml_backend_buffer_type_t plain;

    explicit CpuDevice(int n_threads)
        : device(made(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), "a CPU backend")),
          backend(made(ggml_backend_dev_init(device, nullptr), "a CPU backend")),
          plain(ggml_backend_dev_buffer_type(device)) {
        void *const function = question("ggml_backend_set_n_threads");
        made(function, "a CPU backend with a number of threads");
        reinterpret_cast<ggml_backend_set_n_threads_t>(function)(backend.get(), n_threads);
    }

    void *question(const char *name) const {
        return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name);
    }

    void compute(ggml_cgraph *graph) const {
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("ggml cannot compute the product");
        }
    }
};

// For tensors whose numbers lie elsewhere.
inline ggml_context_ptr new_context(std::size_t n_bytes) {
    return ggml_context_ptr(made(ggml_init({n_bytes, nullptr, true}), "a context"));
}

} // namespace esp::kernels
