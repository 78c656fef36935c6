// argmax, log_sum_exp and top_k against literal values and slow twins, around the borders of their blocks of 64
// and of the groups of 256 that top_k looks at first.

#include "check.hpp"
#include "core/logits.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr std::size_t sizes[] = {1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 5000};

using Row = std::vector<float>;
using Ids = std::vector<std::int32_t>;

struct Top {
    Ids ids;
    Row values;
};

Top top(const Row &row, std::size_t k) {
    Top result{Ids(k, -7), Row(k, -7.0f)};
    const std::size_t n = esp::top_k(row.data(), row.size(), k, result.ids.data(), result.values.data());
    result.ids.resize(n);
    result.values.resize(n);
    return result;
}

std::int32_t argmax(const Row &row) { return esp::argmax(row.data(), row.size()); }
double log_sum_exp(const Row &row) { return esp::log_sum_exp(row.data(), row.size()); }

// Indices by value, the larger first, ties by index; NaN counts as -inf.
Ids sorted(const Row &row) {
    const auto value = [&row](std::int32_t i) {
        const float x = row[static_cast<std::size_t>(i)];
        return std::isnan(x) ? -inf : x;
    };
    Ids ids(row.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](std::int32_t a, std::int32_t b) { return value(a) > value(b); });
    return ids;
}

// Few different values, so that ties are common, some of them -inf.
Row random_row(std::mt19937 &rng, std::size_t n) {
    std::uniform_int_distribution<int> level(-5, 5);
    Row row(n);
    for (float &x : row) {
        const int value = level(rng);
        x = value == -5 ? -inf : 0.5f * static_cast<float>(value);
    }
    return row;
}

void argmax_takes_the_first_of_equals() {
    CHECK(argmax({1.0f, 3.0f, 3.0f}) == 1);
    CHECK(argmax({-2.0f}) == 0);
    for (const std::size_t n : sizes) {
        Row row(n, 0.0f);
        CHECK(argmax(row) == 0);
        row.back() = 1.0f;
        CHECK(argmax(row) == static_cast<std::int32_t>(n) - 1);
        row.front() = 1.0f;
        CHECK(argmax(row) == 0);
    }
}

void argmax_skips_nan() {
    CHECK(argmax({nan, 1.0f, nan, 2.0f, nan}) == 3);
    CHECK(argmax({nan, -inf}) == 1);
    CHECK(argmax({nan, nan}) == 0);
    CHECK(argmax(Row(65, -inf)) == 0);
    CHECK(argmax({0.0f, inf, nan}) == 1);
}

void top_k_breaks_ties_by_index() {
    const Top best = top({5.0f, 7.0f, 7.0f, 5.0f, 9.0f}, 4);
    CHECK(best.ids == (Ids{4, 1, 2, 0}));
    CHECK(best.values == (Row{9.0f, 7.0f, 7.0f, 5.0f}));
    CHECK(top(Row(200, 1.0f), 3).ids == (Ids{0, 1, 2}));
}

void top_k_of_more_than_there_are() {
    CHECK(top({1.0f, 2.0f}, 5).ids == (Ids{1, 0}));
    CHECK(top({1.0f, 2.0f}, 0).ids.empty());
}

void top_k_ranks_nan_and_minus_infinity_last() {
    const Top best = top({nan, -inf, 0.0f, nan}, 4);
    CHECK(best.ids == (Ids{2, 0, 1, 3}));
    CHECK(best.values == (Row{0.0f, -inf, -inf, -inf}));
    CHECK(top({-inf, inf, 1.0f}, 1).ids == (Ids{1}));
}

void top_k_equals_a_stable_sort() {
    std::mt19937 rng(1);
    for (const std::size_t n : sizes) {
        for (const std::size_t k : {std::size_t{1}, std::size_t{2}, std::size_t{10}, std::size_t{64}, n}) {
            const Row row = random_row(rng, n);
            Ids expected = sorted(row);
            CHECK(argmax(row) == expected.front());
            expected.resize(std::min(k, n));
            CHECK(top(row, k).ids == expected);
        }
    }
}

void top_k_of_rows_without_ties() {
    std::mt19937 rng(3);
    std::normal_distribution<float> normal(0.0f, 5.0f);
    for (int i = 0; i < 50; ++i) {
        Row row(5000);
        std::generate(row.begin(), row.end(), [&] { return normal(rng); });
        std::fill_n(row.begin() + 256 * (i % 19), 100, 100.0f + static_cast<float>(i)); // most of the best in one place
        Ids expected = sorted(row);
        expected.resize(16);
        CHECK(top(row, 16).ids == expected);
        std::fill(row.begin(), row.begin() + 4990, nan);
        expected = sorted(row);
        expected.resize(16);
        CHECK(top(row, 16).ids == expected);
    }
}

void log_sum_exp_of_known_rows() {
    CHECK(log_sum_exp({3.0f}) == 3.0);
    CHECK(std::abs(log_sum_exp({0.0f, 0.0f}) - std::log(2.0)) < 1e-12);
    CHECK(std::abs(log_sum_exp(Row(1000, -2.0f)) - (std::log(1000.0) - 2.0)) < 1e-12);
    CHECK(std::abs(log_sum_exp({1000.0f, 1000.0f, -inf}) - (1000.0 + std::log(2.0))) < 1e-9);
}

void log_sum_exp_of_odd_rows() {
    CHECK(log_sum_exp({-inf, -inf}) == -inf);
    CHECK(log_sum_exp({}) == -inf);
    CHECK(log_sum_exp({inf, 0.0f}) == inf);
    CHECK(log_sum_exp({nan, -inf}) == -inf);
    CHECK(std::abs(log_sum_exp({nan, 2.0f, nan}) - 2.0) < 1e-12); // NaN counts as nothing
}

void log_sum_exp_equals_the_sum_in_double() {
    std::mt19937 rng(2);
    std::normal_distribution<float> normal(0.0f, 5.0f);
    for (const std::size_t n : sizes) {
        Row row(n);
        std::generate(row.begin(), row.end(), [&] { return normal(rng); });
        double sum = 0.0;
        for (const float x : row) {
            sum += std::exp(static_cast<double>(x));
        }
        CHECK(std::abs(log_sum_exp(row) - std::log(sum)) < 1e-6);
    }
}

} // namespace

int main() {
    argmax_takes_the_first_of_equals();
    argmax_skips_nan();
    top_k_breaks_ties_by_index();
    top_k_of_more_than_there_are();
    top_k_ranks_nan_and_minus_infinity_last();
    top_k_equals_a_stable_sort();
    top_k_of_rows_without_ties();
    log_sum_exp_of_known_rows();
    log_sum_exp_of_odd_rows();
    log_sum_exp_equals_the_sum_in_double();
    return check::failures;
}
