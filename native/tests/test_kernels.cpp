// Products of every format and ISA that this CPU runs, against double precision over weights unpacked here, slowly.

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

// The results, [column][row]. All buffers end where the data ends, so that a sanitizer sees what is read beyond.
Floats product(const FormatKernel &kernel, const Layout &layout, const Problem &problem, const Cut &cut = {}) {
    const auto n_rows = static_cast<std::size_t>(problem.n_rows),
               n_columns = static_cast<std::size_t>(problem.n_columns);
    const auto n_k = static_cast<std::size_t>(problem.n_k);
    const std::size_t row_bytes = layout.row_bytes(problem.n_k);
    const std::size_t weight_stride = row_bytes + cut.padding * sizeof(float);
    const std::size_t x_stride = n_k + cut.padding, y_stride = n_rows + cut.padding;

    Bytes weights((n_rows - 1) * weight_stride + row_bytes);
    for (std::size_t r = 0; r < n_rows; ++r) {
        std::memcpy(&weights[r * weight_stride], &problem.weights[r * row_bytes], row_bytes);
    }
    Floats x(1 + (n_columns - 1) * x_stride + n_k); // one more in front: vectors are not aligned
    for (std::size_t c = 0; c < n_columns; ++c) {
        std::copy_n(&problem.x[c * n_k], n_k, &x[1 + c * x_stride]);
    }
    Floats y((n_columns - 1) * y_stride + n_rows, untouched);
    const std::size_t size = kernel.columns_size(problem.n_k, problem.n_columns);
    CHECK(size % 64 == 0);
    const std::unique_ptr<void, decltype(&std::free)> memory(size == 0 ? nullptr : std::aligned_alloc(64, size),
                                                             std::free);
    auto *const columns = static_cast<std::byte *>(memory.get());
    const Matmul matmul{reinterpret_cast<const std::byte *>(weights.data()),
                        weight_stride,
                        problem.n_rows,
                        problem.n_k,
                        &x[1],
                        x_stride * sizeof(float),
                        problem.n_columns,
                        y.data(),
                        y_stride * sizeof(float)};
    for_each_piece(cut, problem.n_columns, 1,
                   [&](std::int64_t begin, std::int64_t end) { kernel.prepare(matmul, columns, begin, end); });
    for_each_piece(cut, problem.n_rows, kernel.row_group,
                   [&](std::int64_t begin, std::int64_t end) { kernel.multiply(matmul, columns, begin, end); });

    Floats dense(n_rows * n_columns);
    for (std::size_t i = 0; i < y.size(); ++i) {
        if (i % y_stride < n_rows) {
            dense[i / y_stride * n_rows + i % y_stride] = y[i];
        } else {
            CHECK(y[i] == untouched);
        }
    }
    return dense;
}

// Columns and rows of a larger problem.
Problem part_of(const Layout &layout, const Problem &all, std::int64_t n_rows, std::int64_t first_column,
                std::int64_t n_columns) {
    const auto weights_end = all.weights.begin() + n_rows * static_cast<std::int64_t>(layout.row_bytes(all.n_k));
    const auto x = all.x.begin() + first_column * all.n_k;
    return {n_rows, all.n_k, n_columns, Bytes(all.weights.begin(), weights_end), Floats(x, x + n_columns * all.n_k)};
}

// ---- comparisons
// ------------------------------------------------------------------------------------------------------

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

// ---- tests
// ------------------------------------------------------------------------------------------------------------

void rounded_columns_come_close(const Subject &subject) {
    const std::int64_t unit = subject.kernel().k_multiple;
    for (const std::int64_t n_k : {unit, 3 * unit, 1024 + unit, std::int64_t{3072}}) {
        const Problem problem = random_problem(subject.layout, 17, n_k, 9, false, 1);
        const Exact exact = exact_product(subject.layout, problem);
        const Floats y = product(subject.kernel(), subject.layout, problem);
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
        const Floats y = product(subject.kernel(), subject.layout, problem);
        CHECK_SUBJECT(subject, is_close(y, exact_product(subject.layout, problem), rounding), std::to_string(n_k));
    }
}

// A row's bits depend neither on how many columns there are, nor on which, nor on rows, strides and threads.
void widths_and_threads_do_not_matter(const Subject &subject) {
    constexpr std::int64_t n_rows = 83, n_columns = 71;
    const Problem all = random_problem(subject.layout, n_rows, 1024 + 256, n_columns, false, 3);
    const Floats y = product(subject.kernel(), subject.layout, all);
    std::int64_t round = 0;
    for (const std::int64_t rows : {1, 15, 16, 17, 83}) {
        for (const std::int64_t columns : {1, 2, 3, 4, 5, 6, 7, 8, 9, 30, 60, 71}) {
            ++round;
            const std::int64_t first = 7 * round % (n_columns - columns + 1);
            const Cut cut{1 + round % 4, round % 2 == 0 ? std::size_t{3} : 0, round % 12 == 11};
            const Floats part =
                product(subject.kernel(), subject.layout, part_of(subject.layout, all, rows, first, columns), cut);
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

void nothing_gives_nothing(const Subject &subject) {
    const std::int64_t n_k = 2 * subject.kernel().k_multiple;
    Problem problem = random_problem(subject.layout, 9, n_k, 5, false, 4);
    std::fill_n(problem.x.begin(), n_k, 0.0F); // a column
    std::fill_n(problem.x.begin() + 2 * n_k, n_k, -0.0F);
    Floats y = product(subject.kernel(), subject.layout, problem);
    for (std::size_t r = 0; r < 9; ++r) {
        CHECK_SUBJECT(subject, y[r] == 0.0F && y[9 + r] != 0.0F && y[18 + r] == 0.0F, "columns of zeros");
    }
    std::fill(problem.weights.begin(), problem.weights.end(), std::uint8_t{0}); // scales too
    y = product(subject.kernel(), subject.layout, problem);
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
            const Floats y = product(subject.kernel(), subject.layout, problem);
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
        const Floats y = product(subject.kernel(), subject.layout, problem);
        CHECK_SUBJECT(subject, is_close(y, exact, 1e-2), "columns times " + std::to_string(std::log10(factor)));
    }
}

void check_format(const Subject &subject) {
    CHECK_SUBJECT(subject, subject.kernel().row_group > 0, "group");
    rounded_columns_come_close(subject);
    exact_columns_have_exact_products(subject);
    widths_and_threads_do_not_matter(subject);
    nothing_gives_nothing(subject);
    if (subject.layout.is_integer()) { // any bytes are numbers
        extremes_do_not_overflow(subject);
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
