// Reductions over one row of logits, in place: argmax, log-sum-exp, top-k, and the keyed Gumbel noise of a draw.
#pragma once

#include <cstddef>
#include <cstdint>

namespace esp {

// Index of the largest value; the lowest index wins a tie. n > 0. NaN never wins.
std::int32_t argmax(const float *logits, std::size_t n);

// log(sum(exp(logits))) with the maximum taken out, accumulated in double. NaN counts as nothing.
double log_sum_exp(const float *logits, std::size_t n);

// The k largest entries, largest first, ties by lower index. Writes min(k, n) ids and values; returns that number.
std::size_t top_k(const float *logits, std::size_t n, std::size_t k, std::int32_t *ids, float *values);

// The k largest entries as log-probabilities, where the mass of all others is estimated from every eighth block of
// them: a fifth of the time of top_k and log_sum_exp together, and closer than what drafts are made of. Returns min(k,
// n).
std::size_t top_k_sketch(const float *logits, std::size_t n, std::size_t k, std::int32_t *ids, float *logprobs);

// Standard Gumbel noise that depends on nothing but (seed, position, token): argmax(logit / T + gumbel) is an exact
// softmax draw, the same whatever tree, batch or order the logits came from (algorithms D.4, rule 4).
double keyed_gumbel(std::uint64_t seed, std::uint64_t position, std::uint32_t token);

// keyed_gumbel never exceeds this: its largest value is -log(-log(1 - 2^-53)) = 36.74.
inline constexpr double max_gumbel = 37.5;

} // namespace esp
