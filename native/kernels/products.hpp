// What the products of several ISAs have in common: how groups of rows, chunks and columns are walked.
//
// The vectors come from the ISA's own file, as a struct of static members:
//   rows, planes, columns_a_tile     sizes of groups and tiles
//   Bytes                     [row][4 successive bytes]; load, load_transposed, both, either, left, right work on them
//   put<F>                    keeps four weights of each row in the form that add_block reads
//   zero_point<F>             what those are above the weights
//   widen, spread             half-precision numbers and signed bytes of each row as floats
//   round_patch<F>            some blocks of 32 numbers as int8; see Patch
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

// Where the sums of a row group are, a vector for each column.
struct SumsAt {
    float *first;
    std::size_t stride; // bytes

    SumsAt from(std::int64_t column) const { return {at(column), stride}; }
    float *at(std::int64_t column) const {
        auto *const bytes = reinterpret_cast<std::byte *>(first);
        return reinterpret_cast<float *>(bytes + stride * static_cast<std::size_t>(column));
    }
};

// What sums begin with, for any number of columns: no vector is wider.
alignas(64) inline float no_sums[16] = {};

// Adds the products of a chunk to what the sums of n columns were, from `first` on. With everything inlined (flatten),
// weights and sums stay in registers. Each width is a function of its own (noinline): one for all of them has a long
// way from one row group to the next.
template <typename F, typename Isa, int n, typename Units>
[[gnu::noinline, gnu::flatten]] void multiply_tile(const Units &units, const Int8Columns &columns, std::int64_t chunk,
                                                   std::int64_t n_blocks, std::int64_t first, SumsAt before,
                                                   SumsAt to) {
    typename Isa::Sums total[n];
    for (int c = 0; c < n; ++c) {
        total[c] = Isa::load_sums(before.at(c));
    }
    for (std::int64_t b = 0; b < n_blocks; b += F::blocks_a_unit) {
        typename Units::Blocks here;
        const Block<Isa> *const blocks = units.unit(b / F::blocks_a_unit, here);
        for (int i = 0; i < F::blocks_a_unit; ++i) {
            Isa::template add_block<F, n>(blocks[i], columns.at(chunk + b + i, first), total);
        }
    }
    for (int c = 0; c < n; ++c) {
        Isa::store_sums(to.at(c), total[c]);
    }
}

// The same for a width that is known when it runs.
template <typename F, typename Isa, typename Units, int widest>
void multiply_columns(std::int64_t width, const Units &units, const Int8Columns &columns, std::int64_t chunk,
                      std::int64_t n_blocks, std::int64_t first, SumsAt before, SumsAt to) {
    if constexpr (widest > 1) {
        if (width < widest) {
            multiply_columns<F, Isa, Units, widest - 1>(width, units, columns, chunk, n_blocks, first, before, to);
            return;
        }
    }
    multiply_tile<F, Isa, widest>(units, columns, chunk, n_blocks, first, before, to);
}

template <typename F, typename Isa, typename Source>
[[gnu::flatten]] void unpack_chunk(const Source &source, std::int64_t first, std::int64_t n_blocks, Block<Isa> *to) {
    for (std::int64_t b = 0; b < n_blocks; b += F::blocks_a_unit) {
        const std::int64_t unit = first + b / F::blocks_a_unit;
        source.prefetch(unit);
        F::template unpack<Isa>(source, unit, to + b);
    }
}

// Adds the products of a chunk to what the sums of n columns were, from `first` on, tile by tile.
template <typename F, typename Isa, typename Units>
void multiply_chunk(const Units &units, const Int8Columns &columns, std::int64_t chunk, std::int64_t n_blocks,
                    std::int64_t first, std::int64_t n, SumsAt before, SumsAt to) {
    constexpr int widest = smaller(Units::columns_at_once, Isa::columns_a_tile);
    for (std::int64_t c = 0; c < n; c += widest) {
        const auto width = smaller<std::int64_t>(widest, n - c);
        multiply_columns<F, Isa, Units, widest>(width, units, columns, chunk, n_blocks, first + c, before.from(c),
                                                to.from(c));
    }
}

// The sums of a row group and `n` columns, from `first` on; `kept` are those between two chunks.
template <typename F, typename Isa, typename Source>
void multiply_group(Source &&source, const Int8Columns &columns, std::int64_t n_blocks, std::int64_t first,
                    std::int64_t n, SumsAt kept, SumsAt to) {
    using Units = UnpackedAtOnce<F, Isa, std::remove_reference_t<Source>>;
    const bool in_one_tile = n <= smaller(Units::columns_at_once, Isa::columns_a_tile);
    const std::int64_t longest = in_one_tile ? source.longest(n_blocks) : blocks_a_chunk;
    SumsAt before{no_sums, 0};
    for (std::int64_t chunk = 0; chunk < n_blocks; chunk += longest, before = kept) {
        const std::int64_t size = smaller(longest, n_blocks - chunk), unit = chunk / F::blocks_a_unit;
        const SumsAt after = chunk + size == n_blocks ? to : kept;
        source.begin(unit, size / F::blocks_a_unit);
        const Units units{source, unit};
        if (n <= Units::columns_at_once) {
            multiply_chunk<F, Isa>(units, columns, chunk, size, first, n, before, after);
        } else {
            Block<Isa> blocks[blocks_a_chunk];
            unpack_chunk<F>(source, unit, size, blocks);
            multiply_chunk<F, Isa>(UnpackedBefore<F, Isa>{blocks}, columns, chunk, size, first, n, before, after);
        }
    }
}

template <typename F, typename Isa>
void multiply_int8(const Matmul &matmul, const std::byte *prepared, std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t strip = 64; // columns whose sums are kept while the chunks of a row group pass by
    alignas(64) float sums[strip][Isa::rows];
    const SumsAt kept{sums[0], sizeof sums[0]};
    const Int8Columns columns = Int8Columns::of(prepared, matmul.n_k, matmul.n_columns, F::halves);
    const std::int64_t n_blocks = matmul.n_k / 32;
    for (std::int64_t first = 0; first < matmul.n_columns; first += strip) {
        const std::int64_t n = smaller(strip, matmul.n_columns - first);
        for (std::int64_t row = begin; row < end; row += Isa::rows) {
            const bool is_whole = end - row >= Isa::rows;
            const SumsAt to = is_whole ? SumsAt{result_of(matmul, first) + row, matmul.y_stride} : kept;
            if (matmul.repacked != nullptr) {
                multiply_group<F, Isa>(RepackedRows<F, Isa>(matmul, row), columns, n_blocks, first, n, kept, to);
            } else {
                multiply_group<F, Isa>(FileRows<F, Isa>(matmul, row), columns, n_blocks, first, n, kept, to);
            }
            for (std::int64_t c = 0; c < n && !is_whole; ++c) {
                const auto n_rows = static_cast<std::size_t>(end - row);
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

// Blocks of some columns that are rounded together, block by block. Not too many columns: a cache does not hold the
// same place of all where their length is a power of two.
struct Patch {
    static constexpr int most = 16, widest = 8; // blocks, columns

    int n = 0;
    const float *x[most];
    Int8Columns::View to; // of the first
    int run;              // blocks that lie side by side in there
    std::int64_t stride;  // from run to run

    Patch(const Int8Columns &columns, std::int64_t block, std::int64_t first, std::int64_t width)
        : to(columns.at(block, first)), run(static_cast<int>(width)), stride(columns.n_columns) {
        if (width == columns.n_columns) { // all of them do
            run = widest;
            stride = widest;
        }
    }
};

// Rounds blocks one by one.
template <typename F, typename Isa> void round_one_by_one(const Patch &patch) {
    for (int i = 0; i < patch.n; ++i) {
        const Int8Columns::View to = patch.to.after(i / patch.run * patch.stride + i % patch.run, F::halves);
        const RoundedBlock block = Isa::round_block(patch.x[i], to.values);
        const std::int32_t sum = block.sums[0] + block.sums[1];
        to.scales[0] = block.scale;
        to.sums[0] = block.scale * static_cast<float>(sum);
        for (int half = 0; half < F::halves; ++half) {
            to.offsets[half] = -Isa::template zero_point<F> * (F::halves == 2 ? block.sums[half] : sum);
        }
    }
}

template <typename F, typename Isa>
void prepare_int8(const Matmul &matmul, std::byte *prepared, std::int64_t begin, std::int64_t end) {
    const Int8Columns columns = Int8Columns::of(prepared, matmul.n_k, matmul.n_columns, F::halves);
    const std::int64_t n_blocks = matmul.n_k / 32;
    for (std::int64_t first = begin; first < end; first += Patch::widest) {
        const std::int64_t width = smaller<std::int64_t>(Patch::widest, end - first), height = Patch::most / width;
        for (std::int64_t block = 0; block < n_blocks; block += height) {
            Patch patch(columns, block, first, width);
            for (std::int64_t b = block; b < smaller(block + height, n_blocks); ++b) {
                for (std::int64_t c = first; c < first + width; ++c) {
                    patch.x[patch.n++] = column_of(matmul, c) + 32 * b;
                }
            }
            Isa::template round_patch<F>(patch);
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
