// AVX-512 with VNNI and BF16: sixteen weight rows side by side, eight columns a tile.
#include "kernels/products.hpp"
#include "kernels/tables.hpp"

#include <immintrin.h>

namespace esp::kernels {
namespace {

// Products of bytes multiply unsigned weights with signed columns and add fours to 32 bits.
struct Avx512 {
    static constexpr int rows = 16, planes = 1, columns_a_tile = 8;
    // 24 sums, six columns and a weight in 32 registers
    static constexpr int float_rows = 4, float_columns = 6, float_step = 16;

    template <typename F> static constexpr std::int32_t zero_point = F::is_signed ? 128 : F::zero_point;

    // ---- unpacking

    using Bytes = __m512i;

    static Bytes load(const std::byte *at) { return _mm512_load_si512(at); }
    static void store(std::byte *to, Bytes bytes) { _mm512_store_si512(to, bytes); }
    static Bytes both(Bytes bytes, char mask) { return _mm512_and_si512(bytes, _mm512_set1_epi8(mask)); }
    static Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
    template <unsigned n> static Bytes left(Bytes bytes) { return _mm512_slli_epi16(bytes, n); }
    template <unsigned n> static Bytes right(Bytes bytes) { return _mm512_srli_epi16(bytes, n); }

    // out[j], row by row: bytes 4j..4j+3 of each row's sixteen at `offset`.
    static void load_transposed(const RowGroup<rows> &group, std::size_t offset, Bytes out[4]) {
        const auto piece = [&](int i) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i *>(group.rows[i] + offset));
        };
        __m512i a[4];
        for (int i = 0; i < 4; ++i) {
            a[i] = _mm512_castsi128_si512(piece(i));
            a[i] = _mm512_inserti32x4(a[i], piece(i + 4), 1);
            a[i] = _mm512_inserti32x4(a[i], piece(i + 8), 2);
            a[i] = _mm512_inserti32x4(a[i], piece(i + 12), 3);
        }
        const __m512i t0 = _mm512_unpacklo_epi32(a[0], a[1]);
        const __m512i t1 = _mm512_unpackhi_epi32(a[0], a[1]);
        const __m512i t2 = _mm512_unpacklo_epi32(a[2], a[3]);
        const __m512i t3 = _mm512_unpackhi_epi32(a[2], a[3]);
        out[0] = _mm512_unpacklo_epi64(t0, t2);
        out[1] = _mm512_unpackhi_epi64(t0, t2);
        out[2] = _mm512_unpacklo_epi64(t1, t3);
        out[3] = _mm512_unpackhi_epi64(t1, t3);
    }

    template <typename F> static void put(std::uint8_t (*to)[steps_a_block][4 * rows], int step, Bytes weights) {
        if constexpr (F::is_signed) {
            weights = _mm512_xor_si512(weights, _mm512_set1_epi8(-128));
        }
        _mm512_store_si512(to[0][step], weights);
    }

    static void widen(const std::uint16_t *halves, float *to) {
        _mm512_store_ps(to, _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(halves))));
    }

    // to[row] = factors[row] * a byte of each row
    static void spread(Bytes bytes, int byte, const float *factors, float *to) {
        const __m512i left = _mm512_slli_epi32(bytes, static_cast<unsigned>(24 - 8 * byte));
        const __m512 numbers = _mm512_cvtepi32_ps(_mm512_srai_epi32(left, 24));
        _mm512_store_ps(to, _mm512_mul_ps(_mm512_load_ps(factors), numbers));
    }

    // ---- columns

    static RoundedBlock round_block(const float *x, std::int8_t *values) {
        const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
        const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
        const __m512 factor = _mm512_set1_ps(to_int8(largest));
        const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, factor));
        const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, factor));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(values), _mm512_cvtsepi32_epi8(first));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(values + 16), _mm512_cvtsepi32_epi8(second));
        return {largest / 127.0F, {_mm512_reduce_add_epi32(first), _mm512_reduce_add_epi32(second)}};
    }

    // ---- the product

    using Sums = __m512;

    static Sums load_sums(const float *sums) { return _mm512_load_ps(sums); }
    static void store_sums(float *to, Sums sums) { _mm512_store_ps(to, sums); }

    template <typename F, int n>
    static void add_block(const Block<Avx512> &block, const Int8Columns::View &at, Sums *total) {
        for (int half = 0; half < F::halves; ++half) {
            __m512i dots[n];
            for (int c = 0; c < n; ++c) {
                dots[c] =
                    zero_point<F> == 0 ? _mm512_setzero_si512() : _mm512_set1_epi32(at.offsets[F::halves * c + half]);
            }
            for (int step = steps_a_block / F::halves * half; step < steps_a_block / F::halves * (half + 1); ++step) {
                const __m512i weights = _mm512_load_si512(block.weights[0][step]);
                for (int c = 0; c < n; ++c) {
                    std::int32_t four;
                    std::memcpy(&four, at.values + 32 * c + 4 * step, sizeof four);
                    dots[c] = _mm512_dpbusd_epi32(dots[c], weights, _mm512_set1_epi32(four));
                }
            }
            const __m512 scales = _mm512_load_ps(block.scales[half]);
            for (int c = 0; c < n; ++c) {
                const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(at.scales[c]));
                total[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[c]), scale, total[c]);
            }
        }
        if constexpr (F::has_minima) {
            const __m512 minima = _mm512_load_ps(block.minima);
            for (int c = 0; c < n; ++c) {
                total[c] = _mm512_fmadd_ps(minima, _mm512_set1_ps(at.sums[c]), total[c]);
            }
        }
    }

    // ---- floating point

    using Floats = __m512;

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats load_f32(const std::byte *at) { return _mm512_loadu_ps(at); }
    static Floats load_f16(const std::byte *at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
    }
    static Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
    static float sum(Floats numbers) { return _mm512_reduce_add_ps(numbers); }
};

// The columns are rounded to bfloat16, as ggml does.
struct RoundedBF16 {
    using Column = std::uint16_t;
    static constexpr std::size_t weight_bytes = 2;
    static constexpr std::int64_t step = 32;

    static __m512i load(const std::byte *at) { return _mm512_loadu_si512(at); }
    static __m512i load_column(const Column *at) { return _mm512_loadu_si512(at); }
    static __m512 add(__m512i weights, __m512i column, __m512 sum) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(column));
    }

    static void round(const float *x, std::int64_t n, Column *to) {
        for (std::int64_t k = 0; k < n; k += 16) {
            const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + k));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + k), reinterpret_cast<__m256i>(rounded));
        }
    }
};

} // namespace

const KernelTable avx512_kernels = table_of<Avx512, RoundedBF16>("avx512", &avx512_attention);

} // namespace esp::kernels
