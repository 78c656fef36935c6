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

    // All blocks at once, so that their scales fill a vector; where there are fewer, the last one stands in for others.
    template <typename F> static void round_patch(const Patch &patch) {
        __m512i parts[2][Patch::most] = {};
        for (int i = 0; i < Patch::most; ++i) {
            parts[0][i] = largest_bits(patch.x[smaller(i, patch.n - 1)]);
        }
        const __m512 largest =
            _mm512_castsi512_ps(gathered(parts[0], [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }));
        alignas(64) float factors[Patch::most];
        _mm512_store_ps(factors, to_int8(largest));
        std::int8_t *values = patch.to.values;
        for (int first = 0; first < patch.n; first += patch.run, values += 32 * (patch.stride - patch.run)) {
            for (int i = first; i < smaller(first + patch.run, patch.n); ++i, values += 32) {
                parts[0][i] = round_half(patch.x[i], factors[i], values);
                parts[1][i] = round_half(patch.x[i] + 16, factors[i], values + 16);
                if (F::halves == 1) {
                    parts[0][i] = _mm512_add_epi32(parts[0][i], parts[1][i]);
                }
            }
        }
        __m512i sums[F::halves];
        for (int half = 0; half < F::halves; ++half) {
            sums[half] = gathered(parts[half], [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
        }
        store_scales<F>(_mm512_div_ps(largest, _mm512_set1_ps(127.0F)), sums, patch);
    }

    // ---- the product

    using Sums = __m512;

    static Sums load_sums(const float *sums) { return _mm512_load_ps(sums); }
    static void store_sums(float *to, Sums sums) { _mm512_storeu_ps(to, sums); }

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
                    add_fours(dots[c], weights, at.values + 32 * c + 4 * step);
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

    // Adds the products of four bytes of each row with four of a column, which the instruction itself spreads out:
    // compilers load them by one of their own first, as many again.
    static void add_fours(__m512i &dots, __m512i weights, const std::int8_t *column) {
        using Four = const std::int8_t[4];
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(dots) : "v"(weights), "m"(*reinterpret_cast<Four *>(column)));
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

  private:
    static __m512 to_int8(__m512 largest) {
        const __mmask16 is_finite = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(0x1p-119F), _CMP_GT_OQ);
        return _mm512_maskz_div_ps(is_finite, _mm512_set1_ps(127.0F), largest);
    }

    // Of two vectors without their signs, lane by lane; bits are ordered like numbers, and not a number is above all.
    static __m512i largest_bits(const float *x) {
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        return _mm512_max_epi32(_mm512_and_si512(_mm512_loadu_si512(x), magnitude),
                                _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude));
    }

    // Lane i: all lanes of parts[i] together.
    template <typename Two> static __m512i gathered(__m512i (&parts)[16], Two two) {
        for (int i = 0; i < 8; ++i) {
            const __m512i a = parts[2 * i], b = parts[2 * i + 1];
            parts[i] = two(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        }
        for (int i = 0; i < 4; ++i) {
            const __m512i a = parts[2 * i], b = parts[2 * i + 1];
            parts[i] = two(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        }
        for (int n = 2; n > 0; n /= 2) {
            for (int i = 0; i < n; ++i) {
                const __m512i a = parts[2 * i], b = parts[2 * i + 1];
                parts[i] = two(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
            }
        }
        return parts[0];
    }

    static __m512i round_half(const float *x, float factor, std::int8_t *values) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor)));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(values), _mm512_cvtsepi32_epi8(rounded));
        return rounded;
    }

    // With the sums of whole blocks, or of their halves where those have scales of their own.
    template <typename F>
    static void store_scales(__m512 scales, const __m512i (&sums)[F::halves], const Patch &patch) {
        constexpr int high = F::halves - 1;
        const __m512i of_block = high == 0 ? sums[0] : _mm512_add_epi32(sums[0], sums[high]);
        const __m512i zero = _mm512_set1_epi32(-zero_point<F>);
        const __m512i low_offsets = _mm512_mullo_epi32(zero, sums[0]), offsets = _mm512_mullo_epi32(zero, sums[high]);
        const __m512 scaled = _mm512_mul_ps(scales, _mm512_cvtepi32_ps(of_block));
        Int8Columns::View to = patch.to;
        for (int first = 0; first < patch.n; first += patch.run, to = to.after(patch.stride, F::halves)) {
            const int n = smaller(patch.run, patch.n - first);
            const __m512i lanes = _mm512_add_epi32(count_from_zero(), _mm512_set1_epi32(first));
            _mm512_mask_storeu_ps(to.scales, first_lanes(n), _mm512_permutexvar_ps(lanes, scales));
            _mm512_mask_storeu_ps(to.sums, first_lanes(n), _mm512_permutexvar_ps(lanes, scaled));
            if (high == 0) {
                _mm512_mask_storeu_epi32(to.offsets, first_lanes(n), _mm512_permutexvar_epi32(lanes, offsets));
            } else { // in turns
                const __m512i both = _mm512_add_epi32(in_turns(), _mm512_set1_epi32(first));
                _mm512_mask_storeu_epi32(to.offsets, first_lanes(2 * n),
                                         _mm512_permutex2var_epi32(low_offsets, both, offsets));
            }
        }
    }

    static __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1U << static_cast<unsigned>(n)) - 1); }
    static __m512i count_from_zero() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
    static __m512i in_turns() { return _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
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
