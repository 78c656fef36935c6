// Products of every format and ISA that this CPU runs, against double precision over weights unpacked here, slowly.
// Whatever is multiplied here is multiplied with repacked weights as well, which must not change a bit.

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
#include <utility>
#include <vector>

namespace {

using esp::kernels::best_kernels;
using esp::kernels::Format;
using esp::kernels::FormatKernel;
using esp::kernels::KernelTable;
using esp::kernels::Matmul;

using Bytes = std::vector<std::uint8_t>;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;

// ---- formats, as ggml defines them ----------------------------------------------------------------------------------

double half_at(const std::uint8_t *at) {
    const unsigned bits = at[0] | (unsigned{at[1]} << 8);
    const int exponent = static_cast<int>((bits >> 10) & 31), fraction = static_cast<int>(bits & 1023);
    const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return (bits & 0x8000) != 0 ? -size : size;
}

// A weight, and the sum of the sizes of the two terms that make it.
struct Weight {
    double value, size;
};

Weight weight_of(double scaled, double minimum = 0.0) {
    return {scaled + minimum, std::fabs(scaled) + std::fabs(minimum)};
}

void unpack_q4_0(const std::uint8_t *unit, Weight *to) {
    for (int j = 0; j < 16; ++j) {
        to[j] = weight_of(half_at(unit) * ((unit[2 + j] & 15) - 8));
        to[j + 16] = weight_of(half_at(unit) * ((unit[2 + j] >> 4) - 8));
    }
}

void unpack_q4_1(const std::uint8_t *unit, Weight *to) {
    for (int j = 0; j < 16; ++j) {
        to[j] = weight_of(half_at(unit) * (unit[4 + j] & 15), half_at(unit + 2));
        to[j + 16] = weight_of(half_at(unit) * (unit[4 + j] >> 4), half_at(unit + 2));
    }
}

void unpack_q8_0(const std::uint8_t *unit, Weight *to) {
    for (int j = 0; j < 32; ++j) {
        to[j] = weight_of(half_at(unit) * static_cast<std::int8_t>(unit[2 + j]));
    }
}

void unpack_q4_k(const std::uint8_t *unit, Weight *to) {
    const std::uint8_t *const packed = unit + 4;
    for (int block = 0; block < 8; ++block) {
        const int low = block % 4;
        const int scale = block < 4 ? packed[low] & 63 : (packed[8 + low] & 15) | (packed[low] >> 6 << 4);
        const int minimum = block < 4 ? packed[4 + low] & 63 : (packed[8 + low] >> 4) | (packed[4 + low] >> 6 << 4);
        for (int j = 0; j < 32; ++j) {
            const int byte = unit[16 + 32 * (block / 2) + j];
            const int nibble = block % 2 == 0 ? byte & 15 : byte >> 4;
            to[32 * block + j] = weight_of(half_at(unit) * scale * nibble, -half_at(unit + 2) * minimum);
        }
    }
}

void unpack_q6_k(const std::uint8_t *unit, Weight *to) {
    for (int i = 0; i < 256; ++i) {
        const int part = i / 128, quarter = i % 128 / 32, j = i % 32;
        const int byte = unit[64 * part + 32 * (quarter % 2) + j];
        const int low = quarter < 2 ? byte & 15 : byte >> 4;
        const int upper = (unit[128 + 32 * part + j] >> (2 * quarter)) & 3;
        const int scale = static_cast<std::int8_t>(unit[192 + i / 16]);
        to[i] = weight_of(half_at(unit + 208) * scale * ((low | (upper << 4)) - 32));
    }
}

void unpack_bf16(const std::uint8_t *unit, Weight *to) {
    const std::uint8_t bytes[4] = {0, 0, unit[0], unit[1]};
    float number;
    std::memcpy(&number, bytes, sizeof number);
    *to = weight_of(number);
}

void unpack_f16(const std::uint8_t *unit, Weight *to) { *to = weight_of(half_at(unit)); }

void unpack_f32(const std::uint8_t *unit, Weight *to) {
    float number;
    std::memcpy(&number, unit, sizeof number);
    *to = weight_of(number);
}

struct Layout {
    const char *name;
    Format format;
    std::int64_t n_weights; // of a unit
    std::size_t n_bytes;
    std::vector<std::size_t> halves; // where a unit has half-precision numbers
    void (*unpack)(const std::uint8_t *unit, Weight *to);

    bool is_integer() const { return n_weights > 1; }
    bool is_repacked() const { return is_integer() || n_bytes == 2; }
    std::size_t row_bytes(std::int64_t n_k) const { return static_cast<std::size_t>(n_k / n_weights) * n_bytes; }
};

const Layout layouts[] = {
    {"q4_0", Format::q4_0, 32, 18, {0}, unpack_q4_0},     {"q4_1", Format::q4_1, 32, 20, {0, 2}, unpack_q4_1},
    {"q8_0", Format::q8_0, 32, 34, {0}, unpack_q8_0},     {"q4_k", Format::q4_k, 256, 144, {0, 2}, unpack_q4_k},
    {"q6_k", Format::q6_k, 256, 210, {208}, unpack_q6_k}, {"bf16", Format::bf16, 1, 2, {}, unpack_bf16},
    {"f16", Format::f16, 1, 2, {0}, unpack_f16},          {"f32", Format::f32, 1, 4, {}, unpack_f32},
};

// ---- what is multiplied -------------------------------------------------------------------------------------------

struct Problem {
    std::int64_t n_rows, n_k, n_columns;
    Bytes weights; // rows one after the other
    Floats x;      // columns one after the other
};

using Random = std::mt19937;

std::uint16_t random_half(Random &random) { // 2^-10 to 2^-2, of both signs
    return static_cast<std::uint16_t>((random() & 0x8000) | ((5 + random() % 8) << 10) | (random() & 1023));
}

void write_half(std::uint8_t *to, std::uint16_t bits) {
    to[0] = static_cast<std::uint8_t>(bits);
    to[1] = static_cast<std::uint8_t>(bits >> 8);
}

// Any bytes, but numbers of a moderate size.
Bytes random_weights(const Layout &layout, std::int64_t n, Random &random) {
    Bytes bytes(layout.row_bytes(n));
    std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::uint8_t>(random()); });
    for (std::size_t unit = 0; unit < bytes.size(); unit += layout.n_bytes) {
        for (const std::size_t at : layout.halves) {
            write_half(&bytes[unit + at], random_half(random));
        }
        if (layout.format == Format::bf16 || layout.format == Format::f32) { // exponents around that of 1
            std::uint8_t &top = bytes[unit + layout.n_bytes - 1];
            top = static_cast<std::uint8_t>((top & 0x81) | 0x3e);
        }
    }
    return bytes;
}

Floats random_columns(std::int64_t n, Random &random) {
    std::uniform_real_distribution<float> numbers(-1.0F, 1.0F);
    Floats x(static_cast<std::size_t>(n));
    std::generate(x.begin(), x.end(), [&] { return numbers(random); });
    return x;
}

// Integers up to 127 times a power of two for every 32 of them: exact as int8, and as bfloat16.
Floats exact_columns(std::int64_t n, Random &random) {
    Floats x(static_cast<std::size_t>(n));
    float scale = 1.0F;
    for (std::size_t i = 0; i < x.size(); ++i) {
        if (i % 32 == 0) {
            scale = std::ldexp(1.0F, static_cast<int>(random() % 16) - 8);
        }
        const int number = i % 32 == 5 ? 127 : static_cast<int>(random() % 255) - 127;
        x[i] = scale * static_cast<float>(number);
    }
    return x;
}

Problem random_problem(const Layout &layout, std::int64_t n_rows, std::int64_t n_k, std::int64_t n_columns, bool exact,
                       unsigned seed) {
    Random random(seed);
    Bytes weights = random_weights(layout, n_rows * n_k, random);
    Floats x = exact ? exact_columns(n_columns * n_k, random) : random_columns(n_columns * n_k, random);
    return {n_rows, n_k, n_columns, std::move(weights), std::move(x)};
}

// ---- products -------------------------------------------------------------------------------------------------------

// Results of a product in double precision, and the sums of the sizes of their terms; [column][row].
struct Exact {
    Doubles y, sizes;
};

Exact exact_product(const Layout &layout, const Problem &problem) {
    const auto n_k = static_cast<std::size_t>(problem.n_k);
    std::vector<Weight> weights(static_cast<std::size_t>(problem.n_rows) * n_k);
    for (std::size_t unit = 0; unit * layout.n_bytes < problem.weights.size(); ++unit) {
        layout.unpack(&problem.weights[unit * layout.n_bytes],
                      &weights[unit * static_cast<std::size_t>(layout.n_weights)]);
    }
    Exact exact;
    for (const float *x = problem.x.data(); x < problem.x.data() + problem.x.size(); x += n_k) {
        for (const Weight *row = weights.data(); row < weights.data() + weights.size(); row += n_k) {
            double y = 0.0, size = 0.0;
            for (std::size_t k = 0; k < n_k; ++k) {
                y += row[k].value * x[k];
                size += row[k].size * std::fabs(x[k]);
            }
            exact.y.push_back(y);
            exact.sizes.push_back(size);
        }
    }
    return exact;
}

// A format on an ISA.
struct Subject {
    const KernelTable &table;
    const Layout &layout;

    const FormatKernel &kernel() const { return *table.formats[static_cast<int>(layout.format)]; }

    void check(bool ok, const std::string &what, int line) const {
        check::report(ok, (std::string(table.isa) + " " + layout.name + ": " + what).c_str(), __FILE__, line);
    }
};

#define CHECK_SUBJECT(subject, condition, what) (subject).check((condition), what, __LINE__)

// How the work of a product is cut up, and how far apart rows and columns lie.
struct Cut {
    std::int64_t n_pieces = 1;
    std::size_t padding = 0; // floats after a row of weights, x or y
    bool threads = false;
};

template <typename Work> void for_each_piece(const Cut &cut, std::int64_t n, std::int64_t group, Work work) {
    const std::int64_t n_groups = (n + group - 1) / group;
    std::vector<std::thread> threads;
    for (std::int64_t i = cut.n_pieces - 1; i >= 0; --i) {
        const std::int64_t begin = n_groups * i / cut.n_pieces * group;
        const std::int64_t end = std::min(n, n_groups * (i + 1) / cut.n_pieces * group);
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

constexpr float untouched = -12345.0F;

struct Free {
    void operator()(std::byte *memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, Free>;

// 64-byte aligned; null where there is nothing to keep.
Memory memory_of(std::size_t size) {
    CHECK(size % 64 == 0);
    return Memory(size == 0 ? nullptr : static_cast<std::byte *>(std::aligned_alloc(64, size)));
}

// What a product reads and writes. All buffers end where the data ends, so that a sanitizer sees what is read beyond.
class Buffers {
  public:
    Matmul matmul{};

    Buffers(const Subject &subject, const Problem &problem, const Cut &cut)
        : n_rows_(static_cast<std::size_t>(problem.n_rows)), n_columns_(static_cast<std::size_t>(problem.n_columns)),
          y_stride_(n_rows_ + cut.padding),
          columns_(memory_of(subject.kernel().columns_size(problem.n_k, problem.n_columns))) {
        const auto n_k = static_cast<std::size_t>(problem.n_k);
        const std::size_t row_bytes = subject.layout.row_bytes(problem.n_k), x_stride = n_k + cut.padding;
        const std::size_t weight_stride = row_bytes + cut.padding * sizeof(float);
        weights_.resize((n_rows_ - 1) * weight_stride + row_bytes);
        for (std::size_t r = 0; r < n_rows_; ++r) {
            std::memcpy(&weights_[r * weight_stride], &problem.weights[r * row_bytes], row_bytes);
        }
        x_.resize(1 + (n_columns_ - 1) * x_stride + n_k); // one more in front: vectors are not aligned
        for (std::size_t c = 0; c < n_columns_; ++c) {
            std::copy_n(&problem.x[c * n_k], n_k, &x_[1 + c * x_stride]);
        }
        y_.resize((n_columns_ - 1) * y_stride_ + n_rows_);
        matmul.weights = reinterpret_cast<const std::byte *>(weights_.data());
        matmul.weight_stride = weight_stride;
        matmul.n_rows = problem.n_rows;
        matmul.n_k = problem.n_k;
        matmul.x = &x_[1];
        matmul.x_stride = x_stride * sizeof(float);
        matmul.n_columns = problem.n_columns;
        matmul.y = y_.data();
        matmul.y_stride = y_stride_ * sizeof(float);
    }

    std::byte *columns() const { return columns_.get(); }

    void clear_results() { std::fill(y_.begin(), y_.end(), untouched); }

    // [column][row]
    Floats results() const {
        Floats dense(n_rows_ * n_columns_);
        for (std::size_t i = 0; i < y_.size(); ++i) {
            if (i % y_stride_ < n_rows_) {
                dense[i / y_stride_ * n_rows_ + i % y_stride_] = y_[i];
            } else {
                CHECK(y_[i] == untouched);
            }
        }
        return dense;
    }

  private:
    std::size_t n_rows_, n_columns_, y_stride_;
    Bytes weights_;
    Floats x_, y_;
    Memory columns_;
};

bool same_bits(const Floats &one, const Floats &other) {
    return one.size() == other.size() && std::memcmp(one.data(), other.data(), sizeof(float) * one.size()) == 0;
}

// All weights of the matrix, repacked group by group or in larger pieces, in any order.
Memory repacked(const FormatKernel &kernel, const Matmul &matmul, Random &random) {
    Memory memory = memory_of(kernel.repacked_size(matmul.n_rows, matmul.n_k));
    std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
    for (std::int64_t begin = 0; begin < matmul.n_rows;) {
        const std::int64_t end = begin + kernel.row_group * (1 + static_cast<std::int64_t>(random() % 3));
        pieces.emplace_back(begin, std::min(end, matmul.n_rows));
        begin = end;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    for (const auto &[begin, end] : pieces) {
        kernel.repack(matmul, memory.get(), begin, end);
    }
    return memory;
}

void multiply_rows(const FormatKernel &kernel, const Buffers &buffers, const Matmul &matmul, const Cut &cut) {
    for_each_piece(cut, matmul.n_rows, kernel.row_group, [&](std::int64_t begin, std::int64_t end) {
        kernel.multiply(matmul, buffers.columns(), begin, end);
    });
}

// From repacked weights, out of reach of the others, and with every row up to which caches may be filled.
Floats repacked_results(const FormatKernel &kernel, Buffers &buffers, const Cut &cut) {
    static const std::byte nothing{};
    static Random random(9);
    const Memory weights = repacked(kernel, buffers.matmul, random);
    Matmul matmul = buffers.matmul;
    matmul.weights = &nothing;
    matmul.repacked = weights.get();
    const std::int64_t rounded_up = (matmul.n_rows + kernel.row_group - 1) / kernel.row_group * kernel.row_group;
    matmul.fetch_end = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rounded_up + 1));
    buffers.clear_results();
    multiply_rows(kernel, buffers, matmul, cut);
    return buffers.results();
}

// The results, [column][row], which repacked weights must have as well.
Floats product(const Subject &subject, const Problem &problem, const Cut &cut = {}) {
    const FormatKernel &kernel = subject.kernel();
    Buffers buffers(subject, problem, cut);
    for_each_piece(cut, problem.n_columns, 1, [&](std::int64_t begin, std::int64_t end) {
        kernel.prepare(buffers.matmul, buffers.columns(), begin, end);
    });
    buffers.clear_results();
    multiply_rows(kernel, buffers, buffers.matmul, cut);
    Floats y = buffers.results();
    CHECK_SUBJECT(subject, (kernel.repack != nullptr) == (kernel.repacked_size != nullptr), "repacks");
    if (kernel.repack != nullptr) {
        CHECK_SUBJECT(subject, same_bits(repacked_results(kernel, buffers, cut), y),
                      "repacked: " + std::to_string(problem.n_rows) + " x " + std::to_string(problem.n_k) + ", " +
                          std::to_string(problem.n_columns) + " columns");
    }
    return y;
}

// Columns and rows of a larger problem.
Problem part_of(const Layout &layout, const Problem &all, std::int64_t n_rows, std::int64_t first_column,
                std::int64_t n_columns) {
    const auto weights_end = all.weights.begin() + n_rows * static_cast<std::int64_t>(layout.row_bytes(all.n_k));
    const auto x = all.x.begin() + first_column * all.n_k;
    return {n_rows, all.n_k, n_columns, Bytes(all.weights.begin(), weights_end), Floats(x, x + n_columns * all.n_k)};
}

// ---- comparisons ----------------------------------------------------------------------------------------------------

// Whether every result is within `tolerance` of the sum of its terms' sizes.
bool is_close(const Floats &y, const Exact &exact, double tolerance) {
    for (std::size_t i = 0; i < y.size(); ++i) {
        if (!(std::fabs(y[i] - exact.y[i]) <= tolerance * exact.sizes[i])) {
            std::fprintf(stderr, "result %zu is %.9g, not %.9g, of terms that sum up to %.9g\n", i, y[i], exact.y[i],
                         exact.sizes[i]);
            return false;
        }
    }
    return true;
}

double relative_error(const Floats &y, const Exact &exact) {
    double wrong = 0.0, all = 0.0;
    for (std::size_t i = 0; i < y.size(); ++i) {
        wrong += (y[i] - exact.y[i]) * (y[i] - exact.y[i]);
        all += exact.y[i] * exact.y[i];
    }
    return std::sqrt(wrong / all);
}

constexpr double rounding = 1e-6; // of sums in single precision, relative to the sizes of their terms

// ---- tests ----------------------------------------------------------------------------------------------------------

void rounded_columns_come_close(const Subject &subject) {
    const std::int64_t unit = subject.kernel().k_multiple;
    for (const std::int64_t n_k : {unit, 3 * unit, 1024 + unit, std::int64_t{3072}}) {
        const Problem problem = random_problem(subject.layout, 17, n_k, 9, false, 1);
        const Exact exact = exact_product(subject.layout, problem);
        const Floats y = product(subject, problem);
        const bool rounds_columns = subject.kernel().columns_size(n_k, 1) != 0;
        CHECK_SUBJECT(subject, relative_error(y, exact) < (subject.layout.is_integer() ? 1e-2 : 4e-3),
                      "error " + std::to_string(relative_error(y, exact)) + " at " + std::to_string(n_k));
        CHECK_SUBJECT(subject, rounds_columns || is_close(y, exact, rounding), "rounded at " + std::to_string(n_k));
    }
}

void exact_columns_have_exact_products(const Subject &subject) {
    const std::int64_t unit = subject.kernel().k_multiple;
    for (const std::int64_t n_k : {unit, 2 * unit, 1024 + unit, std::int64_t{3072}}) {
        const Problem problem = random_problem(subject.layout, 19, n_k, 6, true, 2);
        const Floats y = product(subject, problem);
        CHECK_SUBJECT(subject, is_close(y, exact_product(subject.layout, problem), rounding), std::to_string(n_k));
    }
}

// A column as int8 with a scale for every 32 numbers, multiplied out again.
Floats rounded_to_int8(const Floats &x) {
    Floats rounded;
    for (std::size_t block = 0; block < x.size(); block += 32) {
        float largest = 0.0F;
        for (std::size_t k = block; k < block + 32; ++k) {
            largest = std::max(largest, std::fabs(x[k]));
        }
        const float factor = 127.0F / largest, scale = largest / 127.0F;
        for (std::size_t k = block; k < block + 32; ++k) {
            rounded.push_back(scale * std::nearbyint(factor * x[k]));
        }
    }
    return rounded;
}

// To the nearest of 255 numbers, whatever blocks and columns are rounded together.
void columns_are_rounded_to_int8(const Subject &subject) {
    const std::int64_t unit = subject.kernel().k_multiple;
    unsigned seed = 20;
    for (const std::int64_t columns : {1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 20}) {
        for (const std::int64_t n_k : {unit, 3 * unit, 512 + unit}) {
            Problem problem = random_problem(subject.layout, 9, n_k, columns, false, ++seed);
            const Floats y = product(subject, problem, {1 + columns % 3});
            problem.x = rounded_to_int8(problem.x);
            CHECK_SUBJECT(subject, is_close(y, exact_product(subject.layout, problem), rounding),
                          std::to_string(columns) + " columns, " + std::to_string(n_k));
        }
    }
}

void not_a_number_stays_in_its_column(const Subject &subject) {
    constexpr std::int64_t n_rows = 19, n_columns = 6;
    const std::int64_t n_k = 3 * subject.kernel().k_multiple;
    Problem problem = random_problem(subject.layout, n_rows, n_k, n_columns, false, 7);
    const Floats before = product(subject, problem);
    for (const std::int64_t column : {1, 4}) {
        problem.x[static_cast<std::size_t>(column * n_k + (11 * column) % n_k)] = NAN;
    }
    const Floats y = product(subject, problem);
    bool ok = true;
    for (std::size_t i = 0; i < y.size(); ++i) {
        const std::size_t column = i / n_rows;
        ok = ok && (column == 1 || column == 4 ? std::isnan(y[i]) : std::memcmp(&y[i], &before[i], sizeof y[i]) == 0);
    }
    CHECK_SUBJECT(subject, ok, "not a number");
}

// A row's bits depend neither on how many columns there are, nor on which, nor on rows, strides and threads.
void widths_and_threads_do_not_matter(const Subject &subject) {
    constexpr std::int64_t n_rows = 83, n_columns = 71;
    const Problem all = random_problem(subject.layout, n_rows, 1024 + 256, n_columns, false, 3);
    const Floats y = product(subject, all);
    std::int64_t round = 0;
    for (const std::int64_t rows : {1, 15, 16, 17, 83}) {
        for (const std::int64_t columns : {1, 2, 3, 4, 5, 6, 7, 8, 9, 30, 60, 71}) {
            ++round;
            const std::int64_t first = 7 * round % (n_columns - columns + 1);
            const Cut cut{1 + round % 4, round % 2 == 0 ? std::size_t{3} : 0, round % 12 == 11};
            const Floats part = product(subject, part_of(subject.layout, all, rows, first, columns), cut);
            bool equal = true;
            for (std::int64_t c = 0; c < columns; ++c) {
                equal = equal && std::memcmp(&part[static_cast<std::size_t>(c * rows)],
                                             &y[static_cast<std::size_t>((first + c) * n_rows)],
                                             sizeof(float) * static_cast<std::size_t>(rows)) == 0;
            }
            CHECK_SUBJECT(subject, equal, std::to_string(rows) + " rows, " + std::to_string(columns) + " columns");
        }
    }
}

// As the hook multiplies: any number of columns, rows that fill no group, rows of less and of more than a chunk.
void repacked_weights_at_every_width(const Subject &subject) {
    const std::int64_t unit = subject.kernel().k_multiple;
    const std::int64_t lengths[] = {unit, 3 * unit, 1024, 1024 + unit, 2048 + 3 * unit};
    for (std::int64_t columns = 1; columns <= 71; ++columns) {
        const std::int64_t n_rows = 1 + 7 * columns % 41, n_k = lengths[columns % 5];
        const Cut cut{1 + columns % 3, columns % 2 == 0 ? std::size_t{1} : 0, columns % 16 == 7};
        product(subject, random_problem(subject.layout, n_rows, n_k, columns, false, 10), cut);
    }
}

// As large as in the file, up to rounding, and a matrix takes whole groups, where their rows are put side by side.
void repacked_weights_have_a_size(const Subject &subject) {
    const FormatKernel &kernel = subject.kernel();
    const auto group = static_cast<std::size_t>(kernel.row_group);
    for (const std::int64_t units : {1, 2, 3, 7}) {
        const std::int64_t n_k = units * kernel.k_multiple;
        const std::size_t size = kernel.repacked_size(kernel.row_group, n_k),
                          bytes = group * subject.layout.row_bytes(n_k);
        CHECK_SUBJECT(subject, size >= bytes && size < bytes + 128, "a group of " + std::to_string(size) + " bytes");
        for (const std::int64_t n_rows :
             {std::int64_t{1}, kernel.row_group, kernel.row_group + 1, 5 * kernel.row_group}) {
            const auto n_groups = (static_cast<std::size_t>(n_rows) + group - 1) / group;
            const std::size_t rows = static_cast<std::size_t>(n_rows) * subject.layout.row_bytes(n_k);
            const std::size_t expected = subject.layout.is_integer() ? n_groups * size : (rows + 63) / 64 * 64;
            CHECK_SUBJECT(subject, kernel.repacked_size(n_rows, n_k) == expected, "the size of a matrix");
        }
    }
}

void nothing_gives_nothing(const Subject &subject) {
    const std::int64_t n_k = 2 * subject.kernel().k_multiple;
    Problem problem = random_problem(subject.layout, 9, n_k, 5, false, 4);
    std::fill_n(problem.x.begin(), n_k, 0.0F); // a column
    std::fill_n(problem.x.begin() + 2 * n_k, n_k, -0.0F);
    Floats y = product(subject, problem);
    for (std::size_t r = 0; r < 9; ++r) {
        CHECK_SUBJECT(subject, y[r] == 0.0F && y[9 + r] != 0.0F && y[18 + r] == 0.0F, "columns of zeros");
    }
    std::fill(problem.weights.begin(), problem.weights.end(), std::uint8_t{0}); // scales too
    y = product(subject, problem);
    CHECK_SUBJECT(subject, std::all_of(y.begin(), y.end(), [](float number) { return number == 0.0F; }),
                  "weights of zeros");
}

// Equal bytes, the largest and smallest sums that the columns allow, and scales from subnormal to the largest.
void extremes_do_not_overflow(const Subject &subject) {
    constexpr std::int64_t n_rows = 8, n_columns = 4;
    const std::int64_t n_k = 2 * subject.kernel().k_multiple;
    Problem problem{n_rows, n_k, n_columns, Bytes(n_rows * subject.layout.row_bytes(n_k)), {}};
    for (std::int64_t k = 0; k < n_columns * n_k; ++k) {
        const bool negative = k / n_k == 1 || (k / n_k == 2 && k % 2 == 0) || (k / n_k == 3 && k % 32 < 16);
        problem.x.push_back(negative ? -127.0F : 127.0F);
    }
    for (const std::uint16_t scale : {0x3c00, 0x0001, 0x83ff, 0x7bff}) { // 1, 2^-24, almost -2^-14, 65504
        for (const std::uint8_t byte : {0x00, 0xff, 0x80, 0x7f, 0x88, 0x0f, 0xf0}) {
            std::fill(problem.weights.begin(), problem.weights.end(), byte);
            for (std::size_t unit = 0; unit < problem.weights.size(); unit += subject.layout.n_bytes) {
                for (const std::size_t at : subject.layout.halves) {
                    write_half(&problem.weights[unit + at], scale);
                }
            }
            const Floats y = product(subject, problem);
            CHECK_SUBJECT(subject, is_close(y, exact_product(subject.layout, problem), rounding),
                          "bytes " + std::to_string(byte) + ", scale " + std::to_string(scale));
        }
    }
}

// Columns so small that the factor to int8 would be infinite, and as large as a model's may be.
void columns_of_any_size(const Subject &subject) {
    const std::int64_t n_k = subject.kernel().k_multiple;
    Problem problem = random_problem(subject.layout, 9, n_k, 4, true, 6);
    const Floats x = problem.x;
    for (const float factor : {1e-45F, 1e-42F, 1e-38F, 1e-36F, 1e-30F, 1e30F}) {
        std::transform(x.begin(), x.end(), problem.x.begin(), [=](float number) { return factor * number; });
        Exact exact = exact_product(subject.layout, problem);
        for (double &size : exact.sizes) {
            size += 1e-26;
        }
        const Floats y = product(subject, problem);
        CHECK_SUBJECT(subject, is_close(y, exact, 1e-2), "columns times " + std::to_string(std::log10(factor)));
    }
}

void check_format(const Subject &subject) {
    CHECK_SUBJECT(subject, subject.kernel().row_group > 0, "group");
    rounded_columns_come_close(subject);
    exact_columns_have_exact_products(subject);
    widths_and_threads_do_not_matter(subject);
    nothing_gives_nothing(subject);
    not_a_number_stays_in_its_column(subject);
    if (subject.layout.is_integer()) { // any bytes are numbers
        columns_are_rounded_to_int8(subject);
        extremes_do_not_overflow(subject);
    }
    CHECK_SUBJECT(subject, (subject.kernel().repack != nullptr) == subject.layout.is_repacked(), "what is repacked");
    if (subject.kernel().repack != nullptr) {
        repacked_weights_at_every_width(subject);
        repacked_weights_have_a_size(subject);
    }
    columns_of_any_size(subject);
}

void a_limit_is_kept(const std::vector<std::string> &found) {
    const KernelTable *const best = best_kernels(nullptr);
    CHECK(found.empty() ? best == nullptr : best != nullptr && best->isa == found.front());
    CHECK(best_kernels("none") == nullptr);
}

} // namespace

int main() {
    std::vector<std::string> found;
    for (const char *isa : {"avx512", "avx2", "neon"}) { // best first
        const KernelTable *const table = best_kernels(isa);
        if (table == nullptr || std::strcmp(table->isa, isa) != 0) {
            std::printf("%s: not on this CPU\n", isa);
            continue;
        }
        found.emplace_back(isa);
        for (const Layout &layout : layouts) {
            if (table->formats[static_cast<int>(layout.format)] == nullptr) {
                std::printf("%s: no %s on this CPU\n", isa, layout.name);
            } else {
                check_format({*table, layout});
            }
        }
        std::printf("%s: checked\n", isa);
    }
    a_limit_is_kept(found);
    return check::failures;
}
