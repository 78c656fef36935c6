// What attention on several ISAs has in common: which cells the rows see, and how these are walked.
//
// The vectors come from the ISA's own file, as a struct of static members:
//   Floats                    sixteen numbers, in as many registers as it takes
//   all, load, load_half, store, add, subtract, multiply, larger
//   multiply_add              a * b + c, rounded once; multiply_subtract is c - a * b
//   round, scale              to the nearest integer; p * 2^n
//   zero_below                numbers, zero where x is not at least a limit
//   first, largest, sum       of sixteen
//   seen, put_places          one bit a mask value that is not minus infinity; the places of bits
//   load_keys                 eight numbers of sixteen keys, cells side by side
//   values_a_pass<n>          sixteens of a value vector that are summed in registers for n queries
#pragma once

#include "kernels/kernels.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace esp::kernels {
namespace { // compiled for several ISAs: the linker must not share what is in here

constexpr std::int64_t cells_a_group = 16;
constexpr std::int64_t groups_a_chunk = 8;
constexpr std::int64_t cells_a_chunk = cells_a_group * groups_a_chunk; // work of one item
constexpr std::int64_t queries_a_tile = 24;
constexpr std::int64_t fetched_from = 1024; // cells; what fits the caches need not be fetched ahead
constexpr int queries_a_pass = 6;           // whose sums are kept in registers
constexpr std::int64_t largest_head = 256;
constexpr std::int64_t most_rows = 64;
constexpr std::int64_t header = 16; // floats in front of a partial sum: largest score, sum of weights, padding

inline std::int64_t chunks_of(const Attention &task) { return (task.n_cells + cells_a_chunk - 1) / cells_a_chunk; }
inline std::int64_t heads_a_group(const Attention &task) { return task.n_heads / task.n_kv_heads; }

// A query is a row and one of the heads that share a KV head.
struct Query {
    std::int64_t row, head;
};

inline Query query_at(const Attention &task, std::int64_t kv_head, std::int64_t index) {
    const std::int64_t heads = heads_a_group(task);
    return {index / heads, kv_head * heads + index % heads};
}

inline std::int64_t partial_at(const Attention &task, Query query, std::int64_t chunk) {
    return ((query.row * task.n_heads + query.head) * chunks_of(task) + chunk) * (header + task.v_size);
}

inline const std::byte *mask_at(const Attention &task, std::int64_t row, std::int64_t cell) {
    return task.mask + task.mask_row_stride * static_cast<std::size_t>(row) + 2 * static_cast<std::size_t>(cell);
}

// e^x for x <= 0; what is below the smallest normal number is 0. Relative error below 2e-7.
template <typename Isa> typename Isa::Floats exponential(typename Isa::Floats x) {
    using Floats = typename Isa::Floats;
    const Floats n = Isa::round(Isa::multiply(x, Isa::all(1.44269504F)));
    Floats r = Isa::multiply_subtract(n, Isa::all(0.693359375F), x);
    r = Isa::multiply_subtract(n, Isa::all(-2.12194440e-4F), r);
    Floats p = Isa::all(1.9875691500e-4F);
    p = Isa::multiply_add(p, r, Isa::all(1.3981999507e-3F));
    p = Isa::multiply_add(p, r, Isa::all(8.3334519073e-3F));
    p = Isa::multiply_add(p, r, Isa::all(4.1665795894e-2F));
    p = Isa::multiply_add(p, r, Isa::all(1.6666665459e-1F));
    p = Isa::multiply_add(p, r, Isa::all(5.0000001201e-1F));
    p = Isa::multiply_add(p, Isa::multiply(r, r), Isa::add(r, Isa::all(1.0F)));
    return Isa::zero_below(x, -87.33F, Isa::scale(p, n));
}

// put_places for an ISA that has nothing better.
inline void put_one_by_one(std::int32_t *to, unsigned bits, std::int32_t base) {
    for (; bits != 0; bits &= bits - 1) {
        *to++ = base + __builtin_ctz(bits);
    }
}

// The cells that the rows of a pass see in one chunk, in their order. A chunk is so many cells that a row sees, not so
// many of the cache: what lies between them (other branches, other sessions) moves nothing, so it cannot change a bit.
// What a row does not see is not read at all, so it may be anything.
template <typename Isa> class Lists {
  public:
    explicit Lists(const Attention &task) : task_(task) {}

    // Chunks are asked for in rising order, or from the first one again.
    void seek(std::int64_t chunk) {
        if (chunk + 1 == next_) {
            return;
        }
        if (chunk < next_) {
            next_ = 0;
            std::memset(cursors_, 0, sizeof cursors_);
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
        std::int64_t cell = cursors_[row], n = 0;
        while (cell < task_.n_cells && n < cells_a_chunk) {
            const std::int64_t base = cell / cells_a_group * cells_a_group;
            unsigned seen = Isa::seen(mask_at(task_, row, base)) & (0xffffU << (cell - base)) & 0xffffU;
            cell = base + cells_a_group;
            while (__builtin_popcount(seen) > cells_a_chunk - n) { // the last one goes to the next chunk
                cell = base + 31 - __builtin_clz(seen);
                seen ^= 1U << (cell - base);
            }
            Isa::put_places(cells_[row] + n, seen, static_cast<std::int32_t>(base));
            n += __builtin_popcount(seen);
        }
        cursors_[row] = cell;
        counts_[row] = n;
        for (std::int64_t i = n; i % cells_a_group != 0; ++i) { // places past the end repeat a cell and weigh nothing
            cells_[row][i] = cells_[row][n - 1];
        }
    }

    const Attention &task_;
    std::int64_t next_ = 0;
    std::int64_t cursors_[most_rows] = {};
    std::int64_t counts_[most_rows];
    std::int32_t cells_[most_rows][cells_a_chunk + cells_a_group];
};

// A chunk for a tile of queries.
template <typename Isa> class Tile {
    using Floats = typename Isa::Floats;

  public:
    Tile(const Attention &task, const Lists<Isa> &lists, std::int64_t kv_head, std::int64_t chunk, std::int64_t first,
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
            std::memset(to + header, 0, sizeof(float) * static_cast<std::size_t>(task_.v_size));
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
                Isa::store(scores_[i] + group * cells_a_group, Isa::all(-INFINITY));
            }
            return;
        }
        const std::int32_t *const cells = lists_.cells(query(from).row) + group * cells_a_group;
        transpose_keys(cells);
        if (from == 0 && task_.n_cells >= fetched_from && !is_empty(group + 1, from)) {
            fetch(task_.k + task_.k_head_stride * head(), task_.k_cell_stride, task_.k_size, cells + cells_a_group);
            fetch(task_.v + task_.v_head_stride * head(), task_.v_cell_stride, task_.v_size, cells + cells_a_group);
        }
        std::int64_t i = from;
        for (; i + queries_a_pass <= end; i += queries_a_pass) {
            score_some<queries_a_pass>(group, i);
        }
        for (; i + queries_a_pass / 2 <= end; i += queries_a_pass / 2) {
            score_some<queries_a_pass / 2>(group, i);
        }
        for (; i < end; ++i) {
            score_some<1>(group, i);
        }
    }

    std::size_t head() const { return static_cast<std::size_t>(kv_head_); }

    // A head's numbers are a short piece of each cell, which processors do not recognise as a stream.
    static void fetch(const std::byte *from, std::size_t stride, std::int64_t size, const std::int32_t *cells) {
        for (std::int64_t i = 0; i < cells_a_group; ++i) {
            const std::byte *const at = from + stride * static_cast<std::size_t>(cells[i]);
            for (std::int64_t number = 0; number < size; number += 32) {
                __builtin_prefetch(at + 2 * number, 0, 2);
            }
        }
    }

    // keys_[d]: number d of sixteen keys
    void transpose_keys(const std::int32_t *cells) {
        const std::byte *keys[cells_a_group];
        for (std::int64_t i = 0; i < cells_a_group; ++i) {
            keys[i] = task_.k + task_.k_head_stride * static_cast<std::size_t>(kv_head_) +
                      task_.k_cell_stride * static_cast<std::size_t>(cells[i]);
        }
        for (std::int64_t d = 0; d < task_.k_size; d += 8) {
            Isa::load_keys(keys, 2 * static_cast<std::size_t>(d), keys_ + d);
        }
    }

    template <int n> void score_some(std::int64_t group, std::int64_t from) {
        const float *q[n];
        Floats sums[n];
        for (int i = 0; i < n; ++i) {
            const Query one = query(from + i);
            q[i] = reinterpret_cast<const float *>(task_.q + task_.q_row_stride * static_cast<std::size_t>(one.row) +
                                                   task_.q_head_stride * static_cast<std::size_t>(one.head));
            sums[i] = Isa::all(0.0F);
        }
        for (std::int64_t d = 0; d < task_.k_size; ++d) {
            const Floats keys = Isa::load(keys_[d]);
            for (int i = 0; i < n; ++i) {
                sums[i] = Isa::multiply_add(keys, Isa::all(q[i][d]), sums[i]);
            }
        }
        const std::int64_t first = group * cells_a_group;
        for (int i = 0; i < n; ++i) {
            const std::int64_t row = query(from + i).row;
            float *const scores = scores_[from + i] + first;
            Isa::store(scores, Isa::multiply_add(sums[i], Isa::all(task_.scale), masks(row, group)));
            for (std::int64_t c = lists_.count(row) - first; c < cells_a_group; ++c) {
                scores[c] = -INFINITY;
            }
        }
    }

    Floats masks(std::int64_t row, std::int64_t group) const {
        const std::int32_t *const cells = lists_.cells(row) + group * cells_a_group;
        if (lists_.is_stretch(row, group)) {
            return Isa::load_half(mask_at(task_, row, cells[0]));
        }
        std::byte halves[2 * cells_a_group];
        for (std::int64_t i = 0; i < cells_a_group; ++i) {
            std::memcpy(halves + 2 * i, mask_at(task_, row, cells[i]), 2);
        }
        return Isa::load_half(halves);
    }

    // Scores become weights relative to the largest.
    void weigh(std::int64_t i, float *to) {
        float *const scores = scores_[i];
        Floats largest = Isa::load(scores);
        for (std::int64_t at = cells_a_group; at < cells_a_chunk; at += cells_a_group) {
            largest = Isa::larger(largest, Isa::load(scores + at));
        }
        to[0] = Isa::largest(largest);
        const Floats base = Isa::all(to[0] == -INFINITY ? 0.0F : to[0]);
        Floats sum = Isa::all(0.0F);
        for (std::int64_t at = 0; at < cells_a_chunk; at += cells_a_group) {
            const Floats weights = exponential<Isa>(Isa::subtract(Isa::load(scores + at), base));
            Isa::store(scores + at, weights);
            sum = Isa::add(sum, weights);
        }
        to[1] = Isa::sum(sum);
    }

    void add_values(float *partial, std::int64_t group, std::int64_t from, std::int64_t end) {
        if (is_empty(group, from)) {
            return;
        }
        std::int64_t i = from;
        for (; i + queries_a_pass <= end; i += queries_a_pass) {
            add_all<queries_a_pass>(partial, group, i);
        }
        for (; i + queries_a_pass / 2 <= end; i += queries_a_pass / 2) {
            add_all<queries_a_pass / 2>(partial, group, i);
        }
        for (; i < end; ++i) {
            add_all<1>(partial, group, i);
        }
    }

    template <int n> void add_all(float *partial, std::int64_t group, std::int64_t from) {
        constexpr int width = Isa::template values_a_pass<n>;
        std::int64_t d = 0;
        for (; d + 16 * width <= task_.v_size; d += 16 * width) {
            add_some<n, width>(partial, group, from, d);
        }
        for (; d < task_.v_size; d += 16) {
            add_some<n, 1>(partial, group, from, d);
        }
    }

    template <int n, int width> void add_some(float *partial, std::int64_t group, std::int64_t from, std::int64_t d) {
        float *to[n];
        Floats sums[n][width];
        for (int i = 0; i < n; ++i) {
            to[i] = partial + partial_at(task_, query(from + i), chunk_) + header + d;
            for (int j = 0; j < width; ++j) {
                sums[i][j] = Isa::load(to[i] + 16 * j);
            }
        }
        const std::byte *const values =
            task_.v + task_.v_head_stride * static_cast<std::size_t>(kv_head_) + 2 * static_cast<std::size_t>(d);
        const std::int64_t first = group * cells_a_group;
        const std::int32_t *const cells = lists_.cells(query(from).row) + first;
        for (std::int64_t c = 0; c < cells_a_group; ++c) {
            const std::byte *const at = values + task_.v_cell_stride * static_cast<std::size_t>(cells[c]);
            Floats value[width];
            for (int j = 0; j < width; ++j) {
                value[j] = Isa::load_half(at + 32 * j);
            }
            for (int i = 0; i < n; ++i) {
                const Floats weight = Isa::all(scores_[from + i][first + c]);
                for (int j = 0; j < width; ++j) {
                    sums[i][j] = Isa::multiply_add(weight, value[j], sums[i][j]);
                }
            }
        }
        for (int i = 0; i < n; ++i) {
            for (int j = 0; j < width; ++j) {
                Isa::store(to[i] + 16 * j, sums[i][j]);
            }
        }
    }

    const Attention &task_;
    const Lists<Isa> &lists_;
    std::int64_t kv_head_, chunk_, first_, n_;
    alignas(64) float keys_[largest_head][cells_a_group];
    alignas(64) float scores_[queries_a_tile][cells_a_chunk];
};

inline std::size_t partial_size(const Attention &task) {
    return sizeof(float) *
           static_cast<std::size_t>(task.n_rows * task.n_heads * chunks_of(task) * (header + task.v_size));
}

// The chunks of every KV head, dealt out in turns: all heads of a chunk, then the next chunk. So each thread gets its
// share of the chunks that are full, of the one that is not, and of those that nobody sees.
template <typename Isa> void attend(const Attention &task, float *partial, std::int64_t thread, std::int64_t threads) {
    const std::int64_t n_queries = task.n_rows * heads_a_group(task), n_items = task.n_kv_heads * chunks_of(task);
    Lists<Isa> lists(task);
    for (std::int64_t item = thread; item < n_items; item += threads) {
        const std::int64_t chunk = item / task.n_kv_heads, kv_head = item % task.n_kv_heads;
        lists.seek(chunk);
        for (std::int64_t first = 0; first < n_queries; first += queries_a_tile) {
            const std::int64_t n = n_queries - first < queries_a_tile ? n_queries - first : queries_a_tile;
            Tile<Isa>(task, lists, kv_head, chunk, first, n).run(partial);
        }
    }
}

// The chunks of a row and head, in their order.
template <typename Isa>
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
        std::memset(y, 0, sizeof(float) * static_cast<std::size_t>(task.v_size));
        for (std::int64_t c = 0; c < n_chunks; ++c) {
            const float *const chunk = chunks + c * stride;
            if (chunk[0] == -INFINITY) {
                continue;
            }
            const typename Isa::Floats weight = exponential<Isa>(Isa::all(chunk[0] - largest));
            sum += Isa::first(weight) * chunk[1];
            for (std::int64_t d = 0; d < task.v_size; d += 16) {
                Isa::store(y + d, Isa::multiply_add(weight, Isa::load(chunk + header + d), Isa::load(y + d)));
            }
        }
        const typename Isa::Floats inverse = Isa::all(sum > 0.0F ? 1.0F / sum : 0.0F);
        for (std::int64_t d = 0; d < task.v_size; d += 16) {
            Isa::store(y + d, Isa::multiply(Isa::load(y + d), inverse));
        }
    }
}

template <typename Isa>
constexpr AttentionKernel attention_kernel{cells_a_group, 16,          largest_head, most_rows,
                                           partial_size,  attend<Isa>, combine<Isa>};

} // namespace
} // namespace esp::kernels
