// What attention on several ISAs has in common: which cells the rows see, and how these are walked.
//
// The vectors come from the ISA's own file, as a struct of static members:
//   Floats                    sixteen numbers, in as many registers as it takes
//   all, load, load_half, store, add, subtract, multiply, larger
//   multiply_add              a * b + c, rounded once
//   scale                     p * 2^n, where n is the low bits of a number's own
//   first, largest, sum       of sixteen
//   seen                      one bit a mask value that is not minus infinity
//   store_some                those whose bit is set, side by side; may write sixteen
//   Key, groups_a_block       what load_keys leaves of a key's number, for so many times sixteen cells side by side
//   load_keys, load_key       some numbers of these cells, and one of sixteen again
//   values_a_pass<n>          sixteens of a value vector that are summed in registers for n queries
#pragma once

#include "kernels/kernels.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace esp::kernels {
namespace { // compiled for several ISAs: the linker must not share what is in here

constexpr std::int64_t cells_a_group = 16;
constexpr std::int64_t cells_a_chunk = 128; // work of one item
constexpr std::int64_t queries_a_tile = 36;
constexpr int queries_a_pass = 6; // whose sums are kept in registers
constexpr std::int64_t largest_head = 256;
constexpr std::int64_t most_rows = 64;
constexpr std::int64_t header = 16; // floats in front of a partial sum: largest score, sum of weights, padding
constexpr std::int64_t query_stride = largest_head + 16; // floats, so that few of them share a cache set
constexpr std::int64_t score_stride = cells_a_chunk + 16;

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
inline std::int64_t chunks_of(const Attention &task) { return (task.n_cells + cells_a_chunk - 1) / cells_a_chunk; }
inline std::int64_t heads_a_group(const Attention &task) { return task.n_heads / task.n_kv_heads; }

inline std::int64_t partial_at(const Attention &task, std::int64_t row, std::int64_t head, std::int64_t chunk) {
    return ((row * task.n_heads + head) * chunks_of(task) + chunk) * (header + task.v_size);
}

inline const std::byte *mask_at(const Attention &task, std::int64_t row, std::int64_t cell) {
    return task.mask + task.mask_row_stride * static_cast<std::size_t>(row) + 2 * static_cast<std::size_t>(cell);
}

// work(integral_constant n, first) for n things at a time, at most `most` and as even as can be.
template <int most, typename Work> void with_constant(std::int64_t n, std::int64_t first, const Work &work) {
    if constexpr (most > 1) {
        if (n < most) {
            with_constant<most - 1>(n, first, work);
            return;
        }
    }
    work(std::integral_constant<int, most>(), first);
}

template <int most, typename Work> void in_passes(std::int64_t begin, std::int64_t end, const Work &work) {
    const std::int64_t n = end - begin, n_passes = (n + most - 1) / most;
    for (std::int64_t pass = 0; pass < n_passes; ++pass) {
        const std::int64_t first = n * pass / n_passes;
        with_constant<most>(n * (pass + 1) / n_passes - first, begin + first, work);
    }
}

constexpr float log2_of_e = 1.44269504F;

// 2^x for x <= 0, and 2^-126 for what is below. Relative error below 1e-7: a polynomial fitted to 2^r for |r| <= 1/2.
template <typename Isa> typename Isa::Floats power_of_two(typename Isa::Floats x) {
    using Floats = typename Isa::Floats;
    const Floats rounder = Isa::all(12582912.0F); // 1.5 * 2^23: the sum's last bit is worth 1
    const Floats bounded = Isa::larger(x, Isa::all(-126.0F)), n = Isa::add(bounded, rounder);
    const Floats r = Isa::subtract(bounded, Isa::subtract(n, rounder));
    Floats p = Isa::all(1.5353351773e-4F);
    p = Isa::multiply_add(p, r, Isa::all(1.3398887822e-3F));
    p = Isa::multiply_add(p, r, Isa::all(9.6184378490e-3F));
    p = Isa::multiply_add(p, r, Isa::all(5.5503323674e-2F));
    p = Isa::multiply_add(p, r, Isa::all(2.4022647738e-1F));
    p = Isa::multiply_add(p, r, Isa::all(6.9314718246e-1F));
    p = Isa::multiply_add(p, r, Isa::all(1.0F));
    return Isa::scale(p, n);
}

// store_some for an ISA that has nothing better.
template <typename Isa> void store_one_by_one(float *to, typename Isa::Floats numbers, unsigned bits) {
    if (bits == 0xffffU) {
        Isa::store(to, numbers);
        return;
    }
    float all[cells_a_group];
    Isa::store(all, numbers);
    for (; bits != 0; bits &= bits - 1) {
        *to++ = all[__builtin_ctz(bits)];
    }
}

// Cells side by side that a row sees.
struct Run {
    std::int32_t cell, n;
};

// What a thread works with. Not on its stack, which other programs may have made small: some C libraries give a thread
// 128 KB.
template <typename Isa> struct Memory {
    Run runs[most_rows][cells_a_chunk];
    alignas(64) typename Isa::Key keys[largest_head][cells_a_group * Isa::groups_a_block];
    alignas(64) float q[queries_a_tile][query_stride];
    alignas(64) float scores[queries_a_tile][score_stride];
};

// The cells that the rows of a pass see in one chunk, in their order. A chunk is so many cells that a row sees, not so
// many of the cache: what lies between them (other branches, other sessions) moves nothing, so it cannot change a bit.
// What a row does not see is not added to anything, so it may be anything.
template <typename Isa> class Lists {
  public:
    Lists(const Attention &task, Memory<Isa> &memory) : task_(task), runs_(memory.runs) {
        for (std::int64_t row = 0; row < task.n_rows; ++row) {
            totals_[row] = 0;
            for (std::int64_t cell = 0; cell < task.n_cells; cell += cells_a_group) {
                totals_[row] += __builtin_popcount(Isa::seen(mask_at(task, row, cell)));
            }
        }
    }

    // How many cells of a chunk the rows see together.
    std::int64_t seen_in(std::int64_t chunk) const {
        std::int64_t n = 0;
        for (std::int64_t row = 0; row < task_.n_rows; ++row) {
            const std::int64_t left = totals_[row] - chunk * cells_a_chunk;
            n += left > 0 ? smaller(left, cells_a_chunk) : 0;
        }
        return n;
    }

    // Chunks are asked for in rising order.
    void seek(std::int64_t chunk) {
        for (; next_ <= chunk; ++next_) {
            for (std::int64_t row = 0; row < task_.n_rows; ++row) {
                fill(row);
            }
        }
    }

    std::int64_t count(std::int64_t row) const { return counts_[row]; }
    const Run *runs(std::int64_t row) const { return runs_[row]; }
    std::int64_t begin(std::int64_t row) const { return runs_[row][0].cell; }
    std::int64_t end(std::int64_t row) const { return cursors_[row]; }

    // How many cells two rows both see before they part.
    std::int64_t shared(std::int64_t row, std::int64_t other) const {
        const std::int64_t n = smaller(counts_[row], counts_[other]);
        const Run *a = runs_[row], *b = runs_[other];
        std::int64_t found = 0;
        for (; found < n && a->cell == b->cell; ++a, ++b) {
            found += a->n < b->n ? a->n : b->n;
            if (a->n != b->n) {
                break;
            }
        }
        return found;
    }

    // One bit a cell of the chunk from `first` on, for sixteen of the cache.
    unsigned bits(std::int64_t row, std::int64_t base, std::int64_t first) const {
        const std::int64_t from = larger(begin(row), first) - base, to = end(row) - base;
        if (base >= task_.n_cells || from >= cells_a_group || to <= 0) {
            return 0;
        }
        const unsigned after = from > 0 ? 0xffffU << from : 0xffffU;
        const unsigned before = to < cells_a_group ? (1U << to) - 1 : 0xffffU;
        return Isa::seen(mask_at(task_, row, base)) & after & before;
    }

  private:
    // One bit a cell, from `cell` on up to a multiple of 64 at most.
    std::uint64_t seen_from(std::int64_t row, std::int64_t cell) const {
        const std::int64_t base = cell / 64 * 64;
        std::uint64_t seen = 0;
        for (std::int64_t at = 0; at < 64 && base + at < task_.n_cells; at += cells_a_group) {
            seen |= static_cast<std::uint64_t>(Isa::seen(mask_at(task_, row, base + at))) << at;
        }
        return seen >> (cell - base);
    }

    void fill(std::int64_t row) {
        std::int64_t cell = cursors_[row], n = 0;
        Run *run = runs_[row];
        *run = {static_cast<std::int32_t>(cell), 0};
        while (cell < task_.n_cells && n < cells_a_chunk) {
            const std::uint64_t seen = seen_from(row, cell);
            if (seen == 0) {
                cell = (cell / 64 + 1) * 64;
                continue;
            }
            const int skipped = __builtin_ctzll(seen);
            const std::uint64_t hidden = ~(seen >> skipped);
            cell += skipped;
            const std::int64_t side_by_side = hidden == 0 ? 64 : __builtin_ctzll(hidden);
            const std::int64_t taken = smaller(side_by_side, cells_a_chunk - n);
            if (run->cell + run->n != cell) {
                run += run->n == 0 ? 0 : 1;
                *run = {static_cast<std::int32_t>(cell), 0};
            }
            run->n += static_cast<std::int32_t>(taken);
            n += taken;
            cell += taken;
        }
        cursors_[row] = cell;
        counts_[row] = n;
    }

    const Attention &task_;
    std::int64_t next_ = 0;
    std::int64_t cursors_[most_rows] = {};
    std::int64_t totals_[most_rows], counts_[most_rows];
    Run (&runs_)[most_rows][cells_a_chunk];
};

// What a thread works on: a chunk and a KV head.
struct Item {
    std::int64_t chunk, kv_head;
};

// How far behind what an item reads lies what the next one will: a head's numbers are a short piece of each cell, which
// processors do not recognise as a stream. They are fetched a few at a time, in between: more than a few wait for each
// other. Only a guess where cells are hidden; a fetch does nothing where there is no memory.
struct Ahead {
    std::uintptr_t k = 0, v = 0; // bytes
};

inline Ahead ahead_of(const Attention &task, Item item, Item next) {
    const auto heads = static_cast<std::uintptr_t>(next.kv_head - item.kv_head);
    const auto cells = static_cast<std::uintptr_t>((next.chunk - item.chunk) * cells_a_chunk);
    return {heads * task.k_head_stride + cells * task.k_cell_stride,
            heads * task.v_head_stride + cells * task.v_cell_stride};
}

inline void fetch(const std::byte *from, std::uintptr_t ahead) {
    __builtin_prefetch(reinterpret_cast<const void *>(reinterpret_cast<std::uintptr_t>(from) + ahead), 0, 2);
}

// What this item itself reads soon, into the nearest cache.
inline void fetch_near(const std::byte *from, std::uintptr_t ahead) {
    __builtin_prefetch(reinterpret_cast<const void *>(reinterpret_cast<std::uintptr_t>(from) + ahead), 0, 3);
}

// The partial sum of no cells.
inline void put_nothing(float *to) {
    to[0] = -INFINITY;
    to[1] = 0.0F;
}

// A chunk for a tile of queries: a query is a row and one of the heads that share a KV head.
template <typename Isa> class Tile {
    using Floats = typename Isa::Floats;
    static constexpr std::int64_t cells_a_block = cells_a_group * Isa::groups_a_block;

  public:
    Tile(const Attention &task, const Lists<Isa> &lists, Item item, Ahead ahead, std::int64_t first, std::int64_t n,
         float *partial, Memory<Isa> &memory)
        : task_(task), lists_(lists), keys_(memory.keys), q_(memory.q), scores_(memory.scores), ahead_(ahead),
          k_(task.k + task.k_head_stride * static_cast<std::size_t>(item.kv_head)),
          v_(task.v + task.v_head_stride * static_cast<std::size_t>(item.kv_head)), n_(n) {
        const std::int64_t heads = heads_a_group(task);
        std::int64_t row = first / heads, head = first % heads;
        for (std::int64_t i = 0; i < n; ++i) {
            rows_[i] = row;
            const std::int64_t of_all = item.kv_head * heads + head;
            to_[i] = partial + partial_at(task, row, of_all, item.chunk);
            load_query(i, task.q + task.q_row_stride * static_cast<std::size_t>(row) +
                              task.q_head_stride * static_cast<std::size_t>(of_all));
            masks_[i] = mask_at(task, row, 0);
            counts_[i] = 0;
            if (++head == heads) {
                ++row;
                head = 0;
            }
        }
    }

    void run() {
        std::int64_t begin = task_.n_cells, end = 0;
        whole_ = {0, task_.n_cells};
        for (std::int64_t i = 0; i < n_; i = row_end(i)) {
            const Run first = lists_.runs(rows_[i])[0];
            whole_ = {larger(whole_.begin, first.cell), smaller(whole_.end, first.cell + first.n)};
            if (first.n > 0) {
                begin = smaller(begin, first.cell);
                end = larger(end, lists_.end(rows_[i]));
            }
        }
        for (std::int64_t first = begin; first < end; first += cells_a_block) {
            score(first);
        }
        for (std::int64_t i = 0, next = 0; i < n_; i = next) {
            next = row_end(i);
            if (counts_[i] > 0) {
                in_passes<4>(i, next, [&](auto n, std::int64_t first) { weigh<n()>(first); });
            } else {
                for (std::int64_t query = i; query < next; ++query) {
                    put_nothing(to_[query]);
                }
            }
        }
        for (std::int64_t i = 0; i < n_;) {
            i = add_values(i);
        }
    }

  private:
    // Queries are scaled for powers of two.
    void load_query(std::int64_t i, const std::byte *from) {
        const auto *const q = reinterpret_cast<const float *>(from);
        const Floats scale = Isa::all(task_.scale * log2_of_e);
        for (std::int64_t d = 0; d < task_.k_size; d += 16) {
            Isa::store(q_[i] + d, Isa::multiply(Isa::load(q + d), scale));
        }
    }

    // The end of the queries of the same row.
    std::int64_t row_end(std::int64_t i) const {
        std::int64_t end = i + 1;
        while (end < n_ && rows_[end] == rows_[i]) {
            ++end;
        }
        return end;
    }

    // Scores of a block of the cache, from its cell `first` on, of the rows that see some of it: a score does not
    // depend on the others. The last block may begin before, so that it ends with the cache.
    void score(std::int64_t first) {
        const std::int64_t base = larger(0, smaller(first, task_.n_cells - cells_a_block));
        if (base == first && base >= whole_.begin && base + cells_a_block <= whole_.end) {
            transpose_keys(base, Isa::groups_a_block);
            in_passes<queries_a_pass>(0, n_, [&](auto n, std::int64_t from) { score_some<n(), true>(base, 0, from); });
        } else {
            score_partly(base, look(base, first));
        }
    }

    // The first groups of a block, each for the rows that see some of it.
    void score_partly(std::int64_t base, int groups) {
        if (groups > 0) {
            transpose_keys(base, groups);
        }
        for (int g = 0; g < groups; ++g) {
            for (std::int64_t i = 0, end = 0; i < n_; i = end) {
                const bool is_seen = bits_[i][g] != 0;
                for (end = i + 1; end < n_ && (bits_[end][g] != 0) == is_seen;) {
                    ++end;
                }
                if (is_seen) {
                    in_passes<queries_a_pass>(
                        i, end, [&](auto n, std::int64_t from) { score_some<n(), false>(base, g, from); });
                }
            }
        }
    }

    // Which cells of a block the rows see; returns up to which of its groups there are any.
    int look(std::int64_t base, std::int64_t first) {
        int groups = 0;
        for (std::int64_t i = 0, end = 0; i < n_; i = end) {
            end = row_end(i);
            for (int g = 0; g < Isa::groups_a_block; ++g) {
                const unsigned bits = lists_.bits(rows_[i], base + g * cells_a_group, first);
                for (std::int64_t query = i; query < end; ++query) {
                    bits_[query][g] = bits;
                }
                groups = bits != 0 && g >= groups ? g + 1 : groups;
            }
        }
        return groups;
    }

    // keys_[d]: number d of the block's keys; what would lie past the end of the cache repeats its last cell
    void transpose_keys(std::int64_t base, int groups) {
        const std::byte *keys[cells_a_block], *key = k_ + task_.k_cell_stride * static_cast<std::size_t>(base);
        for (std::int64_t i = 0; i < cells_a_block; ++i) {
            keys[i] = key;
            key += base + i + 1 < task_.n_cells ? task_.k_cell_stride : 0;
        }
        Isa::load_keys(keys, groups, task_.k_size, keys_);
    }

    // Scores of a block that all rows see whole, or of its group g.
    template <int n, bool is_whole> [[gnu::noinline]] void score_some(std::int64_t base, int g, std::int64_t from) {
        constexpr int groups = is_whole ? Isa::groups_a_block : 1;
        Floats sums[n][groups];
        for (int i = 0; i < n; ++i) {
            for (int j = 0; j < groups; ++j) {
                sums[i][j] = Isa::all(0.0F);
            }
        }
        const typename Isa::Key *key = keys_[0] + g * cells_a_group;
        const float *number = q_[from], *const end = number + task_.k_size;
        const std::byte *piece = k_ + task_.k_cell_stride * static_cast<std::size_t>(base);
        const std::uintptr_t ahead = from == 0 ? ahead_.k : 0, near = task_.k_cell_stride * cells_a_block;
        do {
            const float *const piece_end = number + smaller(cells_a_block, end - number);
            for (const std::byte *at = piece; number < piece_end; ++number, key += cells_a_block) {
                for (std::int64_t j = 0; j < 2 * cells_a_block; j += 64) {
                    fetch(at + j, ahead);
                    fetch_near(at + j, near);
                }
                at += task_.k_cell_stride;
                add_number(sums, number, key);
            }
            piece += 2 * cells_a_block;
        } while (number < end);
        for (int i = 0; i < n; ++i) {
            for (int j = 0; j < groups; ++j) {
                if constexpr (is_whole) {
                    put_all(from + i, base + j * cells_a_group, sums[i][j]);
                } else {
                    put_some(from + i, base + g * cells_a_group, bits_[from + i][g], sums[i][j]);
                }
            }
        }
    }

    template <int n, int groups>
    static void add_number(Floats (&sums)[n][groups], const float *number, const typename Isa::Key *key) {
        Floats keys[groups];
        for (int g = 0; g < groups; ++g) {
            keys[g] = Isa::load_key(key + g * cells_a_group);
        }
        for (int i = 0; i < n; ++i) {
            const Floats of_query = Isa::all(number[i * query_stride]);
            for (int g = 0; g < groups; ++g) {
                sums[i][g] = Isa::multiply_add(keys[g], of_query, sums[i][g]);
            }
        }
    }

    Floats with_mask(std::int64_t i, std::int64_t cell, Floats products) const {
        return Isa::multiply_add(Isa::load_half(masks_[i] + 2 * cell), Isa::all(log2_of_e), products);
    }

    // The scores that count, behind those of the cells before.
    void put_some(std::int64_t i, std::int64_t cell, unsigned bits, Floats products) {
        Isa::store_some(scores_[i] + counts_[i], with_mask(i, cell, products), bits);
        counts_[i] += __builtin_popcount(bits);
    }

    void put_all(std::int64_t i, std::int64_t cell, Floats products) {
        Isa::store(scores_[i] + counts_[i], with_mask(i, cell, products));
        counts_[i] += cells_a_group;
    }

    // Scores become weights relative to the largest; for queries of the same row. What fills the last sixteen up adds
    // 2^-126 to a sum of at least 1.
    template <int n> [[gnu::noinline]] void weigh(std::int64_t from) {
        const std::int64_t count = counts_[from];
        Floats largest[n], sum[n];
        for (int i = 0; i < n; ++i) {
            Isa::store(scores_[from + i] + count, Isa::all(-INFINITY)); // up to a multiple of sixteen
            largest[i] = Isa::load(scores_[from + i]);
            sum[i] = Isa::all(0.0F);
        }
        for (std::int64_t at = cells_a_group; at < count; at += cells_a_group) {
            for (int i = 0; i < n; ++i) {
                largest[i] = Isa::larger(largest[i], Isa::load(scores_[from + i] + at));
            }
        }
        for (int i = 0; i < n; ++i) {
            float *const to = to_[from + i];
            to[0] = Isa::largest(largest[i]);
            largest[i] = Isa::all(to[0] == -INFINITY ? 0.0F : to[0]);
        }
        for (std::int64_t at = 0; at < count; at += cells_a_group) {
            for (int i = 0; i < n; ++i) {
                float *const scores = scores_[from + i] + at;
                const Floats weights = power_of_two<Isa>(Isa::subtract(Isa::load(scores), largest[i]));
                Isa::store(scores, weights);
                sum[i] = Isa::add(sum[i], weights);
            }
        }
        for (int i = 0; i < n; ++i) {
            to_[from + i][1] = Isa::sum(sum[i]);
        }
    }

    // Values for the queries from `from` on whose rows see the same cells for the most part: these together, then what
    // each row has beyond. A query's sums go from cell to cell either way. Returns the end of these queries.
    std::int64_t add_values(std::int64_t from) {
        const std::int64_t row = rows_[from];
        std::int64_t end = row_end(from), shared = lists_.count(row);
        while (end < n_) {
            const std::int64_t both = lists_.shared(row, rows_[end]);
            if (2 * both < shared || both == 0) {
                break;
            }
            shared = smaller(shared, both);
            end = row_end(end);
        }
        add_all(from, end, 0, shared);
        for (std::int64_t i = from, next = 0; i < end; i = next) {
            next = row_end(i);
            add_all(i, next, shared, lists_.count(rows_[i]));
        }
        return end;
    }

    // Cells begin .. end of the rows' lists.
    void add_all(std::int64_t from, std::int64_t to, std::int64_t begin, std::int64_t end) {
        if (begin < end) {
            in_passes<queries_a_pass>(from, to, [&](auto n, std::int64_t first) {
                constexpr int width = Isa::template values_a_pass<n()>;
                std::int64_t d = 0;
                for (; d + 16 * width <= task_.v_size; d += 16 * width) {
                    add_some<n(), width>(first, d, begin, end);
                }
                for (; d < task_.v_size; d += 16) {
                    add_some<n(), 1>(first, d, begin, end);
                }
            });
        }
    }

    template <int n, int width> void add_some(std::int64_t from, std::int64_t d, std::int64_t begin, std::int64_t end) {
        static constexpr float none[16 * width] = {};
        Floats sums[n][width];
        for (int i = 0; i < n; ++i) {
            const float *const before = begin == 0 ? none : to_[from + i] + header + d;
            for (int j = 0; j < width; ++j) {
                sums[i][j] = Isa::load(before + 16 * j);
            }
        }
        const std::byte *const values = v_ + 2 * static_cast<std::size_t>(d);
        const std::uintptr_t ahead = from == 0 ? ahead_.v : 0, near = 32 * task_.v_cell_stride;
        const float *weights = scores_[from] + begin;
        const Run *run = lists_.runs(rows_[from]);
        std::int64_t skipped = begin, left = end - begin;
        for (; run->n <= skipped; ++run) {
            skipped -= run->n;
        }
        do {
            const std::byte *cell = values + task_.v_cell_stride * static_cast<std::size_t>(run->cell + skipped);
            const std::int64_t here = smaller(run->n - skipped, left);
            const float *const last = weights + here;
            do {
                for (int j = 0; j < width; j += 2) {
                    fetch(cell + 32 * j, ahead);
                    fetch_near(cell + 32 * j, near);
                }
                add_cell(sums, weights, cell);
                cell += task_.v_cell_stride;
            } while (++weights < last);
            left -= here;
            skipped = 0;
            ++run;
        } while (left > 0);
        for (int i = 0; i < n; ++i) {
            for (int j = 0; j < width; ++j) {
                Isa::store(to_[from + i] + header + d + 16 * j, sums[i][j]);
            }
        }
    }

    template <int n, int width>
    static void add_cell(Floats (&sums)[n][width], const float *weights, const std::byte *cell) {
        Floats value[width];
        for (int j = 0; j < width; ++j) {
            value[j] = Isa::load_half(cell + 32 * j);
        }
        for (int i = 0; i < n; ++i) {
            const Floats weight = Isa::all(weights[i * score_stride]);
            for (int j = 0; j < width; ++j) {
                sums[i][j] = Isa::multiply_add(weight, value[j], sums[i][j]);
            }
        }
    }

    const Attention &task_;
    const Lists<Isa> &lists_;
    typename Isa::Key (&keys_)[largest_head][cells_a_block];
    float (&q_)[queries_a_tile][query_stride];
    float (&scores_)[queries_a_tile][score_stride];
    Ahead ahead_;
    const std::byte *k_, *v_; // of the KV head
    std::int64_t n_;
    struct {
        std::int64_t begin, end;
    } whole_; // cells that all rows see, so that nothing needs to be looked up
    std::int64_t rows_[queries_a_tile], counts_[queries_a_tile];
    const std::byte *masks_[queries_a_tile];
    float *to_[queries_a_tile];
    unsigned bits_[queries_a_tile][Isa::groups_a_block];
};

inline std::size_t partial_size(const Attention &task) {
    return sizeof(float) *
           static_cast<std::size_t>(task.n_rows * task.n_heads * chunks_of(task) * (header + task.v_size));
}

// The chunks that rows see, and which items of theirs are a thread's: consecutive ones, of equal work.
struct Deal {
    std::int64_t n_chunks, begin, end;
};

template <typename Isa>
Deal deal(const Attention &task, const Lists<Isa> &lists, std::int64_t thread, std::int64_t threads) {
    const std::int64_t overhead = 8 * task.n_rows; // of an item, in cells
    std::int64_t n_chunks = 0, all = 0;
    for (std::int64_t n = 0; n_chunks < chunks_of(task) && (n = lists.seen_in(n_chunks)) > 0; ++n_chunks) {
        all += (n + overhead) * task.n_kv_heads;
    }
    Deal found{n_chunks, 0, 0};
    std::int64_t before = 0; // work before an item; a thread has those whose middle lies in its part
    for (std::int64_t chunk = 0; chunk < n_chunks; ++chunk) {
        const std::int64_t work = lists.seen_in(chunk) + overhead;
        for (std::int64_t i = 0; i < task.n_kv_heads; ++i, before += work) {
            const std::int64_t owner = (2 * before + work) * threads / (2 * all);
            found.begin += owner < thread ? 1 : 0;
            found.end += owner <= thread ? 1 : 0;
        }
    }
    return found;
}

template <typename Isa> void attend(const Attention &task, float *partial, std::int64_t thread, std::int64_t threads) {
    const std::int64_t n_queries = task.n_rows * heads_a_group(task);
    const std::int64_t n_tiles = (n_queries + queries_a_tile - 1) / queries_a_tile;
    static thread_local Memory<Isa> memory;
    Lists<Isa> lists(task, memory);
    const Deal own = deal(task, lists, thread, threads);
    for (std::int64_t i = own.begin; i < own.end; ++i) {
        const Item item{i / task.n_kv_heads, i % task.n_kv_heads};
        const Item next{(i + 1) / task.n_kv_heads, (i + 1) % task.n_kv_heads};
        const Ahead ahead = i + 1 < own.end ? ahead_of(task, item, next) : Ahead();
        lists.seek(item.chunk);
        for (std::int64_t tile = 0; tile < n_tiles; ++tile) {
            const std::int64_t first = n_queries * tile / n_tiles, end = n_queries * (tile + 1) / n_tiles;
            Tile<Isa>(task, lists, item, tile == 0 ? ahead : Ahead(), first, end - first, partial, memory).run();
        }
    }
    if (thread == threads - 1) { // what combine stops at
        for (std::int64_t i = 0; i < task.n_rows * task.n_heads && own.n_chunks < chunks_of(task); ++i) {
            put_nothing(partial + partial_at(task, 0, i, own.n_chunks));
        }
    }
}

// The chunks of a row and head, in their order; they are full up to the last one that has cells.
template <typename Isa> class Combination {
    using Floats = typename Isa::Floats;

  public:
    Combination(const Attention &task, const float *chunks) : task_(task), chunks_(chunks) {
        for (; n_chunks_ < chunks_of(task) && chunk(n_chunks_)[1] != 0.0F; ++n_chunks_) {
            largest_ = chunk(n_chunks_)[0] > largest_ ? chunk(n_chunks_)[0] : largest_;
        }
        largest_ = largest_ == -INFINITY ? 0.0F : largest_;
    }

    void run(float *y) const {
        std::int64_t d = 0;
        for (; d + 64 <= task_.v_size; d += 64) {
            add<4>(y + d, d);
        }
        for (; d < task_.v_size; d += 16) {
            add<1>(y + d, d);
        }
    }

  private:
    const float *chunk(std::int64_t c) const { return chunks_ + c * (header + task_.v_size); }

    template <int width> void add(float *y, std::int64_t d) const {
        Floats all[width], sum = Isa::all(0.0F);
        for (int j = 0; j < width; ++j) {
            all[j] = Isa::all(0.0F);
        }
        for (std::int64_t c = 0; c < n_chunks_; ++c) {
            const float *const from = chunk(c);
            const Floats weight = power_of_two<Isa>(Isa::all(from[0] - largest_));
            sum = Isa::multiply_add(weight, Isa::all(from[1]), sum);
            for (int j = 0; j < width; ++j) {
                all[j] = Isa::multiply_add(weight, Isa::load(from + header + d + 16 * j), all[j]);
            }
        }
        const float of_all = Isa::first(sum);
        const Floats inverse = Isa::all(of_all > 0.0F ? 1.0F / of_all : 0.0F);
        for (int j = 0; j < width; ++j) {
            Isa::store(y + 16 * j, Isa::multiply(all[j], inverse));
        }
    }

    const Attention &task_;
    const float *chunks_;
    std::int64_t n_chunks_ = 0;
    float largest_ = -INFINITY;
};

template <typename Isa>
void combine(const Attention &task, const float *partial, std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
        Combination<Isa>(task, partial + partial_at(task, 0, index, 0)).run(task.y + index * task.v_size);
    }
}

template <typename Isa>
constexpr AttentionKernel attention_kernel{cells_a_group, 16,          largest_head, most_rows,
                                           partial_size,  attend<Isa>, combine<Isa>};

} // namespace
} // namespace esp::kernels
