// Attention on AVX-512: sixteen cells side by side for the scores, sixteen
// numbers of a value vector for the sums.
#include "kernels/attention.hpp"
#include "kernels/tables.hpp"

#include <immintrin.h>

namespace esp::kernels {
namespace {

struct Avx512Attention {
    using Floats = __m512;

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
    static Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats round(Floats x) { return _mm512_roundscale_ps(x, 8); }
    static Floats scale(Floats p, Floats n) { return _mm512_scalef_ps(p, n); }
    static Floats zero_below(Floats x, float limit, Floats numbers) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ), numbers);
    }

    static float first(Floats numbers) { return _mm512_cvtss_f32(numbers); }
    static float largest(Floats numbers) { return _mm512_reduce_max_ps(numbers); }
    static float sum(Floats numbers) { return _mm512_reduce_add_ps(numbers); }

    static unsigned seen(const std::byte *mask) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask));
        return _mm256_cmpneq_epi16_mask(halves, _mm256_set1_epi16(static_cast<short>(0xfc00)));
    }

    // Sixteen are written, whatever they are beyond those that are meant.
    static void put_places(std::int32_t *to, unsigned bits, std::int32_t base) {
        const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i places = _mm512_add_epi32(steps, _mm512_set1_epi32(base));
        _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), places));
    }

    static void load_keys(const std::byte *const *keys, std::size_t offset, float (*to)[16]) {
        const auto piece = [&](std::size_t i) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i *>(keys[i] + offset));
        };
        __m512i a[4];
        for (std::size_t i = 0; i < 4; ++i) {
            a[i] = _mm512_castsi128_si512(piece(i));
            a[i] = _mm512_inserti32x4(a[i], piece(i + 4), 1);
            a[i] = _mm512_inserti32x4(a[i], piece(i + 8), 2);
            a[i] = _mm512_inserti32x4(a[i], piece(i + 12), 3);
        }
        const __m512i t0 = _mm512_unpacklo_epi32(a[0], a[1]), t1 = _mm512_unpackhi_epi32(a[0], a[1]);
        const __m512i t2 = _mm512_unpacklo_epi32(a[2], a[3]), t3 = _mm512_unpackhi_epi32(a[2], a[3]);
        const __m512i pairs[4] = {_mm512_unpacklo_epi64(t0, t2), _mm512_unpackhi_epi64(t0, t2),
                                  _mm512_unpacklo_epi64(t1, t3), _mm512_unpackhi_epi64(t1, t3)};
        for (int j = 0; j < 4; ++j) {
            _mm512_store_ps(to[2 * j], _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs[j])));
            _mm512_store_ps(to[2 * j + 1], _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs[j], 16))));
        }
    }
};

} // namespace

const AttentionKernel avx512_attention = attention_kernel<Avx512Attention>;

} // namespace esp::kernels
