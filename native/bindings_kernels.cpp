// The Python face of the kernels.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include "ggml.h"
#include "kernels/ggml_hook.hpp"
#include "kernels/product_race.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace esp::kernels;
using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Result = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;
using Times = std::vector<std::vector<double>>;

const char *chars(const std::optional<std::string> &text) { return text ? text->c_str() : nullptr; }

Result product_of(const std::string &type, const Bytes &weights, const Matrix &x, std::int64_t n_rows, bool ours,
                  bool repack, const std::optional<std::string> &limit, int n_threads) {
    const auto n_columns = static_cast<std::int64_t>(x.shape(0)), n_k = static_cast<std::int64_t>(x.shape(1));
    std::vector<float> y;
    {
        const nb::gil_scoped_release others_may_run;
        y = product({type, n_rows, n_k}, reinterpret_cast<const std::byte *>(weights.data()), weights.size(), x.data(),
                    n_columns, {ours, repack, chars(limit), n_threads});
    }
    auto *const values = new std::vector<float>(std::move(y));
    const nb::capsule owner(values, [](void *memory) noexcept { delete static_cast<std::vector<float> *>(memory); });
    return Result(values->data(), {x.shape(0), static_cast<std::size_t>(n_rows)}, owner);
}

std::tuple<Times, Times, bool> race_of(const std::string &type, std::int64_t n_rows, std::int64_t n_k,
                                       const std::vector<int> &columns, const std::optional<std::string> &limit,
                                       bool repack, int n_threads, std::size_t n_bytes, double budget_ms) {
    const nb::gil_scoped_release others_may_run;
    RaceTimes times = race({type, n_rows, n_k}, columns, {chars(limit), repack, n_threads, n_bytes, budget_ms});
    return {std::move(times.ours), std::move(times.stock), times.repacked};
}

} // namespace

void bind_kernels(nb::module_ &m) {
    m.def("install_kernels", &install,
          "Offer kernels to ggml's CPU backend: the instruction set, empty = this CPU has none.");
    nb::class_<Taken>(m, "TakenWeights", "Weights that the kernels compute with, until this object goes.")
        .def_ro("matrices", &Taken::matrices, "How many of which ggml type.")
        .def_ro("repacked_bytes", &Taken::repacked_bytes, "Size of those that are kept once more, repacked.");
    m.def(
        "take_over_weights",
        [](std::uintptr_t model, const std::optional<std::string> &limit, bool repack,
           const std::vector<std::string> &lookups, int n_threads) {
            const nb::gil_scoped_release others_may_run;
            return take_over(reinterpret_cast<const llama_model *>(model),
                             {chars(limit), n_threads, repack, {lookups.begin(), lookups.end()}});
        },
        "model"_a, "limit"_a.none(), "repack"_a, "lookups"_a, "n_threads"_a,
        "Give a model's matrices to the kernels. Repacked ones are those whose names are not among the lookups.");
    m.def("ggml_version", &ggml_version, "Version of the ggml library in this process.");
    m.def("kernel_products", &n_products, "Matrix products computed by the kernels so far.");
    m.def("kernel_attentions", &n_attentions, "Attention of layers computed by the kernels so far.");
    m.def(
        "kernel_product", &product_of, "type"_a, "weights"_a, "x"_a, "n_rows"_a, "ours"_a, "repack"_a, "limit"_a.none(),
        "n_threads"_a,
        "float32[n_columns, n_rows] = x of float32[n_columns, n_k] times the weights of a ggml type, as they lie in a "
        "file: by our kernels, or where and how llama.cpp would.");
    m.def("race_kernels", &race_of, "type"_a, "n_rows"_a, "n_k"_a, "columns"_a, "limit"_a.none(), "repack"_a,
          "n_threads"_a, "n_bytes"_a, "budget_ms"_a,
          "Microseconds of a product with our kernels and with llama.cpp's, by place in columns and by round, and "
          "whether llama.cpp repacks the weights.");
}
