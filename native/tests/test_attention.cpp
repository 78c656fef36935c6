// Attention of every ISA that this CPU runs, against double precision; and that a row's bits are its own affair.

#include "check.hpp"
#include "kernels/kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using esp::kernels::Attention;
using esp::kernels::AttentionKernel;
using esp::kernels::best_kernels;
using esp::kernels::KernelTable;

using Floats = std::vector<float>;
using Halves = std::vector<std::uint16_t>;
using Random = std::mt19937;

constexpr std::uint16_t hidden = 0xfc00; // minus infinity

double number_of(std::uint16_t half) {
    const int exponent = (half >> 10) & 31, fraction = half & 1023;
    const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return (half & 0x8000) != 0 ? -size : size;
}

// ---- what is attended to --------------------------------------------------------------------------------------------

struct Shape {
    std::size_t rows, heads, kv_heads, cells, k_size, v_size;

    std::string name() const {
        std::string text;
        for (const std::size_t n : {rows, heads, kv_heads, cells, k_size, v_size}) {
            text += (text.empty() ? "" : " x ") + std::to_string(n);
        }
        return text;
    }
};

const Shape shapes[] = {
    {1, 9, 3, 256, 64, 64},  {2, 4, 2, 16, 16, 16},    {3, 8, 8, 272, 80, 96},   {4, 32, 4, 144, 128, 64},
    {5, 1, 1, 512, 192, 64}, {6, 4, 2, 144, 256, 192}, {7, 9, 3, 512, 64, 64},   {8, 1, 1, 2048, 64, 80},
    {9, 9, 3, 256, 96, 128}, {24, 9, 3, 272, 64, 64},  {64, 4, 2, 256, 64, 16},  {64, 1, 1, 16, 16, 256},
    {8, 9, 3, 48, 64, 64},   {3, 40, 1, 304, 32, 48},  {13, 32, 8, 400, 64, 64},
};

struct Problem {
    Shape shape;
    Floats q;    // [row][head][k_size]
    Halves k, v; // [cell][kv_head][size]
    Halves mask; // [row][cell]

    bool sees(std::size_t row, std::size_t cell) const { return mask[row * shape.cells + cell] != hidden; }
};

std::uint16_t random_half(Random &random) { // below 2, of both signs
    return static_cast<std::uint16_t>((random() & 0x8000) | ((10 + random() % 6) << 10) | (random() & 1023));
}

// Not a number and infinities, which poison all that they are added to.
std::uint16_t poison(Random &random) {
    const std::uint16_t choices[] = {0x7e00, 0x7c00, 0xfc00};
    return choices[random() % 3];
}

enum class Mask { tree, sessions, window, sloped, scattered, forked, count };

// Which cells a row sees, and what is added to its scores.
std::uint16_t mask_of(Mask kind, const Shape &shape, std::size_t row, std::size_t cell, Random &random) {
    const std::size_t n_tree = std::min(shape.rows, shape.cells / 2), trunk = shape.cells - n_tree - shape.cells / 8;
    const std::size_t node = row % n_tree;
    switch (kind) {
    case Mask::tree: // the trunk, then ancestors: node n hangs below n / 2
        for (std::size_t at = node; cell >= trunk; at /= 2) {
            if (cell == trunk + at) {
                return 0;
            }
            if (at == 0) {
                return hidden;
            }
        }
        return 0;
    case Mask::sessions: // cells of two sessions take turns, in stretches
        return cell * 3 / 37 % 2 == row % 2 && cell < shape.cells - row % 5 ? 0 : hidden;
    case Mask::window:
        return cell + 100 >= trunk + row && cell <= trunk / 2 + row ? 0 : hidden;
    case Mask::sloped: // what is far counts less; the smallest number is not minus infinity
        return cell % 61 == 7 ? 0xfbff : static_cast<std::uint16_t>(0x8000 | ((cell + row) % 0x4400)); // up to -4
    case Mask::scattered:
        if (row % 7 == 3) {
            return hidden; // everything
        }
        if (row % 7 == 5) {
            return cell == row * 31 % shape.cells ? 0 : hidden;
        }
        return random() % 3 == 0 ? 0 : hidden;
    case Mask::forked: // rows begin at two places, and leave and meet again within a chunk
        return cell < row / 4 % 2 || (cell >= 100 + row % 3 && cell < 120) ? hidden : 0;
    case Mask::count:
        break;
    }
    return hidden;
}

// What no row sees is poison.
Problem random_problem(const Shape &shape, Mask kind, unsigned seed) {
    Random random(seed);
    std::uniform_real_distribution<float> numbers(-1.0F, 1.0F);
    Problem problem{shape, Floats(shape.rows * shape.heads * shape.k_size),
                    Halves(shape.cells * shape.kv_heads * shape.k_size),
                    Halves(shape.cells * shape.kv_heads * shape.v_size), Halves(shape.rows * shape.cells)};
    std::generate(problem.q.begin(), problem.q.end(), [&] { return numbers(random); });
    for (std::size_t i = 0; i < problem.mask.size(); ++i) {
        problem.mask[i] = mask_of(kind, shape, i / shape.cells, i % shape.cells, random);
    }
    for (std::size_t cell = 0; cell < shape.cells; ++cell) {
        bool seen = false;
        for (std::size_t row = 0; row < shape.rows; ++row) {
            seen = seen || problem.sees(row, cell);
        }
        for (Halves *const cache : {&problem.k, &problem.v}) {
            const std::size_t size = cache->size() / shape.cells;
            std::generate_n(&(*cache)[cell * size], size, [&] { return seen ? random_half(random) : poison(random); });
        }
    }
    return problem;
}

// ---- attention ------------------------------------------------------------------------------------------------------

// How the work is cut up, and how far apart vectors lie.
struct Cut {
    std::int64_t n_pieces = 1;
    std::size_t padding = 0; // numbers after a vector
    bool threads = false;
};

template <typename Work> void for_each_piece(const Cut &cut, std::int64_t n, Work work) {
    std::vector<std::thread> threads;
    for (std::int64_t i = cut.n_pieces - 1; i >= 0; --i) {
        const std::int64_t begin = n * i / cut.n_pieces, end = n * (i + 1) / cut.n_pieces;
        if (cut.threads) {
            threads.emplace_back([=] { work(begin, end); });
        } else {
            work(begin, end);
        }
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

// Vectors further apart, up to the end of the last one: a sanitizer sees what is read beyond.
template <typename Number>
std::vector<Number> spread(const std::vector<Number> &numbers, std::size_t size, std::size_t padding) {
    const std::size_t n = numbers.size() / size;
    std::vector<Number> to(n * size + (n - 1) * padding, static_cast<Number>(0x7e00));
    for (std::size_t i = 0; i < n; ++i) {
        std::copy_n(&numbers[i * size], size, &to[i * (size + padding)]);
    }
    return to;
}

template <typename Number> const std::byte *bytes_of(const std::vector<Number> &numbers) {
    return reinterpret_cast<const std::byte *>(numbers.data());
}

// The results, [row][head][v_size].
Floats attention(const AttentionKernel &kernel, const Problem &problem, const Cut &cut = {}) {
    const Shape &shape = problem.shape;
    const Floats q = spread(problem.q, shape.k_size, cut.padding);
    const Halves k = spread(problem.k, shape.k_size, cut.padding), v = spread(problem.v, shape.v_size, cut.padding);
    const Halves mask = spread(problem.mask, shape.cells, cut.padding);
    const std::size_t q_stride = sizeof(float) * (shape.k_size + cut.padding);
    const std::size_t k_stride = 2 * (shape.k_size + cut.padding), v_stride = 2 * (shape.v_size + cut.padding);
    const auto n = [](std::size_t number) { return static_cast<std::int64_t>(number); };
    Floats y(shape.rows * shape.heads * shape.v_size, NAN);
    const Attention task{bytes_of(q),
                         q_stride * shape.heads,
                         q_stride,
                         bytes_of(k),
                         k_stride * shape.kv_heads,
                         k_stride,
                         bytes_of(v),
                         v_stride * shape.kv_heads,
                         v_stride,
                         bytes_of(mask),
                         2 * (shape.cells + cut.padding),
                         n(shape.rows),
                         n(shape.heads),
                         n(shape.kv_heads),
                         n(shape.cells),
                         n(shape.k_size),
                         n(shape.v_size),
                         1.0F / std::sqrt(static_cast<float>(shape.k_size)),
                         y.data()};
    const std::size_t size = kernel.partial_size(task);
    CHECK(size % 64 == 0);
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, size), std::free);
    std::memset(memory.get(), 0xff, size); // not numbers
    auto *const partial = static_cast<float *>(memory.get());
    for_each_piece(cut, cut.n_pieces,
                   [&](std::int64_t thread, std::int64_t) { kernel.attend(task, partial, thread, cut.n_pieces); });
    for_each_piece(cut, n(shape.rows * shape.heads),
                   [&](std::int64_t begin, std::int64_t end) { kernel.combine(task, partial, begin, end); });
    return y;
}

struct Exact {
    std::vector<double> y, sizes; // results, and the weighted sizes of the values that they are made of
};

// Adds what a query gets to `exact`.
void attend_exactly(const Problem &problem, std::size_t row, std::size_t head, Exact &exact) {
    const Shape &shape = problem.shape;
    const std::size_t kv_head = head / (shape.heads / shape.kv_heads);
    const float *const q = &problem.q[(row * shape.heads + head) * shape.k_size];
    std::vector<double> y(shape.v_size), sizes(shape.v_size);
    double largest = -INFINITY, sum = 0.0;
    std::vector<double> scores(shape.cells, -INFINITY);
    for (std::size_t cell = 0; cell < shape.cells; ++cell) {
        if (problem.sees(row, cell)) {
            double product = 0.0;
            for (std::size_t d = 0; d < shape.k_size; ++d) {
                product += q[d] * number_of(problem.k[(cell * shape.kv_heads + kv_head) * shape.k_size + d]);
            }
            scores[cell] = product / std::sqrt(static_cast<double>(shape.k_size)) +
                           number_of(problem.mask[row * shape.cells + cell]);
            largest = std::max(largest, scores[cell]);
        }
    }
    for (std::size_t cell = 0; cell < shape.cells; ++cell) {
        if (problem.sees(row, cell)) {
            const double weight = std::exp(scores[cell] - largest);
            sum += weight;
            for (std::size_t d = 0; d < shape.v_size; ++d) {
                const double value = number_of(problem.v[(cell * shape.kv_heads + kv_head) * shape.v_size + d]);
                y[d] += weight * value;
                sizes[d] += weight * std::fabs(value);
            }
        }
    }
    for (std::size_t d = 0; d < shape.v_size; ++d) { // a row that sees nothing gets nothing
        exact.y.push_back(sum > 0.0 ? y[d] / sum : 0.0);
        exact.sizes.push_back(sum > 0.0 ? sizes[d] / sum : 0.0);
    }
}

// ---- comparisons ----------------------------------------------------------------------------------------------------

struct Subject {
    const KernelTable &table;

    const AttentionKernel &kernel() const { return *table.attention; }

    void check(bool ok, const std::string &what, int line) const {
        check::report(ok, (std::string(table.isa) + " attention: " + what).c_str(), __FILE__, line);
    }
};

#define CHECK_SUBJECT(subject, condition, what) (subject).check((condition), what, __LINE__)

bool equal_bits(const Floats &a, const Floats &b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), sizeof(float) * a.size()) == 0;
}

void comes_close(const Subject &subject, const Problem &problem, const Floats &y, const std::string &what,
                 double tolerance = 2e-6) {
    const Shape &shape = problem.shape;
    const std::size_t step = 1 + shape.rows / 6; // of many rows some are enough
    bool ok = true;
    for (std::size_t row = 0; row < shape.rows; row += step) {
        Exact exact;
        for (std::size_t head = 0; head < shape.heads; ++head) {
            attend_exactly(problem, row, head, exact);
        }
        for (std::size_t i = 0; i < exact.y.size(); ++i) {
            const double wrong = std::fabs(y[row * exact.y.size() + i] - exact.y[i]);
            ok = ok && wrong <= tolerance * exact.sizes[i] + 1e-12;
        }
    }
    CHECK_SUBJECT(subject, ok, what + ": not what it should be");
}

// A row with the cells that it sees in their order, others of poison before each with a chance of `gaps`, and at least
// `n_cells` of them: a cache that holds other things.
Problem row_elsewhere(const Problem &all, std::size_t row, double gaps, std::size_t n_cells, unsigned seed) {
    Random random(seed);
    std::vector<std::size_t> places; // of the new cache: cells of the old one, or past its end
    for (std::size_t cell = 0; cell < all.shape.cells; ++cell) {
        if (all.sees(row, cell)) {
            while (gaps > 0.0 && static_cast<double>(random() % 1000) < 1000.0 * gaps) {
                places.push_back(all.shape.cells);
            }
            places.push_back(cell);
        }
    }
    places.resize((std::max(places.size(), n_cells) + 15) / 16 * 16, all.shape.cells);
    Problem one{all.shape, {}, {}, {}, {}};
    one.shape.rows = 1;
    one.shape.cells = places.size();
    const std::size_t q_size = all.shape.heads * all.shape.k_size;
    one.q.assign(all.q.begin() + static_cast<std::ptrdiff_t>(row * q_size),
                 all.q.begin() + static_cast<std::ptrdiff_t>((row + 1) * q_size));
    for (const std::size_t cell : places) {
        const bool is_poison = cell == all.shape.cells;
        one.mask.push_back(is_poison ? hidden : all.mask[row * all.shape.cells + cell]);
        for (std::size_t i = 0; i < all.shape.kv_heads * all.shape.k_size; ++i) {
            one.k.push_back(is_poison ? poison(random) : all.k[cell * all.shape.kv_heads * all.shape.k_size + i]);
        }
        for (std::size_t i = 0; i < all.shape.kv_heads * all.shape.v_size; ++i) {
            one.v.push_back(is_poison ? poison(random) : all.v[cell * all.shape.kv_heads * all.shape.v_size + i]);
        }
    }
    return one;
}

// A row's bits are the same alone, without the cells that it does not see, between others, and in a larger cache.
void rows_are_their_own(const Subject &subject, const Problem &all, const Floats &y, const std::string &what) {
    const std::size_t size = all.shape.heads * all.shape.v_size;
    for (std::size_t row = 0; row < all.shape.rows; row += 1 + all.shape.rows / 3) {
        const auto at = y.begin() + static_cast<std::ptrdiff_t>(row * size);
        const Floats expected(at, at + static_cast<std::ptrdiff_t>(size));
        const auto is_same = [&](double gaps, std::size_t n_cells) {
            const Problem one = row_elsewhere(all, row, gaps, n_cells, 7);
            return equal_bits(attention(subject.kernel(), one), expected);
        };
        CHECK_SUBJECT(subject, is_same(0.0, 16), what + ": bits of a row alone");
        CHECK_SUBJECT(subject, is_same(0.03, 16), what + ": bits with a few holes");
        CHECK_SUBJECT(subject, is_same(0.4, all.shape.cells + 272), what + ": bits with holes and padding");
    }
}

// A row's bits are the same whatever lies in cells that only others see.
void others_cells_do_not_matter(const Subject &subject, const Problem &all, const Floats &y, const std::string &what) {
    const auto size = static_cast<std::ptrdiff_t>(all.shape.heads * all.shape.v_size);
    for (std::size_t row = 0; row < all.shape.rows; row += 1 + all.shape.rows / 3) {
        Problem poisoned = all;
        Random random(11);
        for (std::size_t cell = 0; cell < all.shape.cells; ++cell) {
            for (Halves *const cache : {&poisoned.k, &poisoned.v}) {
                const std::size_t n = all.sees(row, cell) ? 0 : cache->size() / all.shape.cells;
                std::generate_n(&(*cache)[cell * (cache->size() / all.shape.cells)], n, [&] { return poison(random); });
            }
        }
        const Floats found = attention(subject.kernel(), poisoned);
        const auto at = static_cast<std::ptrdiff_t>(row) * size;
        CHECK_SUBJECT(subject,
                      equal_bits(Floats(found.begin() + at, found.begin() + at + size),
                                 Floats(y.begin() + at, y.begin() + at + size)),
                      what + ": bits of a row beside poison");
    }
}

void cuts_do_not_matter(const Subject &subject, const Problem &problem, const Floats &y, const std::string &what) {
    for (const Cut &cut : {Cut{3, 8, false}, Cut{7, 1, true}, Cut{50, 0, false}}) { // up to more than there are items
        CHECK_SUBJECT(subject, equal_bits(attention(subject.kernel(), problem, cut), y),
                      what + ": bits of " + std::to_string(cut.n_pieces) + " pieces");
    }
}

// Large scores that differ by more than floats can tell apart from nothing, and equal ones.
void scores_of_any_size(const Subject &subject) {
    Problem problem = random_problem({3, 2, 1, 256, 64, 32}, Mask::sessions, 5);
    const Floats q = problem.q;
    for (const float factor : {0.0F, 1e-30F, 20.0F, 3000.0F}) {
        std::transform(q.begin(), q.end(), problem.q.begin(), [=](float number) { return factor * number; });
        comes_close(subject, problem, attention(subject.kernel(), problem), "scores times " + std::to_string(factor),
                    2e-5);
    }
}

void check_attention(const Subject &subject) {
    const AttentionKernel &kernel = subject.kernel();
    CHECK_SUBJECT(subject, kernel.cells_multiple == 16 && kernel.size_multiple == 16, "multiples");
    CHECK_SUBJECT(subject, kernel.largest_size >= 256 && kernel.most_rows >= 64, "limits");
    constexpr int n_masks = static_cast<int>(Mask::count);
    int round = 0;
    for (const Shape &shape : shapes) {
        for (const int turn : {0, 2}) { // every shape has some of them, every one of them some shapes
            const auto kind = static_cast<Mask>((round++ + turn) % n_masks);
            const std::string what = shape.name() + ", mask " + std::to_string(static_cast<int>(kind));
            const Problem problem = random_problem(shape, kind, static_cast<unsigned>(round));
            const Floats y = attention(kernel, problem);
            comes_close(subject, problem, y, what);
            cuts_do_not_matter(subject, problem, y, what);
            rows_are_their_own(subject, problem, y, what);
            others_cells_do_not_matter(subject, problem, y, what);
        }
    }
    scores_of_any_size(subject);
}

} // namespace

int main() {
    for (const char *isa : {"avx512", "avx2", "neon"}) {
        const KernelTable *const table = best_kernels(isa);
        if (table == nullptr || std::strcmp(table->isa, isa) != 0) {
            std::printf("%s: not on this CPU\n", isa);
        } else if (table->attention == nullptr) {
            std::printf("%s: no attention\n", isa);
        } else {
            check_attention({*table});
            std::printf("%s: checked\n", isa);
        }
    }
    return check::failures;
}
