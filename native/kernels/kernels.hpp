// Matrix products of a few rows over ggml's own weight formats, and tree attention: one table of functions an ISA.
//
// A group of rows is unpacked once and used for all columns, so that n columns cost little more than one. Weights are
// read as ggml stores them, or repacked: a group's rows side by side, as the products want them, which saves most of
// the unpacking. What is computed for a (weight row, column) pair, and in which
// order, does not depend on n, on the other columns or on the threads: results are width-invariant by construction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace esp::kernels {

// Weight formats with kernels; the order is that of format_of() in ggml_hook.cpp.
enum class Format : int { q4_0, q4_1, q8_0, q4_k, q6_k, bf16, f16, f32, count };

// y[c][r] = sum_k weights[r][k] * x[c][k]; strides in bytes.
struct Matmul {
    const std::byte *weights;
    std::size_t weight_stride;
    std::int64_t n_rows;
    std::int64_t n_k;
    const float *x;
    std::size_t x_stride;
    std::int64_t n_columns;
    float *y;
    std::size_t y_stride;
    const std::byte *repacked = nullptr; // the weights once more, by FormatKernel::repack; where they are read then
    std::int64_t fetch_end = 0;          // row up to which the cache may be filled ahead: who computes goes on there
};

// How one format is multiplied on one ISA.
struct FormatKernel {
    // n_k must be a multiple of this many weights
    std::int64_t k_multiple;
    // bytes of the prepared columns, a multiple of 64
    std::size_t (*columns_size)(std::int64_t n_k, std::int64_t n_columns);
    // Prepares columns [begin, end) of x into `columns` (64-byte aligned), which all threads may share.
    void (*prepare)(const Matmul &, std::byte *columns, std::int64_t begin, std::int64_t end);
    // Rows [begin, end) of y; begin is a multiple of row_group.
    void (*multiply)(const Matmul &, const std::byte *columns, std::int64_t begin, std::int64_t end);
    std::int64_t row_group;
    // Bytes of repacked weights, a multiple of 64; null where nothing would be gained.
    std::size_t (*repacked_size)(std::int64_t n_rows, std::int64_t n_k);
    // Repacks rows [begin, end) into memory for all of them (64-byte aligned); begin is a multiple of row_group.
    void (*repack)(const Matmul &, std::byte *to, std::int64_t begin, std::int64_t end);
};

// Attention of a few rows over one KV cache in half precision: every chunk of cells is unpacked once for all rows and
// all heads that share it. A row's result depends on the cells it sees and their places, not on the other rows.
struct Attention {
    const std::byte *q; // float; strides in bytes
    std::size_t q_row_stride, q_head_stride;
    const std::byte *k; // half
    std::size_t k_cell_stride, k_head_stride;
    const std::byte *v; // half
    std::size_t v_cell_stride, v_head_stride;
    const std::byte *mask; // half, [row][cell]: added to the scores
    std::size_t mask_row_stride;
    std::int64_t n_rows, n_heads, n_kv_heads, n_cells;
    std::int64_t k_size, v_size; // of a head
    float scale;
    float *y; // [row][head][v_size]
};

// Two phases with a barrier in between; `partial` (64-byte aligned, partial_size bytes) is shared by all threads.
struct AttentionKernel {
    std::int64_t cells_multiple; // what n_cells must be a multiple of
    std::int64_t size_multiple;  // and k_size and v_size,
    std::int64_t largest_size;   // which are at most this
    std::int64_t most_rows;
    std::size_t (*partial_size)(const Attention &);
    void (*attend)(const Attention &, float *partial, std::int64_t thread, std::int64_t threads); // a thread's share
    void (*combine)(const Attention &, const float *partial, std::int64_t begin,
                    std::int64_t end); // of n_rows * n_heads
};

// The kernels of one ISA; a null pointer where a format has none.
struct KernelTable {
    const char *isa;
    const FormatKernel *formats[static_cast<int>(Format::count)];
    const AttentionKernel *attention;
};

// The fastest table that this CPU can run, null where there is none. `limit` names the best ISA that may be used
// ("avx512", "avx2", "neon"; null: any), to test the others.
const KernelTable *best_kernels(const char *limit);

} // namespace esp::kernels
