// The noise of a draw: pinned values, because a change of one bit would change every seeded text.

#include "check.hpp"
#include "core/logits.hpp"

#include <cmath>
#include <cstdint>

namespace {

bool near(double a, double b, double tolerance) { return std::abs(a - b) < tolerance; }

void known_values() {
    CHECK(near(esp::keyed_gumbel(0, 0, 0), -0.6807578025137786, 1e-12));
    CHECK(near(esp::keyed_gumbel(42, 100, 7), 1.179804177045585, 1e-12));
    CHECK(near(esp::keyed_gumbel(UINT64_MAX, 4095, 49151), 0.36134327427333157, 1e-12));
}

// Keys whose hash has all bits set or none, found by running the hash backwards.
void the_ends_of_the_range_are_finite() {
    CHECK(near(esp::keyed_gumbel(1, 0xd40000b0ac2545c6, 7), 36.7368005696771, 1e-9));
    CHECK(near(esp::keyed_gumbel(1, 0x5035ff09e6f18a60, 7), -3.6037787309, 1e-6));
    CHECK(esp::keyed_gumbel(1, 0xd40000b0ac2545c6, 7) < esp::max_gumbel);
}

void every_part_of_the_key_counts() {
    const double noise = esp::keyed_gumbel(1, 2, 3);
    CHECK(noise == esp::keyed_gumbel(1, 2, 3));
    CHECK(noise != esp::keyed_gumbel(2, 2, 3));
    CHECK(noise != esp::keyed_gumbel(1, 3, 3));
    CHECK(noise != esp::keyed_gumbel(1, 2, 4));
    CHECK(esp::keyed_gumbel(1, 2, 3) != esp::keyed_gumbel(1, 3, 2));
    CHECK(esp::keyed_gumbel(1, 2, 3) != esp::keyed_gumbel(2, 1, 3));
}

// A standard Gumbel has mean 0.5772 (Euler's constant) and variance pi^2 / 6.
void moments_of_a_standard_gumbel() {
    constexpr int n = 200000;
    double sum = 0.0;
    double squares = 0.0;
    for (int i = 0; i < n; ++i) {
        const double noise =
            esp::keyed_gumbel(5, static_cast<std::uint64_t>(i / 1000), static_cast<std::uint32_t>(i % 1000));
        sum += noise;
        squares += noise * noise;
    }
    const double mean = sum / n;
    CHECK(near(mean, 0.5772156649, 0.01));
    CHECK(near(squares / n - mean * mean, 1.6449340668, 0.03));
}

} // namespace

int main() {
    known_values();
    the_ends_of_the_range_are_finite();
    every_part_of_the_key_counts();
    moments_of_a_standard_gumbel();
    return check::failures;
}
