// The weight formats: how a unit of a row group becomes blocks of 32 weights, side by side.
//
// `from` is a group of rows (groups.hpp). What is done with vectors comes from the ISA's own file, see products.hpp.
#pragma once

#include "kernels/groups.hpp"

#include <cstddef>
#include <cstdint>

namespace esp::kernels {
namespace { // compiled for several ISAs: the linker must not share what is in here

constexpr int steps_a_block = 8; // of four weights

// 32 weights of each row of a group.
template <typename Isa> struct Block {
    alignas(64) std::uint8_t weights[Isa::planes][steps_a_block][4 * Isa::rows]; // [step][row][4 successive weights]
    alignas(64) float scales[2][Isa::rows];                                      // of the block, or its halves
    alignas(64) float minima[Isa::rows];
};

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
template <typename F, typename Isa, typename Source>
void unpack_nibbles(const Source &from, std::int64_t unit, std::size_t offset, Block<Isa> &low, int step,
                    Block<Isa> &high, int high_step) {
    typename Isa::Bytes parts[4];
    from.load(unit, offset, parts);
    for (int j = 0; j < 4; ++j) {
        Isa::template put<F>(low.weights, step + j, nibbles<Isa, 0>(parts[j]));
        Isa::template put<F>(high.weights, high_step + j, nibbles<Isa, 4>(parts[j]));
    }
}

struct Q8_0 : Integers {
    static constexpr std::size_t unit_bytes = 34;
    static constexpr int bits = 8;
    static constexpr bool is_signed = true;

    template <typename Isa, typename Source> static void unpack(const Source &from, std::int64_t unit, Block<Isa> *to) {
        for (int half = 0; half < 2; ++half) {
            typename Isa::Bytes parts[4];
            from.load(unit, 2 + 16 * static_cast<std::size_t>(half), parts);
            for (int j = 0; j < 4; ++j) {
                Isa::template put<Q8_0>(to->weights, 4 * half + j, parts[j]);
            }
        }
        Isa::widen(from.halves(unit, 0), to->scales[0]);
    }
};

struct Q4_0 : Integers {
    static constexpr std::size_t unit_bytes = 18;
    static constexpr int zero_point = 8;

    template <typename Isa, typename Source> static void unpack(const Source &from, std::int64_t unit, Block<Isa> *to) {
        unpack_nibbles<Q4_0>(from, unit, 2, *to, 0, *to, 4);
        Isa::widen(from.halves(unit, 0), to->scales[0]);
    }
};

struct Q4_1 : Integers {
    static constexpr std::size_t unit_bytes = 20;
    static constexpr int n_halves = 2;
    static constexpr bool has_minima = true;

    template <typename Isa, typename Source> static void unpack(const Source &from, std::int64_t unit, Block<Isa> *to) {
        unpack_nibbles<Q4_1>(from, unit, 4, *to, 0, *to, 4);
        Isa::widen(from.halves(unit, 0), to->scales[0]);
        Isa::widen(from.halves(unit, 1), to->minima);
    }
};

// d, dmin, eight 6-bit scales and minima in 12 bytes, 128 bytes of nibbles: w = d * scale * q - dmin * minimum.
struct Q4_K : Integers {
    static constexpr std::size_t unit_bytes = 144;
    static constexpr int blocks_a_unit = 8, n_halves = 2;
    static constexpr bool has_minima = true;

    template <typename Isa, typename Source> static void unpack(const Source &from, std::int64_t unit, Block<Isa> *to) {
        for (int pair = 0; pair < 4; ++pair) {
            for (int half = 0; half < 2; ++half) {
                const auto offset = 16 + static_cast<std::size_t>(32 * pair + 16 * half);
                unpack_nibbles<Q4_K>(from, unit, offset, to[2 * pair], 4 * half, to[2 * pair + 1], 4 * half);
            }
        }
        unpack_scales(from, unit, to);
    }

  private:
    template <typename Isa, typename Source>
    static void unpack_scales(const Source &from, std::int64_t unit, Block<Isa> *to) {
        using Bytes = typename Isa::Bytes;
        Bytes parts[4]; // 12 bytes of scales and minima, and four of no interest
        from.load(unit, 4, parts);
        const auto upper = [](Bytes bytes) { return Isa::both(Isa::template right<2>(bytes), 0x30); };
        const Bytes scales[2] = {Isa::both(parts[0], 0x3f), Isa::either(nibbles<Isa, 0>(parts[2]), upper(parts[0]))};
        const Bytes minima[2] = {Isa::both(parts[1], 0x3f), Isa::either(nibbles<Isa, 4>(parts[2]), upper(parts[1]))};
        alignas(64) float d[Isa::rows], dmin[Isa::rows];
        Isa::widen(from.halves(unit, 0), d);
        Isa::widen(from.halves(unit, 1), dmin);
        for (float &factor : dmin) {
            factor = -factor;
        }
        for (int j = 0; j < blocks_a_unit; ++j) {
            Isa::spread(scales[j / 4], j % 4, d, to[j].scales[0]);
            Isa::spread(minima[j / 4], j % 4, dmin, to[j].minima);
        }
    }
};

// 128 bytes of low nibbles, 64 of upper bit pairs, sixteen signed scales, d: w = d * scale * (q - 32).
struct Q6_K : Integers {
    static constexpr std::size_t unit_bytes = 210, halves_at = 208;
    static constexpr int blocks_a_unit = 8, halves = 2;
    static constexpr int bits = 6, zero_point = 32;

    template <typename Isa, typename Source> static void unpack(const Source &from, std::int64_t unit, Block<Isa> *to) {
        for (int part = 0; part < 2; ++part) {
            for (int half = 0; half < 2; ++half) {
                unpack_sixteen(from, unit, to + 4 * part, part, half);
            }
        }
        unpack_scales(from, unit, to);
    }

  private:
    // Half of the four blocks of a part.
    template <typename Isa, typename Source>
    static void unpack_sixteen(const Source &from, std::int64_t unit, Block<Isa> *to, int part, int half) {
        using Bytes = typename Isa::Bytes;
        Bytes first[4], second[4], upper[4];
        from.load(unit, static_cast<std::size_t>(64 * part + 16 * half), first);
        from.load(unit, static_cast<std::size_t>(64 * part + 16 * half + 32), second);
        from.load(unit, static_cast<std::size_t>(32 * part + 16 * half + 128), upper);
        for (int j = 0; j < 4; ++j) {
            const auto put = [&](int of, Bytes low, Bytes bits_at_4) {
                Isa::template put<Q6_K>(to[of].weights, 4 * half + j, Isa::either(low, Isa::both(bits_at_4, 0x30)));
            };
            put(0, nibbles<Isa, 0>(first[j]), Isa::template left<4>(upper[j]));
            put(1, nibbles<Isa, 0>(second[j]), Isa::template left<2>(upper[j]));
            put(2, nibbles<Isa, 4>(first[j]), upper[j]);
            put(3, nibbles<Isa, 4>(second[j]), Isa::template right<2>(upper[j]));
        }
    }

    template <typename Isa, typename Source>
    static void unpack_scales(const Source &from, std::int64_t unit, Block<Isa> *to) {
        typename Isa::Bytes parts[4];
        from.load(unit, 192, parts);
        alignas(64) float d[Isa::rows];
        Isa::widen(from.halves(unit, 0), d);
        for (int i = 0; i < 2 * blocks_a_unit; ++i) { // of sixteen weights each
            Isa::spread(parts[i / 4], i % 4, d, to[i / 2].scales[i % 2]);
        }
    }
};

} // namespace
} // namespace esp::kernels
