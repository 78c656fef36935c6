// Attention on AVX-512: 64 cells side by side for the scores, sixteen numbers of a value vector for the sums.
#include "kernels/attention.hpp"
#include "kernels/tables.hpp"

#include <immintrin.h>

namespace esp::kernels {
namespace {

struct Avx512Attention {
    using Floats = __m512;

    // Sums take 24 registers of 32. Keys stay halves, since storing 64 bytes takes two cycles.
    using Key = std::uint16_t;
    static constexpr int groups_a_block = 4;
    template <int n> static constexpr int values_a_pass = 4;

    static Floats all(float number) { return _mm512_set1_ps(number); }
    static Floats load(const float *at) { return _mm512_loadu_ps(at); }
    static Floats load_half(const std::byte *at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
    }
    static void store(float *to, Floats numbers) { _mm512_storeu_ps(to, numbers); }

    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats scale(Floats p, Floats n) {
        return _mm512_castsi512_ps(
            _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
    }

    static float first(Floats numbers) { return _mm512_cvtss_f32(numbers); }
    static float largest(Floats numbers) { return _mm512_reduce_max_ps(numbers); }
    static float sum(Floats numbers) { return _mm512_reduce_add_ps(numbers); }

    static unsigned seen(const std::byte *mask) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask));
        return _mm256_cmpneq_epi16_mask(halves, _mm256_set1_epi16(static_cast<short>(0xfc00)));
    }

    static void store_some(float *to, Floats numbers, unsigned bits) {
        store(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), numbers));
    }

    static Floats load_key(const Key *at) {
        return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(at)));
    }

    [[gnu::noinline]] static void load_keys(const std::byte *const *keys, int groups, std::int64_t size,
                                            Key (*to)[64]) {
        for (int cell = 0; cell < 16 * groups; cell += 32) {
            for (std::int64_t d = 0; d < size; d += 16) {
                load_sixteen(keys + cell, 2 * static_cast<std::size_t>(d), to[d] + cell);
            }
        }
    }

  private:
    // Numbers of two cells side by side are interleaved, then these pairs are transposed.
    static void load_sixteen(const std::byte *const *keys, std::size_t offset, Key *to) {
        const auto two = [&](int i) { // sixteen numbers of a key, and of the eighth after it
            const auto at = [&](int key) { return reinterpret_cast<const __m256i *>(keys[key] + offset); };
            return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(at(i))), _mm256_loadu_si256(at(i + 8)),
                                      1);
        };
        __m512i pairs[2][2][4]; // numbers 0..3 and 8..11, or 4..7 and 12..15, of cells 2 i, 2 i + 8, or these and 16
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i) {
                const __m512i even = two(16 * half + 2 * i), odd = two(16 * half + 2 * i + 1);
                pairs[0][half][i] = _mm512_unpacklo_epi16(even, odd);
                pairs[1][half][i] = _mm512_unpackhi_epi16(even, odd);
            }
        }
        for (int part = 0; part < 2; ++part) {
            __m512i lanes[2][4];
            transpose_lanes(pairs[part][0], lanes[0]);
            transpose_lanes(pairs[part][1], lanes[1]);
            for (int i = 0; i < 4; ++i) {
                _mm512_store_si512(to + 64 * (4 * part + i), _mm512_shuffle_i32x4(lanes[0][i], lanes[1][i], 0x88));
                _mm512_store_si512(to + 64 * (8 + 4 * part + i), _mm512_shuffle_i32x4(lanes[0][i], lanes[1][i], 0xdd));
            }
        }
    }

    static void transpose_lanes(const __m512i (&from)[4], __m512i (&to)[4]) {
        const __m512i t0 = _mm512_unpacklo_epi32(from[0], from[1]), t1 = _mm512_unpackhi_epi32(from[0], from[1]);
        const __m512i t2 = _mm512_unpacklo_epi32(from[2], from[3]), t3 = _mm512_unpackhi_epi32(from[2], from[3]);
        to[0] = _mm512_unpacklo_epi64(t0, t2);
        to[1] = _mm512_unpackhi_epi64(t0, t2);
        to[2] = _mm512_unpacklo_epi64(t1, t3);
        to[3] = _mm512_unpackhi_epi64(t1, t3);
    }
};

} // namespace

const AttentionKernel avx512_attention = attention_kernel<Avx512Attention>;

} // namespace esp::kernels
