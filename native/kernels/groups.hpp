// Groups of weight rows, and where a group's bytes come from: rows as ggml stores them, or repacked side by side.
#pragma once

#include "kernels/kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace esp::kernels {
namespace { // compiled for several ISAs: the linker must not share what is in here

// std::min is a function that the linker would share.
template <typename T> constexpr T smaller(T a, T b) { return b < a ? b : a; }
template <typename T> constexpr T rounded_up(T a, T to) { return (a + to - 1) / to * to; }

constexpr std::int64_t blocks_a_chunk = 32; // 1024 weights of a row group: unpacked, they fit the first-level cache

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

// Fetches what will be read while something before it is computed. Into the second level: the first holds what was
// unpacked.
inline void prefetch_stretch(const std::byte *next, std::size_t from, std::size_t bytes) {
    for (std::size_t at = from & ~std::size_t{63}; at < from + bytes; at += 64) {
        __builtin_prefetch(next + at, 0, 2);
    }
}

// A group of rows as ggml stores them. Rows lie one after the other, so the next group is one stretch of memory; many
// short streams are more than what a processor recognises by itself.
template <typename F, typename Isa> class FileRows {
  public:
    static constexpr int columns_at_once = 1; // for more, shuffling and multiplying in turns is slower

    FileRows(const Matmul &matmul, std::int64_t row)
        : group_(matmul, row), next_(group_.rows[0] + Isa::rows * matmul.weight_stride) {}

    // Blocks that begin() can be called for at once.
    static std::int64_t longest(std::int64_t) { return blocks_a_chunk; }

    // Before units from `first` on are used: collects their half-precision numbers. Reading row by row also brings
    // the chunk into the cache as one stream. (Written in twos and read as vectors, they must not be read back at
    // once.)
    void begin(std::int64_t first, std::int64_t n_units) {
        first_ = first;
        for (int i = 0; i < Isa::rows; ++i) {
            const std::byte *from = group_.rows[i] + F::unit_bytes * static_cast<std::size_t>(first) + F::halves_at;
            for (std::int64_t unit = 0; unit < n_units; ++unit, from += F::unit_bytes) {
                for (int number = 0; number < F::n_halves; ++number) {
                    std::memcpy(&halves_[unit][number][i], from + 2 * number, sizeof(std::uint16_t));
                }
            }
        }
    }

    void prefetch(std::int64_t unit) const {
        constexpr std::size_t stretch = Isa::rows * F::unit_bytes;
        prefetch_stretch(next_, stretch * static_cast<std::size_t>(unit), stretch);
    }

    // out[j], row by row: bytes 4j..4j+3 of each row's sixteen at `offset` of the unit.
    void load(std::int64_t unit, std::size_t offset, typename Isa::Bytes out[4]) const {
        Isa::load_transposed(group_, F::unit_bytes * static_cast<std::size_t>(unit) + offset, out);
    }

    const std::uint16_t *halves(std::int64_t unit, int number) const { return halves_[unit - first_][number]; }

  private:
    RowGroup<Isa::rows> group_;
    const std::byte *next_;
    std::int64_t first_ = 0;
    alignas(64) std::uint16_t halves_[blocks_a_chunk][F::n_halves][Isa::rows];
};

// A repacked group: [unit][number][row] half-precision numbers, then [unit][four][row] of four bytes each, which are
// the vectors that load() would have to shuffle together. As large as in the file, up to rounding to 64 bytes.
template <typename F, typename Isa> class RepackedRows {
  public:
    // little is left to unpack, but for formats whose scales are packed too
    static constexpr int columns_at_once = F::blocks_a_unit == 1 ? 64 : Isa::columns_a_tile;

    RepackedRows(const Matmul &matmul, std::int64_t row)
        : halves_(matmul.repacked + group_bytes(matmul.n_k) * static_cast<std::size_t>(row / Isa::rows)),
          fours_(halves_ + halves_bytes(matmul.n_k)), fetch_end_(matmul.repacked + size(matmul.fetch_end, matmul.n_k)) {
    }

    static std::size_t size(std::int64_t n_rows, std::int64_t n_k) {
        return group_bytes(n_k) * static_cast<std::size_t>((n_rows + Isa::rows - 1) / Isa::rows);
    }

    static std::int64_t longest(std::int64_t n_blocks) { return n_blocks; }
    void begin(std::int64_t, std::int64_t) const {}

    // A unit's share of the group, numbers and fours together: of those further on, every line is fetched once.
    void prefetch(std::int64_t unit) const {
        constexpr std::size_t part = unit_bytes + 2 * F::n_halves * Isa::rows;
        const std::byte *const next = halves_ + part * static_cast<std::size_t>(unit) + ahead;
        if (next < fetch_end_) {
            prefetch_stretch(next, 0, part);
        }
    }

    void load(std::int64_t unit, std::size_t offset, typename Isa::Bytes out[4]) const {
        const std::byte *const at = four(unit, offset);
        for (int j = 0; j < 4; ++j) {
            out[j] = Isa::load(at + vector * j);
        }
    }

    const std::uint16_t *halves(std::int64_t unit, int number) const {
        return reinterpret_cast<const std::uint16_t *>(halves_) + Isa::rows * (F::n_halves * unit + number);
    }

    static void repack(const Matmul &matmul, std::int64_t row, std::byte *all) {
        const RowGroup<Isa::rows> group(matmul, row);
        std::byte *halves = all + group_bytes(matmul.n_k) * static_cast<std::size_t>(row / Isa::rows);
        std::byte *fours = halves + halves_bytes(matmul.n_k);
        std::memset(halves, 0, halves_bytes(matmul.n_k)); // rounded up
        for (std::int64_t unit = 0; unit < units(matmul.n_k); ++unit) {
            const std::size_t at = F::unit_bytes * static_cast<std::size_t>(unit);
            halves = copy<sizeof(std::uint16_t)>(group, at + F::halves_at, F::n_halves, halves);
            fours = copy_fours(group, at + fours_at, fours);
        }
    }

  private:
    static constexpr std::size_t vector = 4 * Isa::rows;
    static constexpr std::size_t n_fours = (F::unit_bytes - 2 * F::n_halves) / 4;
    static constexpr std::size_t fours_at = F::halves_at == 0 ? 2 * F::n_halves : 0; // within a unit
    static constexpr std::size_t unit_bytes = vector * n_fours;
    static constexpr std::size_t ahead = 8192; // bytes; from 4096 on it makes no difference
    static_assert(F::halves_at == 0 || F::halves_at == 4 * n_fours, "half-precision numbers come first or last");

    static std::int64_t units(std::int64_t n_k) { return n_k / (32 * F::blocks_a_unit); }
    static std::size_t halves_bytes(std::int64_t n_k) {
        return rounded_up<std::size_t>(2 * F::n_halves * Isa::rows * static_cast<std::size_t>(units(n_k)), 64);
    }
    static std::size_t group_bytes(std::int64_t n_k) {
        const std::size_t fours = unit_bytes * static_cast<std::size_t>(units(n_k));
        return rounded_up<std::size_t>(halves_bytes(n_k) + fours, 64);
    }

    const std::byte *four(std::int64_t unit, std::size_t offset) const {
        return fours_ + unit_bytes * static_cast<std::size_t>(unit) + vector * ((offset - fours_at) / 4);
    }

    // Pieces of n bytes of each row side by side; returns where they end.
    template <std::size_t n>
    static std::byte *copy(const RowGroup<Isa::rows> &group, std::size_t at, std::size_t n_pieces, std::byte *to) {
        for (std::size_t piece = 0; piece < n_pieces; ++piece) {
            for (int row = 0; row < Isa::rows; ++row, to += n) {
                std::memcpy(to, group.rows[row] + at + n * piece, n);
            }
        }
        return to;
    }

    static std::byte *copy_fours(const RowGroup<Isa::rows> &group, std::size_t at, std::byte *to) {
        for (std::size_t four = 0; four + 4 <= n_fours; four += 4) {
            typename Isa::Bytes out[4];
            Isa::load_transposed(group, at + 4 * four, out);
            for (int j = 0; j < 4; ++j, to += vector) {
                Isa::store(to, out[j]);
            }
        }
        return copy<4>(group, at + n_fours / 4 * 16, n_fours % 4, to);
    }

    const std::byte *halves_;
    const std::byte *fours_;
    const std::byte *fetch_end_;
};

} // namespace
} // namespace esp::kernels
