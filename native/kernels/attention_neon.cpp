// Attention on NEON: sixteen numbers are four registers.
#include "kernels/attention.hpp"
#include "kernels/tables.hpp"

#include <arm_neon.h>

namespace esp::kernels {
namespace {

struct NeonAttention {
    using Floats = float32x4x4_t;

    // with values and a weight, or keys and a query's number: at most 32 registers
    using Key = float;
    static constexpr int groups_a_block = 1;
    template <int n> static constexpr int values_a_pass = n == 1 ? 4 : 1;

    static Floats all(float number) {
        return each([=](int) { return vdupq_n_f32(number); });
    }
    static Floats load(const float *at) {
        return each([=](int i) { return vld1q_f32(at + 4 * i); });
    }
    static Floats load_half(const std::byte *at) {
        const auto *const halves = reinterpret_cast<const std::uint16_t *>(at);
        return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + 4 * i))); });
    }
    static void store(float *to, Floats numbers) {
        for (int i = 0; i < 4; ++i) {
            vst1q_f32(to + 4 * i, numbers.val[i]);
        }
    }

    static Floats add(Floats a, Floats b) {
        return each([&](int i) { return vaddq_f32(a.val[i], b.val[i]); });
    }
    static Floats subtract(Floats a, Floats b) {
        return each([&](int i) { return vsubq_f32(a.val[i], b.val[i]); });
    }
    static Floats multiply(Floats a, Floats b) {
        return each([&](int i) { return vmulq_f32(a.val[i], b.val[i]); });
    }
    static Floats multiply_add(Floats a, Floats b, Floats c) {
        return each([&](int i) { return vfmaq_f32(c.val[i], a.val[i], b.val[i]); });
    }
    static Floats larger(Floats a, Floats b) {
        return each([&](int i) { return vmaxq_f32(a.val[i], b.val[i]); });
    }
    static Floats scale(Floats p, Floats n) {
        return each([&](int i) {
            const int32x4_t exponents = vshlq_n_s32(vreinterpretq_s32_f32(n.val[i]), 23);
            return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p.val[i]), exponents));
        });
    }

    static float first(Floats numbers) { return vgetq_lane_f32(numbers.val[0], 0); }
    static float largest(Floats numbers) {
        return vmaxvq_f32(vmaxq_f32(vmaxq_f32(numbers.val[0], numbers.val[1]), //
                                    vmaxq_f32(numbers.val[2], numbers.val[3])));
    }
    static float sum(Floats numbers) {
        return vaddvq_f32(vaddq_f32(vaddq_f32(numbers.val[0], numbers.val[1]), //
                                    vaddq_f32(numbers.val[2], numbers.val[3])));
    }

    static unsigned seen(const std::byte *mask) {
        static const std::uint8_t bits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
        const auto *const halves = reinterpret_cast<const std::uint16_t *>(mask);
        const uint16x8_t hidden = vdupq_n_u16(0xfc00);
        const uint8x16_t is_hidden = vcombine_u8(vmovn_u16(vceqq_u16(vld1q_u16(halves), hidden)),
                                                 vmovn_u16(vceqq_u16(vld1q_u16(halves + 8), hidden)));
        const uint8x16_t set = vbicq_u8(vld1q_u8(bits), is_hidden);
        return vaddv_u8(vget_low_u8(set)) | static_cast<unsigned>(vaddv_u8(vget_high_u8(set))) << 8;
    }

    static void store_some(float *to, Floats numbers, unsigned bits) {
        store_one_by_one<NeonAttention>(to, numbers, bits);
    }

    static Floats load_key(const Key *at) { return load(at); }

    static void load_keys(const std::byte *const *keys, int, std::int64_t size, Key (*to)[16]) {
        for (std::int64_t d = 0; d < size; d += 8) {
            load_eight(keys, 2 * static_cast<std::size_t>(d), to + d);
        }
    }

  private:
    static void load_eight(const std::byte *const *keys, std::size_t offset, Key (*to)[16]) {
        for (int half = 0; half < 2; ++half) {
            uint16x8_t a[8], b[8];
            for (int i = 0; i < 8; ++i) {
                a[i] = vld1q_u16(reinterpret_cast<const std::uint16_t *>(keys[8 * half + i] + offset));
            }
            for (int i = 0; i < 4; ++i) { // numbers 0..3 and 4..7 of keys i and i + 4
                b[2 * i] = vzip1q_u16(a[i], a[i + 4]);
                b[2 * i + 1] = vzip2q_u16(a[i], a[i + 4]);
            }
            for (int i = 0; i < 2; ++i) { // pairs of numbers of keys i, i + 2, i + 4, i + 6
                for (int j = 0; j < 2; ++j) {
                    a[4 * i + 2 * j] = vzip1q_u16(b[2 * i + j], b[2 * i + 4 + j]);
                    a[4 * i + 2 * j + 1] = vzip2q_u16(b[2 * i + j], b[2 * i + 4 + j]);
                }
            }
            for (int j = 0; j < 4; ++j) {
                widen(vzip1q_u16(a[j], a[4 + j]), to[2 * j] + 8 * half);
                widen(vzip2q_u16(a[j], a[4 + j]), to[2 * j + 1] + 8 * half);
            }
        }
    }

    template <typename Part> static Floats each(Part part) { return {{part(0), part(1), part(2), part(3)}}; }

    static void widen(uint16x8_t halves, float *to) {
        vst1q_f32(to, vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves))));
        vst1q_f32(to + 4, vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(halves))));
    }
};

} // namespace

const AttentionKernel neon_attention = attention_kernel<NeonAttention>;

} // namespace esp::kernels
