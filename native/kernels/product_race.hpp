// One matrix product as llama.cpp computes it and as our kernels do, through ggml's CPU backend: what comes out, and
// how long it takes. Needs install() (ggml_hook.hpp). Safe to call from several threads, and while others compute.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace esp::kernels {

// A weight matrix: n_rows rows of n_k weights of a ggml type, named as ggml names it, in either case.
struct MatrixShape {
    std::string type;
    std::int64_t n_rows;
    std::int64_t n_k;
};

// How a product is computed.
struct ProductSettings {
    bool ours;         // false: where and how llama.cpp would, repacked where it has a buffer type for that
    bool repack;       // ours: from repacked weights
    const char *limit; // of our instruction set, see best_kernels
    int n_threads;
};

// y = W x, [n_columns][n_rows]. `weights` holds n_bytes bytes, x is [n_columns][n_k].
// Throws std::invalid_argument for what does not fit together and for matrices without a kernel, std::runtime_error
// where ggml cannot compute it.
std::vector<float> product(const MatrixShape &shape, const std::byte *weights, std::size_t n_bytes, const float *x,
                           std::int64_t n_columns, const ProductSettings &settings);

// Microseconds of one product, by place in the list of columns, then by round.
struct RaceTimes {
    std::vector<std::vector<double>> ours;
    std::vector<std::vector<double>> stock;
    bool repacked; // llama.cpp would hold the weights in a buffer of its own, out of our kernels' reach
};

struct RaceSettings {
    const char *limit;
    bool repack; // ours
    int n_threads;
    std::size_t n_bytes; // of weights a side at most: copies of the matrix, or a part of its rows
    double budget_ms;    // of the rounds; there are at least three, unless those take five times as long
};

// Times both in turns on as many copies of the matrix as fit, so that weights come from memory as they do in a pass.
// Throws like product().
RaceTimes race(const MatrixShape &shape, const std::vector<int> &columns, const RaceSettings &settings);

} // namespace esp::kernels
