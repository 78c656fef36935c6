// NEON with dot products (ARMv8.2): eight weight rows side by side in two registers, four columns a tile.
#include "kernels/products.hpp"
#include "kernels/tables.hpp"

#include <arm_neon.h>

namespace esp::kernels {
namespace {

// Weights are signed bytes here: dot products need no zero point.
struct Neon {
    static constexpr int rows = 8, planes = 1, columns_a_tile = 4;
    static constexpr int float_rows = 4, float_columns = 4, float_step = 4;

    template <typename F> static constexpr std::int32_t zero_point = 0;

    // ---- unpacking

    using Bytes = uint8x16x2_t; // rows 0..3, rows 4..7

    static Bytes load(const std::byte *at) {
        const auto *const bytes = reinterpret_cast<const std::uint8_t *>(at);
        return {{vld1q_u8(bytes), vld1q_u8(bytes + 16)}};
    }
    static void store(std::byte *to, Bytes bytes) {
        auto *const at = reinterpret_cast<std::uint8_t *>(to);
        vst1q_u8(at, bytes.val[0]);
        vst1q_u8(at + 16, bytes.val[1]);
    }
    static Bytes both(Bytes bytes, std::uint8_t mask) {
        return {{vandq_u8(bytes.val[0], vdupq_n_u8(mask)), vandq_u8(bytes.val[1], vdupq_n_u8(mask))}};
    }
    static Bytes either(Bytes a, Bytes b) { return {{vorrq_u8(a.val[0], b.val[0]), vorrq_u8(a.val[1], b.val[1])}}; }
    template <int n> static Bytes left(Bytes bytes) {
        return {{vshlq_n_u8(bytes.val[0], n), vshlq_n_u8(bytes.val[1], n)}};
    }
    template <int n> static Bytes right(Bytes bytes) {
        if constexpr (n == 0) {
            return bytes; // a shift by nothing has no encoding
        } else {
            return {{vshrq_n_u8(bytes.val[0], n), vshrq_n_u8(bytes.val[1], n)}};
        }
    }

    // out[j], row by row: bytes 4j..4j+3 of each row's sixteen at `offset`.
    static void load_transposed(const RowGroup<rows> &group, std::size_t offset, Bytes out[4]) {
        for (int half = 0; half < 2; ++half) {
            uint32x4_t a[4];
            for (int i = 0; i < 4; ++i) {
                const auto *const row = reinterpret_cast<const std::uint8_t *>(group.rows[4 * half + i]);
                a[i] = vreinterpretq_u32_u8(vld1q_u8(row + offset));
            }
            const uint64x2_t t0 = vreinterpretq_u64_u32(vtrn1q_u32(a[0], a[1]));
            const uint64x2_t t1 = vreinterpretq_u64_u32(vtrn2q_u32(a[0], a[1]));
            const uint64x2_t t2 = vreinterpretq_u64_u32(vtrn1q_u32(a[2], a[3]));
            const uint64x2_t t3 = vreinterpretq_u64_u32(vtrn2q_u32(a[2], a[3]));
            out[0].val[half] = vreinterpretq_u8_u64(vtrn1q_u64(t0, t2));
            out[1].val[half] = vreinterpretq_u8_u64(vtrn1q_u64(t1, t3));
            out[2].val[half] = vreinterpretq_u8_u64(vtrn2q_u64(t0, t2));
            out[3].val[half] = vreinterpretq_u8_u64(vtrn2q_u64(t1, t3));
        }
    }

    template <typename F> static void put(std::uint8_t (*to)[steps_a_block][4 * rows], int step, Bytes weights) {
        for (int half = 0; half < 2; ++half) {
            vst1q_u8(to[0][step] + 16 * half, vsubq_u8(weights.val[half], vdupq_n_u8(F::zero_point)));
        }
    }

    static void widen(const std::uint16_t *halves, float *to) {
        vst1q_f32(to, load_halves(halves));
        vst1q_f32(to + 4, load_halves(halves + 4));
    }

    // to[row] = factors[row] * a byte of each row
    static void spread(Bytes bytes, int byte, const float *factors, float *to) {
        for (int half = 0; half < 2; ++half) {
            const int32x4_t words = vreinterpretq_s32_u8(bytes.val[half]);
            const int32x4_t numbers = vshrq_n_s32(vshlq_s32(words, vdupq_n_s32(24 - 8 * byte)), 24);
            vst1q_f32(to + 4 * half, vmulq_f32(vld1q_f32(factors + 4 * half), vcvtq_f32_s32(numbers)));
        }
    }

    // ---- columns

    template <typename F> static void round_patch(const Patch &patch) { round_one_by_one<F, Neon>(patch); }

    static RoundedBlock round_block(const float *x, std::int8_t *values) {
        float32x4_t parts[8];
        float32x4_t largest = vdupq_n_f32(0.0F);
        for (int i = 0; i < 8; ++i) {
            parts[i] = vld1q_f32(x + 4 * i);
            largest = vmaxq_f32(largest, vabsq_f32(parts[i]));
        }
        const float top = vmaxvq_f32(largest);
        const float factor = to_int8(top);
        std::int32_t sums[2];
        for (int half = 0; half < 2; ++half) {
            int16x4_t rounded[4];
            for (int i = 0; i < 4; ++i) {
                rounded[i] = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(parts[4 * half + i], factor)));
            }
            const int8x16_t bytes = vcombine_s8(vqmovn_s16(vcombine_s16(rounded[0], rounded[1])),
                                                vqmovn_s16(vcombine_s16(rounded[2], rounded[3])));
            vst1q_s8(values + 16 * half, bytes);
            sums[half] = vaddlvq_s8(bytes);
        }
        return {top / 127.0F, {sums[0], sums[1]}};
    }

    // ---- the product

    using Sums = float32x4x2_t;

    static Sums load_sums(const float *sums) { return load_eight(sums); }
    static void store_sums(float *to, Sums sums) {
        vst1q_f32(to, sums.val[0]);
        vst1q_f32(to + 4, sums.val[1]);
    }

    template <typename F, int n>
    static void add_block(const Block<Neon> &block, const Int8Columns::View &at, Sums *total) {
        for (int half = 0; half < F::halves; ++half) {
            int32x4x2_t dots[n];
            multiply_half<F, n>(block.weights[0], at, half, dots);
            const float32x4x2_t scales = load_eight(block.scales[half]);
            for (int c = 0; c < n; ++c) {
                for (int i = 0; i < 2; ++i) {
                    const float32x4_t scale = vmulq_n_f32(scales.val[i], at.scales[c]);
                    total[c].val[i] = vfmaq_f32(total[c].val[i], vcvtq_f32_s32(dots[c].val[i]), scale);
                }
            }
        }
        if constexpr (F::has_minima) {
            const float32x4x2_t minima = load_eight(block.minima);
            for (int c = 0; c < n; ++c) {
                for (int i = 0; i < 2; ++i) {
                    total[c].val[i] = vfmaq_n_f32(total[c].val[i], minima.val[i], at.sums[c]);
                }
            }
        }
    }

    // ---- floating point

    using Floats = float32x4_t;

    static Floats zero() { return vdupq_n_f32(0.0F); }
    static Floats load_f32(const std::byte *at) { return vld1q_f32(reinterpret_cast<const float *>(at)); }
    static Floats load_f16(const std::byte *at) { return load_halves(reinterpret_cast<const std::uint16_t *>(at)); }
    static Floats load_bf16(const std::byte *at) {
        return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const std::uint16_t *>(at)), 16));
    }
    static Floats multiply_add(Floats a, Floats b, Floats sum) { return vfmaq_f32(sum, a, b); }
    static float sum(Floats numbers) { return vaddvq_f32(numbers); }

  private:
    static float32x4_t load_halves(const std::uint16_t *at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }

    static float32x4x2_t load_eight(const float *at) { return {{vld1q_f32(at), vld1q_f32(at + 4)}}; }

    // dots[c]: the products of a block, or of half of one, with column c.
    template <typename F, int n>
    static void multiply_half(const std::uint8_t (*weights)[4 * rows], const Int8Columns::View &at, int half,
                              int32x4x2_t *dots) {
        for (int c = 0; c < n; ++c) {
            dots[c] = {{vdupq_n_s32(0), vdupq_n_s32(0)}};
        }
        constexpr int sixteens = 2 / F::halves;
        for (int sixteen = sixteens * half; sixteen < sixteens * (half + 1); ++sixteen) {
            int8x16_t x[n];
            for (int c = 0; c < n; ++c) {
                x[c] = vld1q_s8(at.values + 32 * c + 16 * sixteen);
            }
            multiply_step<n, 0>(weights[4 * sixteen], x, dots);
            multiply_step<n, 1>(weights[4 * sixteen + 1], x, dots);
            multiply_step<n, 2>(weights[4 * sixteen + 2], x, dots);
            multiply_step<n, 3>(weights[4 * sixteen + 3], x, dots);
        }
    }

    template <int n, int lane>
    static void multiply_step(const std::uint8_t *weights, const int8x16_t *x, int32x4x2_t *dots) {
        for (int i = 0; i < 2; ++i) {
            const int8x16_t four = vreinterpretq_s8_u8(vld1q_u8(weights + 16 * i));
            for (int c = 0; c < n; ++c) {
                dots[c].val[i] = vdotq_laneq_s32(dots[c].val[i], four, x[c], lane);
            }
        }
    }
};

} // namespace

const KernelTable neon_kernels = table_of<Neon>("neon", &neon_attention);

} // namespace esp::kernels
