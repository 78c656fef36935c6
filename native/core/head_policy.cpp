#include "core/head_policy.hpp"

#include <algorithm>
#include <cstddef>

namespace esp {
namespace {

constexpr double weight_of_new = 0.25;
constexpr double most_surprise = 2.0;        // times what was expected: another program ran in between
constexpr std::int32_t tried_again_in = 128; // passes: the device may have changed its mind

constexpr std::int32_t parts(std::int32_t n_rows) {
    return (n_rows + HeadPolicy::rows_at_once - 1) / HeadPolicy::rows_at_once;
}

double towards(double known, double us) {
    return known < 0.0 ? us : known + weight_of_new * (std::min(us, most_surprise * known) - known);
}

} // namespace

HeadPolicy::Way HeadPolicy::choose(std::int32_t n_rows, std::int32_t n_first, std::int32_t n_later) {
    if (parts(n_first) + parts(n_later) >= parts(n_rows)) { // nothing to win wherever the bound is
        return Way::in_pass;
    }
    const double whole = cost(Way::whole, n_rows), in_parts = cost(Way::in_parts, n_rows);
    if (whole < 0.0 || in_parts < 0.0) {
        return whole < 0.0 ? Way::whole : Way::in_parts;
    }
    const bool parts_pay = in_parts < whole;
    if (++n_choices_ % tried_again_in == 0) {
        return parts_pay ? Way::whole : Way::in_parts;
    }
    return parts_pay ? Way::in_parts : Way::in_pass;
}

void HeadPolicy::observe(Way way, std::int32_t n_rows, double us) {
    const auto at = static_cast<std::size_t>(parts(n_rows));
    if (at >= costs_.size()) {
        costs_.resize(at + 1);
    }
    double &known = way == Way::whole ? costs_[at].whole : costs_[at].in_parts;
    known = towards(known, us);
}

double HeadPolicy::cost(Way way, std::int32_t n_rows) const {
    const auto at = static_cast<std::size_t>(parts(n_rows));
    if (at >= costs_.size()) {
        return -1.0;
    }
    return way == Way::whole ? costs_[at].whole : costs_[at].in_parts;
}

} // namespace esp
