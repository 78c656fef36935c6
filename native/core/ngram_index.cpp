#include "core/ngram_index.hpp"

#include <algorithm>

namespace esp {

std::uint64_t hash_tokens(const std::int32_t *tokens, std::size_t n) {
    std::uint64_t h = 0x9e3779b97f4a7c15ULL * (n + 1);
    for (std::size_t i = 0; i < n; ++i) {
        h ^= static_cast<std::uint32_t>(tokens[i]);
        h *= 0xff51afd7ed558ccdULL;
        h ^= h >> 32;
    }
    return h;
}

void NgramIndex::clear() {
    text_.clear();
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        newest_[i].clear();
        earlier_[i].assign(1, 0);
    }
}

void NgramIndex::append(std::int32_t token) {
    text_.push_back(token);
    const auto end = static_cast<std::int32_t>(text_.size());
    const Keys keys = keys_of(text_.data(), text_.size());
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        earlier_[i].resize(static_cast<std::size_t>(end) + 1, 0);
        if (lengths[i] > end) {
            continue;
        }
        std::int32_t &last = newest_[i].at(keys[i]);
        earlier_[i][static_cast<std::size_t>(end)] = last; // 0 where there is none: nothing ends at 0
        last = end;
    }
}

NgramIndex::Keys NgramIndex::keys_of(const std::int32_t *tail, std::size_t n) const {
    Keys keys{};
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        const auto gram = static_cast<std::size_t>(lengths[i]);
        if (gram <= n) {
            keys[i] = hash_tokens(tail + (n - gram), gram);
            newest_[i].prefetch(keys[i]);
        }
    }
    return keys;
}

std::int32_t NgramIndex::match_length(const std::int32_t *tail, std::size_t n, std::int32_t end) const {
    const std::int32_t most = std::min({static_cast<std::int32_t>(n), end, max_match});
    std::int32_t length = 0;
    while (length < most && text_[static_cast<std::size_t>(end - 1 - length)] == tail[n - 1 - length] &&
           tail[n - 1 - length] >= 0) {
        ++length;
    }
    return length;
}

void NgramIndex::copies(const std::int32_t *tail, std::size_t n, std::vector<Copy> &out) const {
    out.clear();
    const auto size = static_cast<std::int32_t>(text_.size());
    const Keys keys = keys_of(tail, n);
    for (std::size_t i = lengths.size(); i-- > 0 && out.size() < max_copies;) {
        const std::int32_t *newest = static_cast<std::size_t>(lengths[i]) <= n ? newest_[i].find(keys[i]) : nullptr;
        if (newest == nullptr) {
            continue;
        }
        const std::size_t first = out.size(); // copies found with a longer n-gram are settled
        std::int32_t seen = 0;
        std::int32_t end = *newest;
        for (std::int32_t step = 0; step < max_chain && end > 0;
             ++step, end = earlier_[i][static_cast<std::size_t>(end)]) {
            if (end >= size || text_[static_cast<std::size_t>(end)] < 0) {
                continue; // the end of the text itself: nothing followed yet
            }
            const std::int32_t length = match_length(tail, n, end);
            if (length < lengths[i]) {
                continue; // two n-grams of one hash
            }
            ++seen;
            const std::int32_t token = text_[static_cast<std::size_t>(end)];
            const auto known = std::find_if(out.begin(), out.end(), [&](const Copy &c) { return c.token == token; });
            if (known == out.end()) {
                if (out.size() < max_copies) {
                    out.push_back({token, length, 0, 1});
                }
            } else if (static_cast<std::size_t>(known - out.begin()) >= first) {
                known->length = std::max(known->length, length);
                ++known->agree;
            }
        }
        for (std::size_t j = first; j < out.size(); ++j) {
            out[j].seen = seen;
        }
    }
    std::stable_sort(out.begin(), out.end(), [](const Copy &a, const Copy &b) { return a.length > b.length; });
}

} // namespace esp
