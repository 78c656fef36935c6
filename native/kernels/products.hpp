// What the products of several ISAs have in common: how groups of rows, chunks and columns are walked.
//
// The vectors come from the ISA's own file, as a struct of static members:
//   rows, planes, columns_a_tile     sizes of groups and tiles
//   Bytes                     [row][4 successive bytes]; load, load_transposed, both, either, left, right work on them
//   put<F>                    keeps four weights of each row in the form that add_block reads
//   zero_point<F>             what those are above the weights
//   widen, spread             half-precision numbers and signed bytes of each row as floats
//   round_block               32 numbers as int8
//   Sums, load_sums, store_sums    a float for each row
//   add_block<F, n>           adds the products of a block and n columns to their sums
// and what float_products.hpp needs.
#pragma once

#include "kernels/float_products.hpp"
#include "kernels/formats.hpp"
#include "kernels/int8_columns.hpp"
#include "kernels/kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace esp::kernels {
namespace { // compiled for several ISAs: the linker must not share what is in here

// Blocks that are unpacked where they are used: for one tile of columns.
template <typename F, typename Isa, typename Source> struct UnpackedAtOnce {
    using Blocks = Block<Isa>[F::blocks_a_unit];
    static constexpr int columns_at_once = Source::columns_at_once;
    const Source &from;
    std::int64_t first; // unit of the chunk

    const Block<Isa> *unit(std::int64_t unit, Blocks &here) const {
        from.prefetch(first + unit);
        F::template unpack<Isa>(from, first + unit, here);
        return here;
    }
};

// Blocks of a chunk that several tiles share.
template <typename F, typename Isa> struct UnpackedBefore {
    struct Blocks {};
    static constexpr int columns_at_once = Isa::columns_a_tile;
    const Block<Isa> *blocks;

    const Block<Isa> *unit(std::int64_t unit, Blocks &) const { return blocks + F::blocks_a_unit * unit; }
};

// Adds the products of a chunk to the sums of n columns, from `first` on. With everything inlined (flatten), weights
// and sums stay in registers.
template <typename F, typename Isa, int n, typename Units>
[[gnu::flatten]] void multiply_tile(const Units &units, const Int8Columns &columns, std::int64_t chunk,
                                    std::int64_t n_blocks, std::int64_t first, float (*sums)[Isa::rows]) {
    typename Isa::Sums total[n];
    for (int c = 0; c < n; ++c) {
        total[c] = Isa::load_sums(sums[c]);
    }
    for (std::int64_t b = 0; b < n_blocks; b += F::blocks_a_unit) {
        typename Units::Blocks here;
        const Block<Isa> *const blocks = units.unit(b / F::blocks_a_unit, here);
        for (int i = 0; i < F::blocks_a_unit; ++i) {
            Isa::template add_block<F, n>(blocks[i], columns.at(chunk + b + i, first), total);
        }
    }
    for (int c = 0; c < n; ++c) {
        Isa::store_sums(sums[c], total[c]);
    }
}

// The same for a width that is known when it runs.
template <typename F, typename Isa, typename Units, int widest>
void multiply_columns(std::int64_t width, const Units &units, const Int8Columns &columns, std::int64_t chunk,
                      std::int64_t n_blocks, std::int64_t first, float (*sums)[Isa::rows]) {
    if constexpr (widest > 1) {
        if (width < widest) {
            multiply_columns<F, Isa, Units, widest - 1>(width, units, columns, chunk, n_blocks, first, sums);
            return;
        }
    }
    multiply_tile<F, Isa, widest>(units, columns, chunk, n_blocks, first, sums);
}

template <typename F, typename Isa, typename Source>
[[gnu::flatten]] void unpack_chunk(const Source &source, std::int64_t first, std::int64_t n_blocks, Block<Isa> *to) {
    for (std::int64_t b = 0; b < n_blocks; b += F::blocks_a_unit) {
        const std::int64_t unit = first + b / F::blocks_a_unit;
        source.prefetch(unit);
        F::template unpack<Isa>(source, unit, to + b);
    }
}

// Adds the products of a chunk to the sums of n columns, from `first` on, tile by tile.
template <typename F, typename Isa, typename Units>
void multiply_chunk(const Units &units, const Int8Columns &columns, std::int64_t chunk, std::int64_t n_blocks,
                    std::int64_t first, std::int64_t n, float (*sums)[Isa::rows]) {
    constexpr int widest = smaller(Units::columns_at_once, Isa::columns_a_tile);
    for (std::int64_t c = 0; c < n; c += widest) {
        const auto width = smaller<std::int64_t>(widest, n - c);
        multiply_columns<F, Isa, Units, widest>(width, units, columns, chunk, n_blocks, first + c, sums + c);
    }
}

// The sums of a row group and `n` columns, from `first` on.
template <typename F, typename Isa, typename Source>
void multiply_group(Source &&source, const Int8Columns &columns, std::int64_t n_blocks, std::int64_t first,
                    std::int64_t n, float (*sums)[Isa::rows]) {
    using Units = UnpackedAtOnce<F, Isa, std::remove_reference_t<Source>>;
    std::memset(sums, 0, sizeof *sums * static_cast<std::size_t>(n));
    for (std::int64_t chunk = 0; chunk < n_blocks; chunk += blocks_a_chunk) {
        const std::int64_t size = smaller(blocks_a_chunk, n_blocks - chunk), unit = chunk / F::blocks_a_unit;
        source.begin(unit, size / F::blocks_a_unit);
        const Units units{source, unit};
        if (n <= Units::columns_at_once) {
            multiply_chunk<F, Isa>(units, columns, chunk, size, first, n, sums);
        } else {
            Block<Isa> blocks[blocks_a_chunk];
            unpack_chunk<F>(source, unit, size, blocks);
            multiply_chunk<F, Isa>(UnpackedBefore<F, Isa>{blocks}, columns, chunk, size, first, n, sums);
        }
    }
}

template <typename F, typename Isa>
void multiply_int8(const Matmul &matmul, const std::byte *prepared, std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t strip = 64; // columns whose sums are kept while the chunks of a row group pass by
    alignas(64) float sums[strip][Isa::rows];
    const Int8Columns columns = Int8Columns::of(prepared, matmul.n_k, matmul.n_columns, F::halves);
    const std::int64_t n_blocks = matmul.n_k / 32;
    for (std::int64_t first = 0; first < matmul.n_columns; first += strip) {
        const std::int64_t n = smaller(strip, matmul.n_columns - first);
        for (std::int64_t row = begin; row < end; row += Isa::rows) {
            if (matmul.repacked != nullptr) {
                multiply_group<F, Isa>(RepackedRows<F, Isa>(matmul, row), columns, n_blocks, first, n, sums);
            } else {
                multiply_group<F, Isa>(FileRows<F, Isa>(matmul, row), columns, n_blocks, first, n, sums);
            }
            const auto n_rows = static_cast<std::size_t>(smaller<std::int64_t>(Isa::rows, end - row));
            for (std::int64_t c = 0; c < n; ++c) {
                std::memcpy(result_of(matmul, first + c) + row, sums[c], sizeof(float) * n_rows);
            }
        }
    }
}

// ---- columns --------------------------------------------------------------------------------------------------------

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

// ---- repacking ------------------------------------------------------------------------------------------------------

template <typename F, typename Isa>
void repack_int8(const Matmul &matmul, std::byte *to, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; row += Isa::rows) {
        RepackedRows<F, Isa>::repack(matmul, row, to);
    }
}

template <typename F, typename Isa>
constexpr FormatKernel int8_kernel{
    32 * F::blocks_a_unit,      Int8Columns::size<F::halves>, prepare_int8<F, Isa>, multiply_int8<F, Isa>, Isa::rows,
    RepackedRows<F, Isa>::size, repack_int8<F, Isa>};

// In the order of Format. The ISA may have its own way with bfloat16.
template <typename Isa, typename OfBF16 = BF16<Isa>>
constexpr KernelTable table_of(const char *isa, const AttentionKernel *attention) {
    return {isa,
            {&int8_kernel<Q4_0, Isa>, &int8_kernel<Q4_1, Isa>, &int8_kernel<Q8_0, Isa>, &int8_kernel<Q4_K, Isa>,
             &int8_kernel<Q6_K, Isa>, &float_kernel<OfBF16, Isa>, &float_kernel<F16<Isa>, Isa>,
             &float_kernel<F32<Isa>, Isa>},
            attention};
}

} // namespace
} // namespace esp::kernels
