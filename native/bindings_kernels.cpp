// The Python face of the kernels.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "ggml.h"
#include "kernels/ggml_hook.hpp"

namespace nb = nanobind;
using namespace nb::literals;

void bind_kernels(nb::module_ &m) {
    using namespace esp::kernels;
    m.def("install_kernels", &install,
          "Offer kernels to ggml's CPU backend: the instruction set, empty = this CPU has none.");
    m.def(
        "take_over_weights",
        [](std::uintptr_t model, const std::optional<std::string> &limit) {
            return take_over(reinterpret_cast<const llama_model *>(model), limit ? limit->c_str() : nullptr);
        },
        "model"_a, "limit"_a.none(), "Give a model's matrices to the kernels: how many of which ggml type.");
    m.def("ggml_version", &ggml_version, "Version of the ggml library in this process.");
    m.def("kernel_products", &n_products, "Matrix products computed by the kernels so far.");
}
