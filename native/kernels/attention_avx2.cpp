// Attention on AVX2 with FMA and F16C: sixteen numbers are two registers.
#include "kernels/attention.hpp"
#include "kernels/tables.hpp"

#include <immintrin.h>

namespace esp::kernels {
namespace {

inline const __m128i *vector_at(const void *at) { return static_cast<const __m128i *>(at); }

struct Avx2Attention {
    struct Floats {
        __m256 low, high;
    };

    // with values and a weight, or keys and a query's number: at most sixteen registers
    using Key = float;
    static constexpr int groups_a_block = 1;
    template <int n> static constexpr int values_a_pass = n == 1 ? 4 : 1;

    static Floats all(float number) { return {_mm256_set1_ps(number), _mm256_set1_ps(number)}; }
    static Floats load(const float *at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
    static Floats load_half(const std::byte *at) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(vector_at(at))), _mm256_cvtph_ps(_mm_loadu_si128(vector_at(at + 16)))};
    }
    static void store(float *to, Floats numbers) {
        _mm256_storeu_ps(to, numbers.low);
        _mm256_storeu_ps(to + 8, numbers.high);
    }

    static Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
    static Floats subtract(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
    static Floats multiply(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
    static Floats multiply_add(Floats a, Floats b, Floats c) {
        return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
    }
    static Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
    static Floats scale(Floats p, Floats n) { return {scale(p.low, n.low), scale(p.high, n.high)}; }

    static float first(Floats numbers) { return _mm256_cvtss_f32(numbers.low); }
    static float largest(Floats numbers) {
        const __m256 eight = _mm256_max_ps(numbers.low, numbers.high);
        const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }

    static float sum(Floats numbers) {
        const __m256 eight = _mm256_add_ps(numbers.low, numbers.high);
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }

    static unsigned seen(const std::byte *mask) {
        const __m128i hidden = _mm_set1_epi16(static_cast<short>(0xfc00));
        const __m128i low = _mm_cmpeq_epi16(_mm_loadu_si128(vector_at(mask)), hidden);
        const __m128i high = _mm_cmpeq_epi16(_mm_loadu_si128(vector_at(mask + 16)), hidden);
        return ~static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(low, high))) & 0xffffU;
    }

    static void store_some(float *to, Floats numbers, unsigned bits) {
        store_one_by_one<Avx2Attention>(to, numbers, bits);
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
            __m128i a[8], b[8];
            for (int i = 0; i < 8; ++i) {
                a[i] = _mm_loadu_si128(vector_at(keys[8 * half + i] + offset));
            }
            for (int i = 0; i < 4; ++i) { // numbers 0..3 and 4..7 of keys i and i + 4
                b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
                b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
            }
            for (int i = 0; i < 2; ++i) { // pairs of numbers of keys i, i + 2, i + 4, i + 6
                for (int j = 0; j < 2; ++j) {
                    a[4 * i + 2 * j] = _mm_unpacklo_epi16(b[2 * i + j], b[2 * i + 4 + j]);
                    a[4 * i + 2 * j + 1] = _mm_unpackhi_epi16(b[2 * i + j], b[2 * i + 4 + j]);
                }
            }
            for (int j = 0; j < 4; ++j) {
                const __m128i even = _mm_unpacklo_epi16(a[j], a[4 + j]), odd = _mm_unpackhi_epi16(a[j], a[4 + j]);
                _mm256_store_ps(to[2 * j] + 8 * half, _mm256_cvtph_ps(even));
                _mm256_store_ps(to[2 * j + 1] + 8 * half, _mm256_cvtph_ps(odd));
            }
        }
    }

    static __m256 scale(__m256 p, __m256 n) {
        return _mm256_castsi256_ps(
            _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
    }
};

} // namespace

const AttentionKernel avx2_attention = attention_kernel<Avx2Attention>;

} // namespace esp::kernels
