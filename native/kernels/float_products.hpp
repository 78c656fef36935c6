// Products of weights in floating point.
//
// The ISA's own file has, as static members of a struct:
//   float_rows, float_columns, float_step     sizes of a tile, and of a vector
//   Floats, zero, load_f32, load_f16, load_bf16, multiply_add, sum
#pragma once

#include "kernels/groups.hpp"
#include "kernels/kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace esp::kernels {
namespace { // compiled for several ISAs: the linker must not share what is in here

inline const float *column_of(const Matmul &matmul, std::int64_t c) {
    return reinterpret_cast<const float *>(reinterpret_cast<const std::byte *>(matmul.x) +
                                           matmul.x_stride * static_cast<std::size_t>(c));
}

inline float *result_of(const Matmul &matmul, std::int64_t c) {
    return reinterpret_cast<float *>(reinterpret_cast<std::byte *>(matmul.y) +
                                     matmul.y_stride * static_cast<std::size_t>(c));
}

// Columns that stay as they are.
template <typename Isa> struct FloatColumns {
    using Column = float;
    static constexpr std::int64_t step = Isa::float_step; // weights that are loaded at a time

    static typename Isa::Floats load_column(const Column *at) {
        return Isa::load_f32(reinterpret_cast<const std::byte *>(at));
    }
    static typename Isa::Floats add(typename Isa::Floats weights, typename Isa::Floats column,
                                    typename Isa::Floats sum) {
        return Isa::multiply_add(weights, column, sum);
    }
};

template <typename Isa> struct F32 : FloatColumns<Isa> {
    static constexpr std::size_t weight_bytes = 4;
    static typename Isa::Floats load(const std::byte *at) { return Isa::load_f32(at); }
};

template <typename Isa> struct F16 : FloatColumns<Isa> {
    static constexpr std::size_t weight_bytes = 2;
    static typename Isa::Floats load(const std::byte *at) { return Isa::load_f16(at); }
};

template <typename Isa> struct BF16 : FloatColumns<Isa> {
    static constexpr std::size_t weight_bytes = 2;
    static typename Isa::Floats load(const std::byte *at) { return Isa::load_bf16(at); }
};

template <typename F> constexpr bool rounds_columns = !std::is_same_v<typename F::Column, float>;

template <typename F>
const typename F::Column *prepared_column(const Matmul &matmul, const std::byte *prepared, std::int64_t c) {
    if constexpr (rounds_columns<F>) {
        return reinterpret_cast<const typename F::Column *>(prepared) + matmul.n_k * c;
    } else {
        return column_of(matmul, c);
    }
}

// Rows [row, end), as many as a tile has, of n columns.
template <typename F, typename Isa, int n>
void multiply_float_tile(const Matmul &matmul, const std::byte *prepared, std::int64_t row, std::int64_t end,
                         std::int64_t first) {
    constexpr int n_rows = Isa::float_rows;
    const RowGroup<n_rows> group(matmul, row);
    const typename F::Column *x[n];
    typename Isa::Floats total[n_rows][n];
    for (int c = 0; c < n; ++c) {
        x[c] = prepared_column<F>(matmul, prepared, first + c);
        for (int r = 0; r < n_rows; ++r) {
            total[r][c] = Isa::zero();
        }
    }
    constexpr std::size_t stretch = F::weight_bytes * F::step;
    const std::byte *const next = group.rows[0] + n_rows * matmul.weight_stride;
    for (std::int64_t k = 0; k < matmul.n_k; k += F::step) {
        const std::size_t at = F::weight_bytes * static_cast<std::size_t>(k);
        if (first == 0) {
            prefetch_stretch(next, n_rows * at, n_rows * stretch);
        }
        decltype(F::load_column(x[0])) values[n];
        for (int c = 0; c < n; ++c) {
            values[c] = F::load_column(x[c] + k);
        }
        for (int r = 0; r < n_rows; ++r) {
            const auto weights = F::load(group.rows[r] + at);
            for (int c = 0; c < n; ++c) {
                total[r][c] = F::add(weights, values[c], total[r][c]);
            }
        }
    }
    for (int c = 0; c < n; ++c) {
        for (int r = 0; r < n_rows && row + r < end; ++r) {
            result_of(matmul, first + c)[row + r] = Isa::sum(total[r][c]);
        }
    }
}

template <typename F, typename Isa, int widest = Isa::float_columns>
void multiply_float_columns(std::int64_t width, const Matmul &matmul, const std::byte *prepared, std::int64_t row,
                            std::int64_t end, std::int64_t first) {
    if constexpr (widest > 1) {
        if (width < widest) {
            multiply_float_columns<F, Isa, widest - 1>(width, matmul, prepared, row, end, first);
            return;
        }
    }
    multiply_float_tile<F, Isa, widest>(matmul, prepared, row, end, first);
}

// Repacked, rows are the same rows: in memory of huge pages, which a file does not have, they are read faster. Those of
// four bytes a weight are not.
template <typename F> constexpr bool gains_by_copying = F::weight_bytes == 2;

template <typename F> std::size_t copied_stride(const Matmul &matmul) {
    return F::weight_bytes * static_cast<std::size_t>(matmul.n_k);
}

template <typename F> std::size_t copied_size(std::int64_t n_rows, std::int64_t n_k) {
    return rounded_up<std::size_t>(F::weight_bytes * static_cast<std::size_t>(n_rows * n_k), 64);
}

template <typename F> void copy_rows(const Matmul &matmul, std::byte *to, std::int64_t begin, std::int64_t end) {
    const std::size_t stride = copied_stride<F>(matmul);
    for (auto row = static_cast<std::size_t>(begin); row < static_cast<std::size_t>(end); ++row) {
        std::memcpy(to + stride * row, matmul.weights + matmul.weight_stride * row, stride);
    }
}

template <typename F, typename Isa>
void multiply_float(const Matmul &of, const std::byte *prepared, std::int64_t begin, std::int64_t end) {
    Matmul matmul = of;
    if (of.repacked != nullptr) {
        matmul.weights = of.repacked;
        matmul.weight_stride = copied_stride<F>(of);
    }
    for (std::int64_t row = begin; row < end; row += Isa::float_rows) { // the weights of a tile stay in the cache
        for (std::int64_t c = 0; c < matmul.n_columns; c += Isa::float_columns) {
            multiply_float_columns<F, Isa>(matmul.n_columns - c, matmul, prepared, row, end, c);
        }
    }
}

template <typename F> std::size_t float_columns_size(std::int64_t n_k, std::int64_t n_columns) {
    const auto bytes = sizeof(typename F::Column) * static_cast<std::size_t>(n_k * n_columns);
    return rounds_columns<F> ? rounded_up<std::size_t>(bytes, 64) : 0;
}

template <typename F>
void prepare_float(const Matmul &matmul, std::byte *prepared, std::int64_t begin, std::int64_t end) {
    if constexpr (rounds_columns<F>) {
        for (std::int64_t c = begin; c < end; ++c) {
            F::round(column_of(matmul, c), matmul.n_k,
                     reinterpret_cast<typename F::Column *>(prepared) + matmul.n_k * c);
        }
    }
}

template <typename F, typename Isa>
constexpr FormatKernel float_kernel{F::step,
                                    float_columns_size<F>,
                                    prepare_float<F>,
                                    multiply_float<F, Isa>,
                                    Isa::float_rows,
                                    gains_by_copying<F> ? copied_size<F> : nullptr,
                                    gains_by_copying<F> ? copy_rows<F> : nullptr};

} // namespace
} // namespace esp::kernels
