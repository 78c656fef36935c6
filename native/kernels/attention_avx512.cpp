// Attention on AVX-512: sixteen cells side by side for the scores, sixteen numbers of a value vector for the sums.
#include "kernels/tables.hpp"

#include <cmath>

#include <immintrin.h>

namespace esp::kernels {
namespace {

constexpr std::int64_t cells_a_group = 16;
constexpr std::int64_t groups_a_chunk = 8;
constexpr std::int64_t cells_a_chunk = cells_a_group * groups_a_chunk; // work of one item
constexpr std::int64_t queries_a_tile = 24;
constexpr std::int64_t largest_head = 256;
constexpr std::int64_t most_rows = 64;
constexpr std::int64_t header = 16; // floats in front of a partial sum: largest score, sum of weights, padding

std::int64_t chunks_of(const Attention &task) { return (task.n_cells + cells_a_chunk - 1) / cells_a_chunk; }
std::int64_t heads_a_group(const Attention &task) { return task.n_heads / task.n_kv_heads; }

// A query is a row and one of the heads that share a KV head.
struct Query {
    std::int64_t row, head;
};

Query query_at(const Attention &task, std::int64_t kv_head, std::int64_t index) {
    const std::int64_t heads = heads_a_group(task);
    return {index / heads, kv_head * heads + index % heads};
}

std::int64_t partial_at(const Attention &task, Query query, std::int64_t chunk) {
    return ((query.row * task.n_heads + query.head) * chunks_of(task) + chunk) * (header + task.v_size);
}

const std::byte *mask_at(const Attention &task, std::int64_t row, std::int64_t cell) {
    return task.mask + task.mask_row_stride * static_cast<std::size_t>(row) + 2 * static_cast<std::size_t>(cell);
}

__m512 load_half(const std::byte *at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
}

// e^x for x <= 0; what is below the smallest normal number is 0. Relative error below 2e-7.
__m512 exponential(__m512 x) {
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33F), _CMP_GE_OQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504F)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375F), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4F), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4F);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3F));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3F));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2F));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1F));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1F));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0F)));
    return _mm512_maskz_scalef_ps(counts, p, n);
}

// The cells that the rows of a pass see in one chunk, in their order. A chunk is so many cells that a row sees, not so
// many of the cache: what lies between them (other branches, other sessions) moves nothing, so it cannot change a bit.
class Lists {
  public:
    explicit Lists(const Attention &task) : task_(task) {}

    // Chunks are asked for in rising order, or from the first one again.
    void seek(std::int64_t chunk) {
        if (chunk + 1 == next_) {
            return;
        }
        if (chunk < next_) {
            next_ = 0;
            for (std::int64_t row = 0; row < task_.n_rows; ++row) {
                cursors_[row] = 0;
            }
        }
        for (; next_ <= chunk; ++next_) {
            for (std::int64_t row = 0; row < task_.n_rows; ++row) {
                fill(row);
            }
        }
    }

    std::int64_t count(std::int64_t row) const { return counts_[row]; }
    const std::int32_t *cells(std::int64_t row) const { return cells_[row]; }

    // Whether sixteen cells lie side by side.
    bool is_stretch(std::int64_t row, std::int64_t group) const { return stretch(row, group) >= 0; }

    // Whether the rows read the same sixteen cells, in one stretch.
    bool same(std::int64_t row, std::int64_t other, std::int64_t group) const {
        return stretch(row, group) >= 0 && stretch(row, group) == stretch(other, group);
    }

  private:
    std::int64_t stretch(std::int64_t row, std::int64_t group) const {
        const std::int64_t from = group * cells_a_group, last = from + cells_a_group - 1;
        const bool is_one = counts_[row] > last && cells_[row][last] - cells_[row][from] == cells_a_group - 1;
        return is_one ? cells_[row][from] : -1;
    }

    void fill(std::int64_t row) {
        const __m256i hidden = _mm256_set1_epi16(static_cast<short>(0xfc00)); // minus infinity
        const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        std::int64_t cell = cursors_[row], n = 0;
        while (cell < task_.n_cells && n < cells_a_chunk) {
            const std::int64_t base = cell / cells_a_group * cells_a_group;
            const auto mask = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask_at(task_, row, base)));
            unsigned seen = _mm256_cmpneq_epi16_mask(mask, hidden) & (0xffffU << (cell - base)) & 0xffffU;
            cell = base + cells_a_group;
            const std::int64_t room = cells_a_chunk - n;
            if (__builtin_popcount(seen) > room) {
                seen = _pdep_u32((1U << room) - 1U, seen);
                cell = base + 32 - __builtin_clz(seen);
            }
            const __m512i found = _mm512_maskz_compress_epi32(
                static_cast<__mmask16>(seen), _mm512_add_epi32(steps, _mm512_set1_epi32(static_cast<int>(base))));
            _mm512_storeu_si512(cells_[row] + n, found);
            n += __builtin_popcount(seen);
        }
        cursors_[row] = cell;
        counts_[row] = n;
        const std::int32_t last =
            n == 0 ? 0 : cells_[row][n - 1]; // places past the end repeat a cell and weigh nothing
        for (std::int64_t i = n; i % cells_a_group != 0; ++i) {
            cells_[row][i] = last;
        }
    }

    const Attention &task_;
    std::int64_t next_ = 0;
    std::int64_t cursors_[most_rows] = {};
    std::int64_t counts_[most_rows];
    std::int32_t cells_[most_rows][cells_a_chunk + cells_a_group];
};

// A chunk for a tile of queries.
class Tile {
  public:
    Tile(const Attention &task, const Lists &lists, std::int64_t kv_head, std::int64_t chunk, std::int64_t first,
         std::int64_t n)
        : task_(task), lists_(lists), kv_head_(kv_head), chunk_(chunk), first_(first), n_(n) {}

    void run(float *partial) {
        for (std::int64_t group = 0; group < groups_a_chunk; ++group) {
            for (std::int64_t i = 0, end = 0; i < n_; i = end) {
                end = sharing(group, i);
                score(group, i, end);
            }
        }
        for (std::int64_t i = 0; i < n_; ++i) {
            float *const to = partial + partial_at(task_, query(i), chunk_);
            weigh(i, to);
            for (std::int64_t d = 0; d < task_.v_size; d += 16) {
                _mm512_storeu_ps(to + header + d, _mm512_setzero_ps());
            }
        }
        for (std::int64_t group = 0; group < groups_a_chunk; ++group) {
            for (std::int64_t i = 0, end = 0; i < n_; i = end) {
                end = sharing(group, i);
                add_values(partial, group, i, end);
            }
        }
    }

  private:
    Query query(std::int64_t i) const { return query_at(task_, kv_head_, first_ + i); }

    // The end of the queries from `from` on that read the same cells.
    std::int64_t sharing(std::int64_t group, std::int64_t from) const {
        const std::int64_t row = query(from).row;
        std::int64_t end = from + 1;
        while (end < n_ && (query(end).row == row || lists_.same(row, query(end).row, group))) {
            ++end;
        }
        return end;
    }

    bool is_empty(std::int64_t group, std::int64_t i) const {
        return lists_.count(query(i).row) <= group * cells_a_group;
    }

    void score(std::int64_t group, std::int64_t from, std::int64_t end) {
        if (is_empty(group, from)) {
            for (std::int64_t i = from; i < end; ++i) {
                _mm512_store_ps(scores_[i] + group * cells_a_group, _mm512_set1_ps(-INFINITY));
            }
            return;
        }
        transpose_keys(lists_.cells(query(from).row) + group * cells_a_group);
        std::int64_t i = from;
        for (; i + 6 <= end; i += 6) {
            score_some<6>(group, i);
        }
        for (; i + 3 <= end; i += 3) {
            score_some<3>(group, i);
        }
        for (; i < end; ++i) {
            score_some<1>(group, i);
        }
    }

    // keys_[d]: number d of sixteen keys
    void transpose_keys(const std::int32_t *cells) {
        const std::byte *keys[cells_a_group];
        for (std::int64_t i = 0; i < cells_a_group; ++i) {
            keys[i] = task_.k + task_.k_head_stride * static_cast<std::size_t>(kv_head_) +
                      task_.k_cell_stride * static_cast<std::size_t>(cells[i]);
        }
        const auto piece = [&](std::size_t i, std::size_t offset) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i *>(keys[i] + offset));
        };
        for (std::int64_t d = 0; d < task_.k_size; d += 8) {
            __m512i a[4];
            for (std::size_t i = 0; i < 4; ++i) {
                const auto offset = 2 * static_cast<std::size_t>(d);
                a[i] = _mm512_castsi128_si512(piece(i, offset));
                a[i] = _mm512_inserti32x4(a[i], piece(i + 4, offset), 1);
                a[i] = _mm512_inserti32x4(a[i], piece(i + 8, offset), 2);
                a[i] = _mm512_inserti32x4(a[i], piece(i + 12, offset), 3);
            }
            const __m512i t0 = _mm512_unpacklo_epi32(a[0], a[1]), t1 = _mm512_unpackhi_epi32(a[0], a[1]);
            const __m512i t2 = _mm512_unpacklo_epi32(a[2], a[3]), t3 = _mm512_unpackhi_epi32(a[2], a[3]);
            const __m512i pairs[4] = {_mm512_unpacklo_epi64(t0, t2), _mm512_unpackhi_epi64(t0, t2),
                                      _mm512_unpacklo_epi64(t1, t3), _mm512_unpackhi_epi64(t1, t3)};
            for (int j = 0; j < 4; ++j) {
                const __m512 even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs[j]));
                const __m512 odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs[j], 16)));
                _mm512_store_ps(keys_[d + 2 * j], even);
                _mm512_store_ps(keys_[d + 2 * j + 1], odd);
            }
        }
    }

    template <int n> void score_some(std::int64_t group, std::int64_t from) {
        const float *q[n];
        __m512 sums[n];
        for (int i = 0; i < n; ++i) {
            const Query one = query(from + i);
            q[i] = reinterpret_cast<const float *>(task_.q + task_.q_row_stride * static_cast<std::size_t>(one.row) +
                                                   task_.q_head_stride * static_cast<std::size_t>(one.head));
            sums[i] = _mm512_setzero_ps();
        }
        for (std::int64_t d = 0; d < task_.k_size; ++d) {
            const __m512 keys = _mm512_load_ps(keys_[d]);
            for (int i = 0; i < n; ++i) {
                sums[i] = _mm512_fmadd_ps(keys, _mm512_set1_ps(q[i][d]), sums[i]);
            }
        }
        for (int i = 0; i < n; ++i) {
            const std::int64_t row = query(from + i).row, first = group * cells_a_group;
            const std::int64_t left = lists_.count(row) - first;
            const auto counts = static_cast<__mmask16>(left >= cells_a_group ? 0xffffU : (1U << left) - 1U);
            const __m512 scores = _mm512_fmadd_ps(sums[i], _mm512_set1_ps(task_.scale), masks(row, group));
            _mm512_store_ps(scores_[from + i] + first, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), counts, scores));
        }
    }

    __m512 masks(std::int64_t row, std::int64_t group) const {
        const std::int32_t *const cells = lists_.cells(row) + group * cells_a_group;
        if (lists_.is_stretch(row, group)) {
            return load_half(mask_at(task_, row, cells[0]));
        }
        alignas(32) std::uint16_t halves[cells_a_group];
        for (std::int64_t i = 0; i < cells_a_group; ++i) {
            halves[i] = *reinterpret_cast<const std::uint16_t *>(mask_at(task_, row, cells[i]));
        }
        return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(halves)));
    }

    // Scores become weights relative to the largest.
    void weigh(std::int64_t i, float *to) {
        float *const scores = scores_[i];
        __m512 largest = _mm512_load_ps(scores);
        for (std::int64_t at = cells_a_group; at < cells_a_chunk; at += cells_a_group) {
            largest = _mm512_max_ps(largest, _mm512_load_ps(scores + at));
        }
        to[0] = _mm512_reduce_max_ps(largest);
        const __m512 base = _mm512_set1_ps(to[0] == -INFINITY ? 0.0F : to[0]);
        __m512 sum = _mm512_setzero_ps();
        for (std::int64_t at = 0; at < cells_a_chunk; at += cells_a_group) {
            const __m512 weights = exponential(_mm512_sub_ps(_mm512_load_ps(scores + at), base));
            _mm512_store_ps(scores + at, weights);
            sum = _mm512_add_ps(sum, weights);
        }
        to[1] = _mm512_reduce_add_ps(sum);
    }

    void add_values(float *partial, std::int64_t group, std::int64_t from, std::int64_t end) {
        if (is_empty(group, from)) {
            return;
        }
        std::int64_t i = from;
        for (; i + 6 <= end; i += 6) {
            add_all<6>(partial, group, i);
        }
        for (; i + 3 <= end; i += 3) {
            add_all<3>(partial, group, i);
        }
        for (; i < end; ++i) {
            add_all<1>(partial, group, i);
        }
    }

    template <int n> void add_all(float *partial, std::int64_t group, std::int64_t from) {
        std::int64_t d = 0;
        for (; d + 64 <= task_.v_size; d += 64) {
            add_some<n, 4>(partial, group, from, d);
        }
        for (; d < task_.v_size; d += 16) {
            add_some<n, 1>(partial, group, from, d);
        }
    }

    template <int n, int width> void add_some(float *partial, std::int64_t group, std::int64_t from, std::int64_t d) {
        float *to[n];
        __m512 sums[n][width];
        for (int i = 0; i < n; ++i) {
            to[i] = partial + partial_at(task_, query(from + i), chunk_) + header + d;
            for (int j = 0; j < width; ++j) {
                sums[i][j] = _mm512_loadu_ps(to[i] + 16 * j);
            }
        }
        const std::byte *const values =
            task_.v + task_.v_head_stride * static_cast<std::size_t>(kv_head_) + 2 * static_cast<std::size_t>(d);
        const std::int64_t first = group * cells_a_group;
        const std::int32_t *const cells = lists_.cells(query(from).row) + first;
        for (std::int64_t c = 0; c < cells_a_group; ++c) {
            const std::byte *const at = values + task_.v_cell_stride * static_cast<std::size_t>(cells[c]);
            __m512 value[width];
            for (int j = 0; j < width; ++j) {
                value[j] = load_half(at + 32 * j);
            }
            for (int i = 0; i < n; ++i) {
                const __m512 weight = _mm512_set1_ps(scores_[from + i][first + c]);
                for (int j = 0; j < width; ++j) {
                    sums[i][j] = _mm512_fmadd_ps(weight, value[j], sums[i][j]);
                }
            }
        }
        for (int i = 0; i < n; ++i) {
            for (int j = 0; j < width; ++j) {
                _mm512_storeu_ps(to[i] + 16 * j, sums[i][j]);
            }
        }
    }

    const Attention &task_;
    const Lists &lists_;
    std::int64_t kv_head_, chunk_, first_, n_;
    alignas(64) float keys_[largest_head][16];
    alignas(64) float scores_[queries_a_tile][cells_a_chunk];
};

std::size_t partial_size(const Attention &task) {
    return sizeof(float) *
           static_cast<std::size_t>(task.n_rows * task.n_heads * chunks_of(task) * (header + task.v_size));
}

std::int64_t n_items(const Attention &task) { return task.n_kv_heads * chunks_of(task); }

void attend(const Attention &task, float *partial, std::int64_t begin, std::int64_t end) {
    const std::int64_t n_queries = task.n_rows * heads_a_group(task);
    Lists lists(task);
    for (std::int64_t item = begin; item < end; ++item) {
        lists.seek(item % chunks_of(task));
        for (std::int64_t first = 0; first < n_queries; first += queries_a_tile) {
            const std::int64_t n = n_queries - first < queries_a_tile ? n_queries - first : queries_a_tile;
            Tile(task, lists, item / chunks_of(task), item % chunks_of(task), first, n).run(partial);
        }
    }
}

// The chunks of a row and head, in their order.
void combine(const Attention &task, const float *partial, std::int64_t begin, std::int64_t end) {
    const std::int64_t n_chunks = chunks_of(task), stride = header + task.v_size;
    for (std::int64_t index = begin; index < end; ++index) {
        const float *const chunks = partial + index * n_chunks * stride;
        float largest = -INFINITY;
        for (std::int64_t c = 0; c < n_chunks; ++c) {
            largest = chunks[c * stride] > largest ? chunks[c * stride] : largest;
        }
        float *const y = task.y + index * task.v_size;
        float sum = 0.0F;
        for (std::int64_t d = 0; d < task.v_size; d += 16) {
            _mm512_storeu_ps(y + d, _mm512_setzero_ps());
        }
        for (std::int64_t c = 0; c < n_chunks; ++c) {
            const float *const chunk = chunks + c * stride;
            if (chunk[0] == -INFINITY) {
                continue;
            }
            const float weight = _mm512_cvtss_f32(exponential(_mm512_set1_ps(chunk[0] - largest)));
            sum += weight * chunk[1];
            for (std::int64_t d = 0; d < task.v_size; d += 16) {
                const __m512 part = _mm512_loadu_ps(chunk + header + d);
                _mm512_storeu_ps(y + d, _mm512_fmadd_ps(_mm512_set1_ps(weight), part, _mm512_loadu_ps(y + d)));
            }
        }
        const __m512 inverse = _mm512_set1_ps(sum > 0.0F ? 1.0F / sum : 0.0F);
        for (std::int64_t d = 0; d < task.v_size; d += 16) {
            _mm512_storeu_ps(y + d, _mm512_mul_ps(_mm512_loadu_ps(y + d), inverse));
        }
    }
}

} // namespace

const AttentionKernel avx512_attention{cells_a_group, 16,      largest_head, most_rows,
                                       partial_size,  n_items, attend,       combine};

} // namespace esp::kernels
