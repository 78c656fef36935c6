// When the output head of a pass is better computed afterwards, for the rows that are asked for.
#pragma once

#include <cstdint>
#include <vector>

namespace esp {

// Verification reads the logits of the accepted path and of one node's masks, but it learns which these are row by row.
// Computed with the pass, the head reads its matrix once and multiplies all rows; computed afterwards, it reads the
// matrix again for every part that is asked for. Which is cheaper depends on the device: where memory is the bound,
// rows are free and reading is not; where arithmetic is, the other way round. So both ways are tried and timed, and
// from then on the cheaper one is taken.
class HeadPolicy {
  public:
    // Rows that are computed together when one of them is asked for: as many as share a weight while it is in
    // registers.
    static constexpr std::int32_t rows_at_once = 8;

    enum class Way {
        in_pass, // nothing is deferred
        in_parts,
        whole, // all rows when the first is asked for: the same work as in_pass, which is timed that way
    };

    // For a pass of n_rows of which n_first are expected to be asked for together, and n_later (0 = none) after them.
    Way choose(std::int32_t n_rows, std::int32_t n_first, std::int32_t n_later);

    // What was read of the head of a deferred pass of n_rows took this long in all.
    void observe(Way way, std::int32_t n_rows, double us);

    // Expected microseconds; negative where no pass of about this size went this way.
    double cost(Way way, std::int32_t n_rows) const;

  private:
    struct Costs {
        double in_parts = -1.0, whole = -1.0;
    };

    std::vector<Costs> costs_; // by the number of parts that all rows would make
    std::int32_t n_choices_ = 0;
};

} // namespace esp
