// AVX2 with FMA and F16C: eight weight rows side by side, four columns a tile.
#include "kernels/products.hpp"
#include "kernels/tables.hpp"

#include <immintrin.h>

namespace esp::kernels {
namespace {

inline const __m128i *vector_at(const void *at) { return static_cast<const __m128i *>(at); }

// The only product of bytes multiplies unsigned weights with signed columns and adds pairs into 16 bits, saturating.
// Weights of 4 and 6 bits are small enough; those of 8 bits are taken as 16 * upper + lower nibble, in two planes.
struct Avx2 {
    static constexpr int rows = 8, planes = 2, columns_a_tile = 4;
    static constexpr int float_rows = 4, float_columns = 3, float_step = 8; // with columns and weights: 16 registers

    template <typename F> static constexpr std::int32_t zero_point = F::is_signed ? 128 : F::zero_point;

    // ---- unpacking

    using Bytes = __m256i;

    static Bytes load(const std::byte *at) { return _mm256_load_si256(reinterpret_cast<const __m256i *>(at)); }
    static void store(void *to, Bytes bytes) { _mm256_store_si256(static_cast<__m256i *>(to), bytes); }
    static Bytes both(Bytes bytes, char mask) { return _mm256_and_si256(bytes, _mm256_set1_epi8(mask)); }
    static Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
    template <int n> static Bytes left(Bytes bytes) { return _mm256_slli_epi16(bytes, n); }
    template <int n> static Bytes right(Bytes bytes) { return _mm256_srli_epi16(bytes, n); }

    // out[j], row by row: bytes 4j..4j+3 of each row's sixteen at `offset`.
    static void load_transposed(const RowGroup<rows> &group, std::size_t offset, Bytes out[4]) {
        __m256i a[4]; // rows i and i + 4
        for (int i = 0; i < 4; ++i) {
            const __m128i low = _mm_loadu_si128(vector_at(group.rows[i] + offset));
            const __m128i high = _mm_loadu_si128(vector_at(group.rows[i + 4] + offset));
            a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
        }
        const __m256i t0 = _mm256_unpacklo_epi32(a[0], a[1]);
        const __m256i t1 = _mm256_unpackhi_epi32(a[0], a[1]);
        const __m256i t2 = _mm256_unpacklo_epi32(a[2], a[3]);
        const __m256i t3 = _mm256_unpackhi_epi32(a[2], a[3]);
        out[0] = _mm256_unpacklo_epi64(t0, t2);
        out[1] = _mm256_unpackhi_epi64(t0, t2);
        out[2] = _mm256_unpacklo_epi64(t1, t3);
        out[3] = _mm256_unpackhi_epi64(t1, t3);
    }

    template <typename F> static void put(std::uint8_t (*to)[steps_a_block][4 * rows], int step, Bytes weights) {
        if constexpr (F::bits == 8) {
            const Bytes shifted = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
            store(to[0][step], both(shifted, 0x0f));
            store(to[1][step], both(right<4>(shifted), 0x0f));
        } else {
            store(to[0][step], weights);
        }
    }

    static void widen(const std::uint16_t *halves, float *to) {
        _mm256_store_ps(to, _mm256_cvtph_ps(_mm_load_si128(vector_at(halves))));
    }

    // to[row] = factors[row] * a byte of each row
    static void spread(Bytes bytes, int byte, const float *factors, float *to) {
        const __m256i numbers = _mm256_srai_epi32(_mm256_slli_epi32(bytes, 24 - 8 * byte), 24);
        _mm256_store_ps(to, _mm256_mul_ps(_mm256_load_ps(factors), _mm256_cvtepi32_ps(numbers)));
    }

    // ---- columns

    template <typename F> static void round_patch(const Patch &patch) { round_one_by_one<F, Avx2>(patch); }

    static RoundedBlock round_block(const float *x, std::int8_t *values) {
        __m256 parts[4];
        __m256i largest = _mm256_setzero_si256(); // of the bits: like the numbers, and not a number is above all others
        for (int i = 0; i < 4; ++i) {
            parts[i] = _mm256_loadu_ps(x + 8 * i);
            const __m256i bits = _mm256_and_si256(_mm256_castps_si256(parts[i]), _mm256_set1_epi32(0x7fffffff));
            largest = _mm256_max_epi32(largest, bits);
        }
        const float top = largest_of(largest);
        const __m256 factor = _mm256_set1_ps(to_int8(top));
        __m256i rounded[4];
        for (int i = 0; i < 4; ++i) {
            rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(parts[i], factor));
        }
        const __m256i bytes = _mm256_permutevar8x32_epi32(
            _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3])),
            _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(values), bytes);
        const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
        return {top / 127.0F, {sum_of(_mm256_castsi256_si128(fours)), sum_of(_mm256_extracti128_si256(fours, 1))}};
    }

    // ---- the product

    using Sums = __m256;

    static Sums load_sums(const float *sums) { return _mm256_load_ps(sums); }
    static void store_sums(float *to, Sums sums) { _mm256_storeu_ps(to, sums); }

    template <typename F, int n>
    static void add_block(const Block<Avx2> &block, const Int8Columns::View &at, Sums *total) {
        for (int half = 0; half < F::halves; ++half) {
            __m256i dots[n];
            multiply_half<F, n>(block.weights, at, half, dots);
            const __m256 scales = _mm256_load_ps(block.scales[half]);
            for (int c = 0; c < n; ++c) {
                const __m256 scale = _mm256_mul_ps(scales, _mm256_set1_ps(at.scales[c]));
                total[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[c]), scale, total[c]);
            }
        }
        if constexpr (F::has_minima) {
            const __m256 minima = _mm256_load_ps(block.minima);
            for (int c = 0; c < n; ++c) {
                total[c] = _mm256_fmadd_ps(minima, _mm256_set1_ps(at.sums[c]), total[c]);
            }
        }
    }

    // ---- floating point

    using Floats = __m256;

    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats load_f32(const std::byte *at) { return _mm256_loadu_ps(reinterpret_cast<const float *>(at)); }
    static Floats load_f16(const std::byte *at) { return _mm256_cvtph_ps(_mm_loadu_si128(vector_at(at))); }
    static Floats load_bf16(const std::byte *at) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(vector_at(at))), 16));
    }
    static Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }

    static float sum(Floats numbers) {
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(numbers), _mm256_extractf128_ps(numbers, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }

  private:
    static float largest_of(__m256i bits) {
        const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
        const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1))));
    }

    static std::int32_t sum_of(__m128i numbers) {
        const __m128i two = _mm_add_epi32(numbers, _mm_shuffle_epi32(numbers, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
    }

    // dots[c]: the products of a block, or of half of one, with column c.
    template <typename F, int n>
    static void multiply_half(const std::uint8_t (*weights)[steps_a_block][4 * rows], const Int8Columns::View &at,
                              int half, __m256i *dots) {
        constexpr int steps = steps_a_block / F::halves;
        constexpr int run = F::bits == 6 ? 2 : steps; // 2 * 2 * 63 * 127 and 8 * 2 * 15 * 127 are below 2^15
        for (int c = 0; c < n; ++c) {
            dots[c] = _mm256_set1_epi32(zero_point<F> == 0 ? 0 : at.offsets[F::halves * c + half]);
        }
        for (int begin = steps * half; begin < steps * (half + 1); begin += run) {
            for (int plane = 0; plane < (F::bits == 8 ? 2 : 1); ++plane) {
                __m256i pairs[n];
                for (int c = 0; c < n; ++c) {
                    pairs[c] = _mm256_setzero_si256();
                }
                for (int step = begin; step < begin + run; ++step) {
                    const auto four = _mm256_load_si256(reinterpret_cast<const __m256i *>(weights[plane][step]));
                    for (int c = 0; c < n; ++c) {
                        std::int32_t column;
                        std::memcpy(&column, at.values + 32 * c + 4 * step, sizeof column);
                        const __m256i products = _mm256_maddubs_epi16(four, _mm256_set1_epi32(column));
                        pairs[c] = _mm256_add_epi16(pairs[c], products);
                    }
                }
                for (int c = 0; c < n; ++c) {
                    const __m256i worth = _mm256_set1_epi16(plane == 0 ? 1 : 16);
                    dots[c] = _mm256_add_epi32(dots[c], _mm256_madd_epi16(pairs[c], worth));
                }
            }
        }
    }
};

} // namespace

const KernelTable avx2_kernels = table_of<Avx2>("avx2", &avx2_attention);

} // namespace esp::kernels
