// The target model's own best next tokens, remembered by the tokens they came after: the adjacency draft source.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/hash_index.hpp"
#include "core/ngram_index.hpp"

namespace esp {

// Best next tokens of one row of a pass, best first; log-probabilities at temperature 1.
struct Row {
    static constexpr std::size_t width = 8;
    std::array<std::int32_t, width> ids{};
    std::array<float, width> logprobs{};
    std::int32_t n = 0;
};

// Rows by the last 1..max_context tokens before them; a newer row replaces an older one in every context they share.
// Token Recycling keeps one row a token (arXiv 2408.08696), STAND the averages of n-grams (arXiv 2506.04708).
class RowTable {
  public:
    static constexpr std::size_t max_context = 4;
    static constexpr std::uint32_t capacity = 1U << 14; // the oldest rows give way: 5 MiB with their keys

    void clear();
    // The row after tail[0..n).
    void learn(const std::int32_t *tail, std::size_t n, const Row &row);

    struct Found {
        const Row *row = nullptr;     // of the longest known context
        std::size_t context = 0;      // its tokens, 0 = nothing known
        const Row *shorter = nullptr; // of the last token alone, where that is another row
    };
    Found find(const std::int32_t *tail, std::size_t n) const;

  private:
    using Keys = std::array<std::uint64_t, max_context>; // of the last 1, 2, ... tokens

    Keys keys_of(const std::int32_t *tail, std::size_t n) const;
    const Row *at(std::uint64_t key) const;

    std::vector<Row> rows_; // ring
    std::uint32_t n_learned_ = 0;
    HashIndex<std::uint32_t> index_; // context -> number of the row
};

} // namespace esp
