// What the products of several ISAs have in common: the weight formats, and how rows, chunks and columns are walked.
//
// The vectors come from the ISA's own file, as a struct of static members:
//   rows, planes, columns_a_tile, float_rows, float_columns     sizes of groups and tiles
//   Bytes                     [row][4 successive bytes]; load_transposed, both, either, left, right work on them
//   put<F>                    keeps four weights of each row in the form that multiply_tile reads
//   zero_point<F>             what those are above the weights
//   widen, spread             half-precision numbers and signed bytes of each row as floats
//   round_block               32 numbers as int8
//   multiply_tile<F, n>       the integer product of a chunk and n columns
//   Floats, zero, load_f32, load_f16, load_bf16, multiply_add, sum     the products in floating point
#pragma once

#include "kernels/int8_columns.hpp"
#include "kernels/kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace esp::kernels {
namespace { // compiled for several ISAs: the linker must not share what is in here

// std::min is a function that the linker would share.
template <typename T> constexpr T smaller(T a, T b) { return b < a ? b : a; }

constexpr std::int64_t blocks_a_chunk = 32; // 1024 weights of a row group: the scratch fits the first-level cache
constexpr int steps_a_block = 8;            // of four weights

// Unpacked weights of a row group: for every block of 32, eight steps of [row][4 successive weights].
template <typename Isa> struct Unpacked {
    alignas(64) std::uint8_t weights[blocks_a_chunk][Isa::planes][steps_a_block][4 * Isa::rows];
    alignas(64) float scales[blocks_a_chunk][2][Isa::rows]; // a block, or its halves
    alignas(64) float minima[blocks_a_chunk][Isa::rows];
    alignas(64) std::uint16_t halves[blocks_a_chunk][2][Isa::rows]; // half-precision numbers of a unit, as they are
};

// n rows of the weight matrix; rows past the end repeat the last one.
template <int n> struct RowGroup {
    const std::byte *rows[n];

    RowGroup(const Matmul &matmul, std::int64_t first) {
        for (int i = 0; i < n; ++i) {
            const std::int64_t row = smaller(first + i, matmul.n_rows - 1);
            rows[i] = matmul.weights + matmul.weight_stride * static_cast<std::size_t>(row);
        }
    }
};

inline const float *column_of(const Matmul &matmul, std::int64_t c) {
    return reinterpret_cast<const float *>(reinterpret_cast<const std::byte *>(matmul.x) +
                                           matmul.x_stride * static_cast<std::size_t>(c));
}

inline float *result_of(const Matmul &matmul, std::int64_t c) {
    return reinterpret_cast<float *>(reinterpret_cast<std::byte *>(matmul.y) +
                                     matmul.y_stride * static_cast<std::size_t>(c));
}

// Fetches what the next row group will read while this one is computed. Rows lie one after the other, so the group is
// one stretch of memory; many short streams are more than what a processor recognises by itself. Into the second
// level: the first holds the scratch.
inline void prefetch_stretch(const std::byte *next, std::size_t from, std::size_t bytes) {
    for (std::size_t at = from & ~std::size_t{63}; at < from + bytes; at += 64) {
        __builtin_prefetch(next + at, 0, 2);
    }
}

// ---- formats: how a unit of a row becomes blocks of 32 weights ------------------------------------------------------

// What most formats are; `bits` of a weight, stored `zero_point` above it, or signed.
struct Integers {
    static constexpr std::size_t halves_at = 0; // half-precision numbers within a unit
    static constexpr int blocks_a_unit = 1, n_halves = 1;
    static constexpr int halves = 1; // parts of a block with scales of their own
    static constexpr int bits = 4, zero_point = 0;
    static constexpr bool is_signed = false, has_minima = false;
};

template <typename Isa, int shift> typename Isa::Bytes nibbles(typename Isa::Bytes bytes) {
    return Isa::both(Isa::template right<shift>(bytes), 0x0f);
}

// Sixteen bytes of each row: low nibbles are steps from `step` on of block `low`, high ones from `high_step` of `high`.
template <typename F, typename Isa>
void unpack_nibbles(const RowGroup<Isa::rows> &group, std::size_t offset, Unpacked<Isa> &to, std::int64_t low, int step,
                    std::int64_t high, int high_step) {
    typename Isa::Bytes parts[4];
    Isa::load_transposed(group, offset, parts);
    for (int j = 0; j < 4; ++j) {
        Isa::template put<F>(to.weights[low], step + j, nibbles<Isa, 0>(parts[j]));
        Isa::template put<F>(to.weights[high], high_step + j, nibbles<Isa, 4>(parts[j]));
    }
}

struct Q8_0 : Integers {
    static constexpr std::size_t unit_bytes = 34;
    static constexpr int bits = 8;
    static constexpr bool is_signed = true;

    template <typename Isa>
    static void unpack(const RowGroup<Isa::rows> &group, std::size_t at, Unpacked<Isa> &to, std::int64_t block) {
        for (int half = 0; half < 2; ++half) {
            typename Isa::Bytes parts[4];
            Isa::load_transposed(group, at + 2 + 16 * static_cast<std::size_t>(half), parts);
            for (int j = 0; j < 4; ++j) {
                Isa::template put<Q8_0>(to.weights[block], 4 * half + j, parts[j]);
            }
        }
        Isa::widen(to.halves[block][0], to.scales[block][0]);
    }
};

struct Q4_0 : Integers {
    static constexpr std::size_t unit_bytes = 18;
    static constexpr int zero_point = 8;

    template <typename Isa>
    static void unpack(const RowGroup<Isa::rows> &group, std::size_t at, Unpacked<Isa> &to, std::int64_t block) {
        unpack_nibbles<Q4_0>(group, at + 2, to, block, 0, block, 4);
        Isa::widen(to.halves[block][0], to.scales[block][0]);
    }
};

struct Q4_1 : Integers {
    static constexpr std::size_t unit_bytes = 20;
    static constexpr int n_halves = 2;
    static constexpr bool has_minima = true;

    template <typename Isa>
    static void unpack(const RowGroup<Isa::rows> &group, std::size_t at, Unpacked<Isa> &to, std::int64_t block) {
        unpack_nibbles<Q4_1>(group, at + 4, to, block, 0, block, 4);
        Isa::widen(to.halves[block][0], to.scales[block][0]);
        Isa::widen(to.halves[block][1], to.minima[block]);
    }
};

// d, dmin, eight 6-bit scales and minima in 12 bytes, 128 bytes of nibbles: w = d * scale * q - dmin * minimum.
struct Q4_K : Integers {
    static constexpr std::size_t unit_bytes = 144;
    static constexpr int blocks_a_unit = 8, n_halves = 2;
    static constexpr bool has_minima = true;

    template <typename Isa>
    static void unpack(const RowGroup<Isa::rows> &group, std::size_t at, Unpacked<Isa> &to, std::int64_t block) {
        for (int pair = 0; pair < 4; ++pair) {
            for (int half = 0; half < 2; ++half) {
                const auto offset = at + 16 + static_cast<std::size_t>(32 * pair + 16 * half);
                unpack_nibbles<Q4_K>(group, offset, to, block + 2 * pair, 4 * half, block + 2 * pair + 1, 4 * half);
            }
        }
        unpack_scales(group, at, to, block);
    }

  private:
    template <typename Isa>
    static void unpack_scales(const RowGroup<Isa::rows> &group, std::size_t at, Unpacked<Isa> &to, std::int64_t block) {
        using Bytes = typename Isa::Bytes;
        Bytes parts[4]; // d and dmin, 12 bytes of scales and minima
        Isa::load_transposed(group, at, parts);
        const auto upper = [](Bytes bytes) { return Isa::both(Isa::template right<2>(bytes), 0x30); };
        const Bytes scales[2] = {Isa::both(parts[1], 0x3f), Isa::either(nibbles<Isa, 0>(parts[3]), upper(parts[1]))};
        const Bytes minima[2] = {Isa::both(parts[2], 0x3f), Isa::either(nibbles<Isa, 4>(parts[3]), upper(parts[2]))};
        alignas(64) float d[Isa::rows], dmin[Isa::rows];
        Isa::widen(to.halves[block / blocks_a_unit][0], d);
        Isa::widen(to.halves[block / blocks_a_unit][1], dmin);
        for (float &factor : dmin) {
            factor = -factor;
        }
        for (int j = 0; j < blocks_a_unit; ++j) {
            Isa::spread(scales[j / 4], j % 4, d, to.scales[block + j][0]);
            Isa::spread(minima[j / 4], j % 4, dmin, to.minima[block + j]);
        }
    }
};

// 128 bytes of low nibbles, 64 of upper bit pairs, sixteen signed scales, d: w = d * scale * (q - 32).
struct Q6_K : Integers {
    static constexpr std::size_t unit_bytes = 210, halves_at = 208;
    static constexpr int blocks_a_unit = 8, halves = 2;
    static constexpr int bits = 6, zero_point = 32;

    template <typename Isa>
    static void unpack(const RowGroup<Isa::rows> &group, std::size_t at, Unpacked<Isa> &to, std::int64_t block) {
        for (int part = 0; part < 2; ++part) {
            for (int half = 0; half < 2; ++half) {
                unpack_sixteen(group, at, to, block + 4 * part, part, half);
            }
        }
        unpack_scales(group, at, to, block);
    }

  private:
    // Half of the four blocks of a part.
    template <typename Isa>
    static void unpack_sixteen(const RowGroup<Isa::rows> &group, std::size_t at, Unpacked<Isa> &to, std::int64_t block,
                               int part, int half) {
        using Bytes = typename Isa::Bytes;
        Bytes first[4], second[4], upper[4];
        Isa::load_transposed(group, at + static_cast<std::size_t>(64 * part + 16 * half), first);
        Isa::load_transposed(group, at + static_cast<std::size_t>(64 * part + 16 * half + 32), second);
        Isa::load_transposed(group, at + static_cast<std::size_t>(32 * part + 16 * half + 128), upper);
        for (int j = 0; j < 4; ++j) {
            const auto put = [&](int of, Bytes low, Bytes bits_at_4) {
                Isa::template put<Q6_K>(to.weights[block + of], 4 * half + j,
                                        Isa::either(low, Isa::both(bits_at_4, 0x30)));
            };
            put(0, nibbles<Isa, 0>(first[j]), Isa::template left<4>(upper[j]));
            put(1, nibbles<Isa, 0>(second[j]), Isa::template left<2>(upper[j]));
            put(2, nibbles<Isa, 4>(first[j]), upper[j]);
            put(3, nibbles<Isa, 4>(second[j]), Isa::template right<2>(upper[j]));
        }
    }

    template <typename Isa>
    static void unpack_scales(const RowGroup<Isa::rows> &group, std::size_t at, Unpacked<Isa> &to, std::int64_t block) {
        typename Isa::Bytes parts[4];
        Isa::load_transposed(group, at + 192, parts);
        alignas(64) float d[Isa::rows];
        Isa::widen(to.halves[block / blocks_a_unit][0], d);
        for (int i = 0; i < 2 * blocks_a_unit; ++i) { // of sixteen weights each
            Isa::spread(parts[i / 4], i % 4, d, to.scales[block + i / 2][i % 2]);
        }
    }
};

// ---- products of int8 -----------------------------------------------------------------------------------------------

// Collects the half-precision numbers of all units of a chunk. Reading row by row also brings the chunk into the cache
// as one stream. (Written in twos and read as vectors, they must not be read back at once.)
template <typename F, typename Isa>
void collect_halves(const RowGroup<Isa::rows> &group, std::size_t at, std::int64_t n_units, Unpacked<Isa> &to) {
    for (int i = 0; i < Isa::rows; ++i) {
        const std::byte *from = group.rows[i] + at + F::halves_at;
        for (std::int64_t unit = 0; unit < n_units; ++unit, from += F::unit_bytes) {
            for (int number = 0; number < F::n_halves; ++number) {
                std::memcpy(&to.halves[unit][number][i], from + 2 * number, sizeof(std::uint16_t));
            }
        }
    }
}

template <typename F, typename Isa>
void unpack_chunk(const Matmul &matmul, const RowGroup<Isa::rows> &group, std::int64_t chunk, std::int64_t n_blocks,
                  Unpacked<Isa> &to) {
    constexpr std::size_t stretch = Isa::rows * F::unit_bytes;
    const std::byte *const next = group.rows[0] + Isa::rows * matmul.weight_stride;
    auto unit = static_cast<std::size_t>(chunk / F::blocks_a_unit);
    collect_halves<F>(group, F::unit_bytes * unit, n_blocks / F::blocks_a_unit, to);
    for (std::int64_t b = 0; b < n_blocks; b += F::blocks_a_unit, ++unit) {
        prefetch_stretch(next, stretch * unit, stretch);
        F::unpack(group, F::unit_bytes * unit, to, b);
    }
}

// Adds the products of a chunk to the sums of `width` columns, from `first` on.
template <typename F, typename Isa, int widest = Isa::columns_a_tile>
void multiply_columns(std::int64_t width, const Unpacked<Isa> &unpacked, const Int8Columns &columns, std::int64_t chunk,
                      std::int64_t n_blocks, std::int64_t first, float (*sums)[Isa::rows]) {
    if constexpr (widest > 1) {
        if (width < widest) {
            multiply_columns<F, Isa, widest - 1>(width, unpacked, columns, chunk, n_blocks, first, sums);
            return;
        }
    }
    Isa::template multiply_tile<F, widest>(unpacked, columns, chunk, n_blocks, first, sums);
}

// The sums of a row group and `n` columns, from `first` on.
template <typename F, typename Isa>
void multiply_group(const Matmul &matmul, const Int8Columns &columns, const RowGroup<Isa::rows> &group,
                    std::int64_t first, std::int64_t n, float (*sums)[Isa::rows]) {
    static thread_local Unpacked<Isa> unpacked;
    const std::int64_t n_blocks = matmul.n_k / 32;
    std::memset(sums, 0, sizeof *sums * static_cast<std::size_t>(n));
    for (std::int64_t chunk = 0; chunk < n_blocks; chunk += blocks_a_chunk) {
        const std::int64_t size = smaller(blocks_a_chunk, n_blocks - chunk);
        unpack_chunk<F>(matmul, group, chunk, size, unpacked);
        for (std::int64_t c = 0; c < n; c += Isa::columns_a_tile) {
            const auto width = smaller<std::int64_t>(Isa::columns_a_tile, n - c);
            multiply_columns<F>(width, unpacked, columns, chunk, size, first + c, sums + c);
        }
    }
}

template <typename F, typename Isa>
void multiply_int8(const Matmul &matmul, const std::byte *prepared, std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t strip = 64; // columns whose sums are kept while the chunks of a row group pass by
    alignas(64) float sums[strip][Isa::rows];
    const Int8Columns columns = Int8Columns::of(prepared, matmul.n_k, matmul.n_columns, F::halves);
    for (std::int64_t first = 0; first < matmul.n_columns; first += strip) {
        const std::int64_t n = smaller(strip, matmul.n_columns - first);
        for (std::int64_t row = begin; row < end; row += Isa::rows) {
            multiply_group<F, Isa>(matmul, columns, RowGroup<Isa::rows>(matmul, row), first, n, sums);
            const auto n_rows = static_cast<std::size_t>(smaller<std::int64_t>(Isa::rows, end - row));
            for (std::int64_t c = 0; c < n; ++c) {
                std::memcpy(result_of(matmul, first + c) + row, sums[c], sizeof(float) * n_rows);
            }
        }
    }
}

// 32 numbers as int8 with one scale, and the sums of both halves.
struct RoundedBlock {
    float scale;
    std::int32_t sums[2];
};

// The factor that takes numbers up to `largest` to int8; zero where it would not be finite.
inline float to_int8(float largest) { return largest > 0x1p-119F ? 127.0F / largest : 0.0F; }

template <typename F, typename Isa>
void prepare_int8(const Matmul &matmul, std::byte *prepared, std::int64_t begin, std::int64_t end) {
    const Int8Columns columns = Int8Columns::of(prepared, matmul.n_k, matmul.n_columns, F::halves);
    for (std::int64_t c = begin; c < end; ++c) {
        const float *const x = column_of(matmul, c);
        for (std::int64_t b = 0; b < matmul.n_k / 32; ++b) {
            const Int8Columns::View at = columns.at(b, c);
            const RoundedBlock block = Isa::round_block(x + 32 * b, at.values);
            const std::int32_t sum = block.sums[0] + block.sums[1];
            at.scales[0] = block.scale;
            at.sums[0] = block.scale * static_cast<float>(sum);
            for (int half = 0; half < F::halves; ++half) {
                at.offsets[half] = -Isa::template zero_point<F> * (F::halves == 2 ? block.sums[half] : sum);
            }
        }
    }
}

template <typename F, typename Isa>
constexpr FormatKernel int8_kernel{32 * F::blocks_a_unit, Int8Columns::size<F::halves>, prepare_int8<F, Isa>,
                                   multiply_int8<F, Isa>, Isa::rows};

// ---- products in floating point; the columns stay as they are -------------------------------------------------------

template <typename Isa> struct F32 {
    static constexpr std::size_t weight_bytes = 4;
    static typename Isa::Floats load(const std::byte *at) { return Isa::load_f32(at); }
};

template <typename Isa> struct F16 {
    static constexpr std::size_t weight_bytes = 2;
    static typename Isa::Floats load(const std::byte *at) { return Isa::load_f16(at); }
};

template <typename Isa> struct BF16 {
    static constexpr std::size_t weight_bytes = 2;
    static typename Isa::Floats load(const std::byte *at) { return Isa::load_bf16(at); }
};

// Rows [row, end), as many as a tile has, of n columns.
template <typename F, typename Isa, int n>
void multiply_float_tile(const Matmul &matmul, std::int64_t row, std::int64_t end, std::int64_t first) {
    constexpr int n_rows = Isa::float_rows;
    const RowGroup<n_rows> group(matmul, row);
    const std::byte *x[n];
    typename Isa::Floats total[n_rows][n];
    for (int c = 0; c < n; ++c) {
        x[c] = reinterpret_cast<const std::byte *>(column_of(matmul, first + c));
        for (int r = 0; r < n_rows; ++r) {
            total[r][c] = Isa::zero();
        }
    }
    constexpr std::size_t stretch = n_rows * F::weight_bytes * Isa::float_step;
    const std::byte *const next = group.rows[0] + n_rows * matmul.weight_stride;
    for (std::size_t k = 0; k < static_cast<std::size_t>(matmul.n_k); k += Isa::float_step) {
        if (first == 0) {
            prefetch_stretch(next, n_rows * F::weight_bytes * k, stretch);
        }
        typename Isa::Floats values[n];
        for (int c = 0; c < n; ++c) {
            values[c] = Isa::load_f32(x[c] + sizeof(float) * k);
        }
        for (int r = 0; r < n_rows; ++r) {
            const auto weights = F::load(group.rows[r] + F::weight_bytes * k);
            for (int c = 0; c < n; ++c) {
                total[r][c] = Isa::multiply_add(weights, values[c], total[r][c]);
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
void multiply_float_columns(std::int64_t width, const Matmul &matmul, std::int64_t row, std::int64_t end,
                            std::int64_t first) {
    if constexpr (widest > 1) {
        if (width < widest) {
            multiply_float_columns<F, Isa, widest - 1>(width, matmul, row, end, first);
            return;
        }
    }
    multiply_float_tile<F, Isa, widest>(matmul, row, end, first);
}

template <typename F, typename Isa>
void multiply_float(const Matmul &matmul, const std::byte *, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; row += Isa::float_rows) { // the weights of a tile stay in the cache
        for (std::int64_t c = 0; c < matmul.n_columns; c += Isa::float_columns) {
            multiply_float_columns<F, Isa>(matmul.n_columns - c, matmul, row, end, c);
        }
    }
}

inline std::size_t no_columns(std::int64_t, std::int64_t) { return 0; }
inline void prepare_nothing(const Matmul &, std::byte *, std::int64_t, std::int64_t) {}

template <typename F, typename Isa>
constexpr FormatKernel float_kernel{Isa::float_step, no_columns, prepare_nothing, multiply_float<F, Isa>,
                                    Isa::float_rows};

// In the order of Format.
template <typename Isa> constexpr KernelTable table_of(const char *isa) {
    return {isa,
            {&int8_kernel<Q4_0, Isa>, &int8_kernel<Q4_1, Isa>, &int8_kernel<Q8_0, Isa>, &int8_kernel<Q4_K, Isa>,
             &int8_kernel<Q6_K, Isa>, &float_kernel<BF16<Isa>, Isa>, &float_kernel<F16<Isa>, Isa>,
             &float_kernel<F32<Isa>, Isa>},
            nullptr};
}

} // namespace
} // namespace esp::kernels
