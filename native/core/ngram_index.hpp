// What followed earlier occurrences of the end of a text: the copying draft source.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/hash_index.hpp"

namespace esp {

// A token that once followed what the text now ends with.
struct Copy {
    std::int32_t token = 0;
    std::int32_t length = 0; // tokens before it that match, up to max_match
    std::int32_t seen = 0;   // occurrences looked at for this length
    std::int32_t agree = 0;  // of those, how many this token followed
};

// n-grams of a few lengths, each with the chain of its occurrences, newest first. A match is found by the longest
// n-gram that occurred before and then extended token by token, so lengths between the indexed ones are seen as well.
//
// Of the text 1 2 7 9 1 2 8, the end 1 2 was followed by 8 (newest) and 7.
class NgramIndex {
  public:
    static constexpr std::int32_t max_match = 32;
    static constexpr std::size_t max_copies = 4;

    void clear();
    // Negative tokens separate texts: they never match.
    void append(std::int32_t token);
    const std::vector<std::int32_t> &text() const { return text_; }

    // Up to max_copies distinct continuations of tail[0..n), longest match first, then newest. The tail is the end of
    // the text, or that and tokens which may follow it.
    void copies(const std::int32_t *tail, std::size_t n, std::vector<Copy> &out) const;

  private:
    static constexpr std::array<std::int32_t, 5> lengths = {1, 2, 3, 5, 8};
    static constexpr std::int32_t max_chain = 8; // occurrences looked at for one n-gram

    using Keys = std::array<std::uint64_t, lengths.size()>; // of the n-grams that a text ends with

    Keys keys_of(const std::int32_t *tail, std::size_t n) const;
    std::int32_t match_length(const std::int32_t *tail, std::size_t n, std::int32_t end) const;

    std::vector<std::int32_t> text_;
    std::array<HashIndex<std::int32_t>, lengths.size()> newest_;    // n-gram -> end, exclusive
    std::array<std::vector<std::int32_t>, lengths.size()> earlier_; // [end] the one before it
};

// Of a sequence of tokens; n takes part, so that 1-grams and 2-grams do not meet.
std::uint64_t hash_tokens(const std::int32_t *tokens, std::size_t n);

} // namespace esp
