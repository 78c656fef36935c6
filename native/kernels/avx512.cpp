// AVX-512 with VNNI and BF16: sixteen weight rows side by side, eight columns a tile.
#include "kernels/int8_columns.hpp"
#include "kernels/tables.hpp"

#include <cstring>

#include <immintrin.h>

namespace esp::kernels {
namespace {

constexpr std::int64_t rows_a_group = 16;
constexpr std::int64_t blocks_a_chunk = 32; // 1024 weights of 16 rows: 16 KiB of scratch, half of a first-level cache
constexpr int columns_a_tile = 8;

// std::min is a function that the linker would share with code for other processors.
template <typename T> constexpr T smaller(T a, T b) { return b < a ? b : a; }

// Unpacked weights of 16 rows: for every block of 32, eight vectors of [row][4 successive weights], unsigned.
struct Unpacked {
    alignas(64) std::uint8_t weights[blocks_a_chunk][8][64];
    alignas(64) float scales[blocks_a_chunk][2][16]; // a block, or its halves
    alignas(64) float minima[blocks_a_chunk][16];
    alignas(64) std::uint16_t halves[blocks_a_chunk][2][16]; // half-precision numbers of a unit, as they are
};

// Sixteen rows of the weight matrix; rows past the end repeat the last one.
struct RowGroup {
    const std::byte *rows[rows_a_group];

    RowGroup(const Matmul &matmul, std::int64_t first) {
        for (std::int64_t i = 0; i < rows_a_group; ++i) {
            rows[i] =
                matmul.weights + matmul.weight_stride * static_cast<std::size_t>(smaller(first + i, matmul.n_rows - 1));
        }
    }
};

// Fetches what the next row group will read while this one is computed. Rows lie one after the other, so the group is
// one stretch of memory; sixteen short streams are more than what a processor recognises by itself. Into the second
// level: the first holds the scratch.
inline void prefetch_stretch(const std::byte *next, std::size_t from, std::size_t bytes) {
    for (std::size_t at = from & ~std::size_t{63}; at < from + bytes; at += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(next + at), _MM_HINT_T1);
    }
}

// out[j], lane by lane: bytes 4j..4j+3 of each row's sixteen at `offset`.
inline void load_transposed(const RowGroup &group, std::size_t offset, __m512i out[4]) {
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

// Collects the half-precision numbers of all units of a chunk, `count` of each at `offset`. Reading row by row also
// brings the chunk into the cache as one stream. (Written in twos and read in sixteens, they must not be read back at
// once.)
inline void collect_halves(const RowGroup &group, std::size_t at, std::size_t unit_bytes, std::int64_t n_units,
                           int count, Unpacked &to) {
    for (int i = 0; i < rows_a_group; ++i) {
        const std::byte *from = group.rows[i] + at;
        for (std::int64_t unit = 0; unit < n_units; ++unit, from += unit_bytes) {
            for (int number = 0; number < count; ++number) {
                std::memcpy(&to.halves[unit][number][i], from + 2 * number, sizeof(std::uint16_t));
            }
        }
    }
}

inline __m512 widen(const std::uint16_t *halves) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(halves)));
}

inline __m512i low_nibbles(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(0x0f)); }
inline __m512i high_nibbles(__m512i bytes) {
    return _mm512_and_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(0x0f));
}

// Sixteen bytes of each row: weights 0..15 in the low halves, 16..31 in the high ones.
inline void unpack_nibbles(const RowGroup &group, std::size_t offset, std::uint8_t (*to)[64]) {
    __m512i parts[4];
    load_transposed(group, offset, parts);
    for (int j = 0; j < 4; ++j) {
        _mm512_store_si512(to[j], low_nibbles(parts[j]));
        _mm512_store_si512(to[4 + j], high_nibbles(parts[j]));
    }
}

// ---- formats: how a unit of a row becomes blocks of 32 unsigned weights -------------------------------------------

struct Q8_0 {
    static constexpr std::size_t unit_bytes = 34, halves_at = 0;
    static constexpr int blocks_a_unit = 1, zero_point = 128, halves = 1, n_halves = 1;
    static constexpr bool has_minima = false;

    static void unpack(const RowGroup &group, std::size_t at, Unpacked &to, std::int64_t block) {
        for (int half = 0; half < 2; ++half) {
            __m512i parts[4];
            load_transposed(group, at + 2 + 16 * static_cast<std::size_t>(half), parts);
            for (int j = 0; j < 4; ++j) {
                _mm512_store_si512(to.weights[block][4 * half + j], _mm512_xor_si512(parts[j], _mm512_set1_epi8(-128)));
            }
        }
        _mm512_store_ps(to.scales[block][0], widen(to.halves[block][0]));
    }
};

struct Q4_0 {
    static constexpr std::size_t unit_bytes = 18, halves_at = 0;
    static constexpr int blocks_a_unit = 1, zero_point = 8, halves = 1, n_halves = 1;
    static constexpr bool has_minima = false;

    static void unpack(const RowGroup &group, std::size_t at, Unpacked &to, std::int64_t block) {
        unpack_nibbles(group, at + 2, to.weights[block]);
        _mm512_store_ps(to.scales[block][0], widen(to.halves[block][0]));
    }
};

struct Q4_1 {
    static constexpr std::size_t unit_bytes = 20, halves_at = 0;
    static constexpr int blocks_a_unit = 1, zero_point = 0, halves = 1, n_halves = 2;
    static constexpr bool has_minima = true;

    static void unpack(const RowGroup &group, std::size_t at, Unpacked &to, std::int64_t block) {
        unpack_nibbles(group, at + 4, to.weights[block]);
        _mm512_store_ps(to.scales[block][0], widen(to.halves[block][0]));
        _mm512_store_ps(to.minima[block], widen(to.halves[block][1]));
    }
};

// d, dmin, eight 6-bit scales and minima in 12 bytes, 128 bytes of nibbles: w = d * scale * q - dmin * minimum.
struct Q4_K {
    static constexpr std::size_t unit_bytes = 144, halves_at = 0;
    static constexpr int blocks_a_unit = 8, zero_point = 0, halves = 1, n_halves = 2;
    static constexpr bool has_minima = true;

    static void unpack(const RowGroup &group, std::size_t at, Unpacked &to, std::int64_t block) {
        unpack_scales(group, at, to, block);
        for (int pair = 0; pair < 4; ++pair) {
            for (int half = 0; half < 2; ++half) {
                __m512i parts[4];
                load_transposed(
                    group, at + 16 + 32 * static_cast<std::size_t>(pair) + 16 * static_cast<std::size_t>(half), parts);
                for (int j = 0; j < 4; ++j) {
                    _mm512_store_si512(to.weights[block + 2 * pair][4 * half + j], low_nibbles(parts[j]));
                    _mm512_store_si512(to.weights[block + 2 * pair + 1][4 * half + j], high_nibbles(parts[j]));
                }
            }
        }
    }

  private:
    static void unpack_scales(const RowGroup &group, std::size_t at, Unpacked &to, std::int64_t block) {
        alignas(16) std::uint8_t scales[8][rows_a_group], minima[8][rows_a_group];
        for (int i = 0; i < rows_a_group; ++i) {
            std::uint32_t packed[3];
            std::memcpy(packed, group.rows[i] + at + 4, sizeof packed);
            constexpr std::uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x03030303;
            const std::uint32_t words[4] = {
                packed[0] & six, (packed[2] & four) | (((packed[0] >> 6) & two) << 4),       // scales 0..3, 4..7
                packed[1] & six, ((packed[2] >> 4) & four) | (((packed[1] >> 6) & two) << 4) // minima 0..3, 4..7
            };
            for (int j = 0; j < 4; ++j) {
                scales[j][i] = static_cast<std::uint8_t>(words[0] >> (8 * j));
                scales[4 + j][i] = static_cast<std::uint8_t>(words[1] >> (8 * j));
                minima[j][i] = static_cast<std::uint8_t>(words[2] >> (8 * j));
                minima[4 + j][i] = static_cast<std::uint8_t>(words[3] >> (8 * j));
            }
        }
        const __m512 d = widen(to.halves[block / 8][0]);
        const __m512 dmin = _mm512_sub_ps(_mm512_setzero_ps(), widen(to.halves[block / 8][1]));
        for (int j = 0; j < 8; ++j) {
            const auto numbers = [](const std::uint8_t *bytes) {
                return _mm512_cvtepi32_ps(
                    _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i *>(bytes))));
            };
            _mm512_store_ps(to.scales[block + j][0], _mm512_mul_ps(d, numbers(scales[j])));
            _mm512_store_ps(to.minima[block + j], _mm512_mul_ps(dmin, numbers(minima[j])));
        }
    }
};

// 128 bytes of low nibbles, 64 of upper bit pairs, sixteen signed scales, d: w = d * scale * (q - 32).
struct Q6_K {
    static constexpr std::size_t unit_bytes = 210, halves_at = 208;
    static constexpr int blocks_a_unit = 8, zero_point = 32, halves = 2, n_halves = 1;
    static constexpr bool has_minima = false;

    static void unpack(const RowGroup &group, std::size_t at, Unpacked &to, std::int64_t block) {
        for (std::size_t part = 0; part < 2; ++part) {
            for (std::size_t half = 0; half < 2; ++half) {
                __m512i first[4], second[4], upper[4];
                load_transposed(group, at + 64 * part + 16 * half, first);
                load_transposed(group, at + 64 * part + 32 + 16 * half, second);
                load_transposed(group, at + 128 + 32 * part + 16 * half, upper);
                for (std::size_t j = 0; j < 4; ++j) {
                    const auto bits = [&](int shift) { // a bit pair of each byte, at bits 4 and 5
                        const __m512i moved = shift < 4 ? _mm512_slli_epi16(upper[j], static_cast<unsigned>(4 - shift))
                                                        : _mm512_srli_epi16(upper[j], static_cast<unsigned>(shift - 4));
                        return _mm512_and_si512(moved, _mm512_set1_epi8(0x30));
                    };
                    auto *const blocks = &to.weights[block + static_cast<std::int64_t>(4 * part)];
                    const std::size_t k = 4 * half + j;
                    _mm512_store_si512(blocks[0][k], _mm512_or_si512(low_nibbles(first[j]), bits(0)));
                    _mm512_store_si512(blocks[1][k], _mm512_or_si512(low_nibbles(second[j]), bits(2)));
                    _mm512_store_si512(blocks[2][k], _mm512_or_si512(high_nibbles(first[j]), bits(4)));
                    _mm512_store_si512(blocks[3][k], _mm512_or_si512(high_nibbles(second[j]), bits(6)));
                }
            }
        }
        unpack_scales(group, at, to, block);
    }

  private:
    static void unpack_scales(const RowGroup &group, std::size_t at, Unpacked &to, std::int64_t block) {
        __m512i parts[4];
        load_transposed(group, at + 192, parts);
        const __m512 d = widen(to.halves[block / 8][0]);
        for (int j = 0; j < 4; ++j) {
            for (int byte = 0; byte < 4; ++byte) {
                const __m512i left = _mm512_slli_epi32(parts[j], static_cast<unsigned>(24 - 8 * byte));
                const __m512 scale = _mm512_cvtepi32_ps(_mm512_srai_epi32(left, 24));
                const int index = 4 * j + byte; // of 16 weights
                _mm512_store_ps(to.scales[block + index / 2][index % 2], _mm512_mul_ps(d, scale));
            }
        }
    }
};

// ---- the product --------------------------------------------------------------------------------------------------

// Adds the products of a chunk to `sums` of `n` columns, from `first` on.
template <typename F, int n>
void multiply_tile(const Unpacked &unpacked, const Int8Columns &columns, std::int64_t chunk, std::int64_t n_blocks,
                   std::int64_t first, float (*sums)[rows_a_group]) {
    __m512 total[n];
    for (int c = 0; c < n; ++c) {
        total[c] = _mm512_load_ps(sums[c]);
    }
    for (std::int64_t b = 0; b < n_blocks; ++b) {
        const Int8Columns::View at = columns.at(chunk + b, first);
        for (int half = 0; half < F::halves; ++half) {
            __m512i dots[n];
            for (int c = 0; c < n; ++c) {
                dots[c] = F::zero_point == 0 ? _mm512_setzero_si512()
                                             : _mm512_set1_epi32(at.offsets[F::halves == 2 ? 2 * c + half : c]);
            }
            for (int j = 8 / F::halves * half; j < 8 / F::halves * (half + 1); ++j) {
                const __m512i weights = _mm512_load_si512(unpacked.weights[b][j]);
                for (int c = 0; c < n; ++c) {
                    std::int32_t four;
                    std::memcpy(&four, at.values + 32 * c + 4 * j, sizeof four);
                    dots[c] = _mm512_dpbusd_epi32(dots[c], weights, _mm512_set1_epi32(four));
                }
            }
            const __m512 scales = _mm512_load_ps(unpacked.scales[b][half]);
            for (int c = 0; c < n; ++c) {
                const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(at.scales[c]));
                total[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[c]), scale, total[c]);
            }
        }
        if constexpr (F::has_minima) {
            const __m512 minima = _mm512_load_ps(unpacked.minima[b]);
            for (int c = 0; c < n; ++c) {
                total[c] = _mm512_fmadd_ps(minima, _mm512_set1_ps(at.sums[c]), total[c]);
            }
        }
    }
    for (int c = 0; c < n; ++c) {
        _mm512_store_ps(sums[c], total[c]);
    }
}

using Tile = void (*)(const Unpacked &, const Int8Columns &, std::int64_t, std::int64_t, std::int64_t,
                      float (*)[rows_a_group]);

template <typename F> Tile tile_of(std::int64_t n) {
    static constexpr Tile tiles[] = {multiply_tile<F, 1>, multiply_tile<F, 2>, multiply_tile<F, 3>,
                                     multiply_tile<F, 4>, multiply_tile<F, 5>, multiply_tile<F, 6>,
                                     multiply_tile<F, 7>, multiply_tile<F, 8>};
    return tiles[n - 1];
}

template <typename F>
inline void unpack_chunk(const Matmul &matmul, const RowGroup &group, std::int64_t chunk, std::int64_t n_blocks,
                         Unpacked &unpacked) {
    constexpr std::size_t stretch = rows_a_group * F::unit_bytes;
    const std::byte *const next = group.rows[0] + rows_a_group * matmul.weight_stride;
    std::size_t unit = static_cast<std::size_t>(chunk) / F::blocks_a_unit;
    collect_halves(group, F::unit_bytes * unit + F::halves_at, F::unit_bytes, n_blocks / F::blocks_a_unit, F::n_halves,
                   unpacked);
    for (std::int64_t b = 0; b < n_blocks; b += F::blocks_a_unit, ++unit) {
        prefetch_stretch(next, stretch * unit, stretch);
        F::unpack(group, F::unit_bytes * unit, unpacked, b);
    }
}

template <typename F>
void multiply_int8(const Matmul &matmul, const std::byte *prepared, std::int64_t begin, std::int64_t end) {
    static thread_local Unpacked unpacked;
    constexpr std::int64_t strip = 64; // columns whose sums are kept while the chunks of a row group pass by
    alignas(64) float sums[strip][rows_a_group];
    const Int8Columns columns = Int8Columns::of(prepared, matmul.n_k, matmul.n_columns, F::halves);
    const std::int64_t n_blocks = matmul.n_k / 32;
    for (std::int64_t first = 0; first < matmul.n_columns; first += strip) {
        const std::int64_t n = smaller(strip, matmul.n_columns - first);
        for (std::int64_t row = begin; row < end; row += rows_a_group) {
            const RowGroup group(matmul, row);
            std::memset(sums, 0, sizeof(float) * rows_a_group * static_cast<std::size_t>(n));
            for (std::int64_t chunk = 0; chunk < n_blocks; chunk += blocks_a_chunk) {
                const std::int64_t size = smaller(blocks_a_chunk, n_blocks - chunk);
                unpack_chunk<F>(matmul, group, chunk, size, unpacked);
                for (std::int64_t c = 0; c < n; c += columns_a_tile) {
                    const std::int64_t width = smaller<std::int64_t>(columns_a_tile, n - c);
                    tile_of<F>(width)(unpacked, columns, chunk, size, first + c, sums + c);
                }
            }
            const auto tail = static_cast<__mmask16>((1U << smaller(rows_a_group, matmul.n_rows - row)) - 1U);
            for (std::int64_t c = 0; c < n; ++c) {
                auto *const y =
                    reinterpret_cast<std::byte *>(matmul.y) + matmul.y_stride * static_cast<std::size_t>(first + c);
                _mm512_mask_storeu_ps(reinterpret_cast<float *>(y) + row, tail, _mm512_load_ps(sums[c]));
            }
        }
    }
}

// ---- columns ------------------------------------------------------------------------------------------------------

// 32 numbers as int8 with one scale, as ggml's Q8_0 but with a scale in single precision.
template <typename F>
void prepare_int8(const Matmul &matmul, std::byte *prepared, std::int64_t begin, std::int64_t end) {
    const Int8Columns columns = Int8Columns::of(prepared, matmul.n_k, matmul.n_columns, F::halves);
    for (std::int64_t c = begin; c < end; ++c) {
        const auto *const x = reinterpret_cast<const float *>(reinterpret_cast<const std::byte *>(matmul.x) +
                                                              matmul.x_stride * static_cast<std::size_t>(c));
        for (std::int64_t b = 0; b < matmul.n_k / 32; ++b) {
            const Int8Columns::View at = columns.at(b, c);
            const __m512 low = _mm512_loadu_ps(x + 32 * b), high = _mm512_loadu_ps(x + 32 * b + 16);
            const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
            const float scale = largest / 127.0F;
            // below, the factor would be infinite
            const __m512 inverse = _mm512_set1_ps(largest > 0x1p-119F ? 127.0F / largest : 0.0F);
            const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
            const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(at.values), _mm512_cvtsepi32_epi8(first));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(at.values + 16), _mm512_cvtsepi32_epi8(second));
            at.scales[0] = scale;
            const std::int32_t sums[2] = {_mm512_reduce_add_epi32(first), _mm512_reduce_add_epi32(second)};
            if constexpr (F::halves == 2) {
                at.offsets[0] = -F::zero_point * sums[0];
                at.offsets[1] = -F::zero_point * sums[1];
            } else {
                at.offsets[0] = -F::zero_point * (sums[0] + sums[1]);
            }
            at.sums[0] = scale * static_cast<float>(sums[0] + sums[1]);
        }
    }
}

template <typename F>
constexpr FormatKernel int8_kernel{32 * F::blocks_a_unit, Int8Columns::size<F::halves>, prepare_int8<F>,
                                   multiply_int8<F>, rows_a_group};

// ---- weights in floating point --------------------------------------------------------------------------------------

// Weights and columns of 32-bit floats: what they are loaded from and how products are added.
struct F32 {
    using Column = float;
    static constexpr std::size_t weight_bytes = 4;
    static constexpr std::int64_t step = 16;

    static __m512 load_weights(const std::byte *at) { return _mm512_loadu_ps(at); }
    static __m512 load_column(const Column *at) { return _mm512_loadu_ps(at); }
    static __m512 add(__m512 sum, __m512 weights, __m512 column) { return _mm512_fmadd_ps(weights, column, sum); }
};

struct F16 : F32 {
    static constexpr std::size_t weight_bytes = 2;
    static __m512 load_weights(const std::byte *at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
    }
};

// The columns are rounded to bfloat16, as ggml does.
struct BF16 {
    using Column = std::uint16_t;
    static constexpr std::size_t weight_bytes = 2;
    static constexpr std::int64_t step = 32;

    static __m512i load_weights(const std::byte *at) { return _mm512_loadu_si512(at); }
    static __m512i load_column(const Column *at) { return _mm512_loadu_si512(at); }
    static __m512 add(__m512 sum, __m512i weights, __m512i column) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(column));
    }
};

constexpr int float_rows = 4, float_columns = 5; // of a tile: twenty sums, and five columns, in 32 registers

inline const float *column_of(const Matmul &matmul, std::int64_t c) {
    return reinterpret_cast<const float *>(reinterpret_cast<const std::byte *>(matmul.x) +
                                           matmul.x_stride * static_cast<std::size_t>(c));
}

template <typename F>
const typename F::Column *prepared_column(const Matmul &matmul, const std::byte *prepared, std::int64_t c) {
    if constexpr (sizeof(typename F::Column) == sizeof(float)) {
        return column_of(matmul, c);
    } else {
        return reinterpret_cast<const typename F::Column *>(prepared) + matmul.n_k * c;
    }
}

template <typename F, int n>
void multiply_float_tile(const Matmul &matmul, const std::byte *prepared, std::int64_t row, std::int64_t first) {
    const std::byte *rows[float_rows];
    const typename F::Column *x[n];
    for (int r = 0; r < float_rows; ++r) {
        rows[r] = matmul.weights + matmul.weight_stride * static_cast<std::size_t>(smaller(row + r, matmul.n_rows - 1));
    }
    for (int c = 0; c < n; ++c) {
        x[c] = prepared_column<F>(matmul, prepared, first + c);
    }
    __m512 total[float_rows][n];
    for (int r = 0; r < float_rows; ++r) {
        for (int c = 0; c < n; ++c) {
            total[r][c] = _mm512_setzero_ps();
        }
    }
    constexpr std::size_t stretch = F::weight_bytes * F::step;
    const std::byte *const next = rows[0] + float_rows * matmul.weight_stride;
    for (std::int64_t k = 0; k < matmul.n_k; k += F::step) {
        const std::size_t at = F::weight_bytes * static_cast<std::size_t>(k);
        if (first == 0) {
            prefetch_stretch(next, float_rows * at, float_rows * stretch);
        }
        decltype(F::load_column(x[0])) values[n];
        for (int c = 0; c < n; ++c) {
            values[c] = F::load_column(x[c] + k);
        }
        for (int r = 0; r < float_rows; ++r) {
            const auto weights = F::load_weights(rows[r] + at);
            for (int c = 0; c < n; ++c) {
                total[r][c] = F::add(total[r][c], weights, values[c]);
            }
        }
    }
    for (int c = 0; c < n; ++c) {
        auto *const y = reinterpret_cast<float *>(reinterpret_cast<std::byte *>(matmul.y) +
                                                  matmul.y_stride * static_cast<std::size_t>(first + c));
        for (int r = 0; r < float_rows && row + r < matmul.n_rows; ++r) {
            y[row + r] = _mm512_reduce_add_ps(total[r][c]);
        }
    }
}

template <typename F>
void multiply_float(const Matmul &matmul, const std::byte *prepared, std::int64_t begin, std::int64_t end) {
    static constexpr decltype(&multiply_float_tile<F, 1>) tiles[float_columns] = {
        multiply_float_tile<F, 1>, multiply_float_tile<F, 2>, multiply_float_tile<F, 3>, multiply_float_tile<F, 4>,
        multiply_float_tile<F, 5>};
    for (std::int64_t row = begin; row < end; row += float_rows) { // the weights of a tile stay in the cache
        for (std::int64_t c = 0; c < matmul.n_columns; c += float_columns) {
            tiles[smaller<std::int64_t>(float_columns, matmul.n_columns - c) - 1](matmul, prepared, row, c);
        }
    }
}

template <typename F> std::size_t float_columns_size(std::int64_t n_k, std::int64_t n_columns) {
    using Column = typename F::Column;
    const auto bytes = sizeof(Column) * static_cast<std::size_t>(n_k * n_columns);
    return sizeof(Column) == sizeof(float) ? 0 : (bytes + 63) / 64 * 64;
}

template <typename F>
void prepare_float(const Matmul &matmul, std::byte *prepared, std::int64_t begin, std::int64_t end) {
    if constexpr (sizeof(typename F::Column) != sizeof(float)) {
        for (std::int64_t c = begin; c < end; ++c) {
            const float *const x = column_of(matmul, c);
            auto *const to = reinterpret_cast<typename F::Column *>(prepared) + matmul.n_k * c;
            for (std::int64_t k = 0; k < matmul.n_k; k += 16) {
                const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + k));
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + k), reinterpret_cast<__m256i>(rounded));
            }
        }
    }
}

template <typename F>
constexpr FormatKernel float_kernel{F::step, float_columns_size<F>, prepare_float<F>, multiply_float<F>, float_rows};

} // namespace

const KernelTable avx512_kernels{"avx512",
                                 {&int8_kernel<Q4_0>, &int8_kernel<Q4_1>, &int8_kernel<Q8_0>, &int8_kernel<Q4_K>,
                                  &int8_kernel<Q6_K>, &float_kernel<BF16>, &float_kernel<F16>, &float_kernel<F32>},
                                 &avx512_attention};

} // namespace esp::kernels
