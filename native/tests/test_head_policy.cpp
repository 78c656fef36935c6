// When heads are deferred: both ways are timed, and the cheaper one is taken.
#include "core/head_policy.hpp"

#include <cmath>
#include <functional>

#include "check.hpp"

using esp::HeadPolicy;
using Way = HeadPolicy::Way;

namespace {

bool close(double a, double b) { return std::fabs(a - b) < 1e-6 * (std::fabs(b) + 1.0); }

// A pass of 28 rows, 7 nodes with 3 masks each, on a device where a head takes so long. Returns the way it took.
Way pass(HeadPolicy &policy, const std::function<double(int)> &device) {
    const Way way = policy.choose(28, 7, 3);
    if (way == Way::whole) {
        policy.observe(way, 28, device(28));
    } else if (way == Way::in_parts) {
        policy.observe(way, 28, device(7) + device(3));
    }
    return way;
}

double by_arithmetic(int n) { return 100.0 + 100.0 * n; }
double by_memory(int n) { return 1000.0 + n; }

int count(HeadPolicy &policy, const std::function<double(int)> &device, int n, Way way) {
    int found = 0;
    for (int i = 0; i < n; ++i) {
        found += pass(policy, device) == way ? 1 : 0;
    }
    return found;
}

void both_ways_are_tried_first() {
    HeadPolicy policy;
    CHECK(pass(policy, by_arithmetic) == Way::whole);
    CHECK(pass(policy, by_arithmetic) == Way::in_parts);
}

void what_cannot_be_won_is_not_tried() {
    HeadPolicy policy;
    CHECK(policy.choose(1, 1, 0) == Way::in_pass);
    CHECK(policy.choose(16, 8, 3) == Way::in_pass);  // twice eight rows, either way
    CHECK(policy.choose(17, 17, 0) == Way::in_pass); // all of them are read
    CHECK(policy.choose(16, 8, 0) == Way::whole);
}

void arithmetic_is_saved() {
    HeadPolicy policy;
    count(policy, by_arithmetic, 2, Way::whole);
    CHECK(count(policy, by_arithmetic, 100, Way::in_parts) == 100);
}

void memory_is_not_read_twice() {
    HeadPolicy policy;
    count(policy, by_memory, 2, Way::whole);
    CHECK(count(policy, by_memory, 100, Way::in_pass) == 100);
}

void the_other_way_is_tried_now_and_then() {
    HeadPolicy policy;
    CHECK(count(policy, by_memory, 1000, Way::in_parts) == 1 + 7);
    HeadPolicy other;
    CHECK(count(other, by_arithmetic, 1000, Way::whole) == 1 + 7);
}

void a_device_may_change_its_mind() {
    HeadPolicy policy;
    count(policy, by_memory, 200, Way::whole);
    count(policy, [](int n) { return 0.1 * by_arithmetic(n); }, 2000, Way::whole);
    CHECK(count(policy, [](int n) { return 0.1 * by_arithmetic(n); }, 100, Way::in_parts) >= 99);
}

void sizes_and_ways_are_kept_apart() {
    HeadPolicy policy;
    policy.observe(Way::whole, 24, 800.0);
    CHECK(close(policy.cost(Way::whole, 17), 800.0));
    CHECK(policy.cost(Way::whole, 16) < 0.0 && policy.cost(Way::whole, 25) < 0.0 && policy.cost(Way::whole, 200) < 0.0);
    CHECK(policy.cost(Way::in_parts, 24) < 0.0);
    policy.observe(Way::in_parts, 20, 100.0);
    CHECK(close(policy.cost(Way::in_parts, 24), 100.0) && close(policy.cost(Way::whole, 24), 800.0));
}

void a_disturbance_counts_little_and_fades() {
    HeadPolicy policy;
    policy.observe(Way::whole, 20, 1000.0);
    policy.observe(Way::whole, 20, 1e9);
    CHECK(policy.cost(Way::whole, 20) <= 1250.0);
    for (int i = 0; i < 50; ++i) {
        policy.observe(Way::whole, 20, 1000.0);
    }
    CHECK(std::fabs(policy.cost(Way::whole, 20) - 1000.0) < 1.0);
}

} // namespace

int main() {
    both_ways_are_tried_first();
    what_cannot_be_won_is_not_tried();
    arithmetic_is_saved();
    memory_is_not_read_twice();
    the_other_way_is_tried_now_and_then();
    a_device_may_change_its_mind();
    sizes_and_ways_are_kept_apart();
    a_disturbance_counts_little_and_fades();
    return check::failures;
}
