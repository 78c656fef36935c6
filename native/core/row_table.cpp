#include "core/row_table.hpp"

#include <algorithm>

namespace esp {

void RowTable::clear() {
    rows_.clear();
    index_.clear();
    n_learned_ = 0;
}

void RowTable::learn(const std::int32_t *tail, std::size_t n, const Row &row) {
    const std::uint32_t number = n_learned_++;
    if (rows_.size() < capacity) {
        rows_.push_back(row);
    } else {
        rows_[number % capacity] = row;
    }
    const Keys keys = keys_of(tail, n);
    for (std::size_t k = 1; k <= std::min(n, max_context); ++k) {
        index_.at(keys[k - 1]) = number;
    }
    if (index_.size() > 2 * max_context * static_cast<std::size_t>(capacity)) {
        index_.erase_if([this](std::uint32_t row_number) { return n_learned_ - row_number > capacity; });
    }
}

RowTable::Keys RowTable::keys_of(const std::int32_t *tail, std::size_t n) const {
    Keys keys{};
    for (std::size_t k = 1; k <= std::min(n, max_context); ++k) {
        keys[k - 1] = hash_tokens(tail + (n - k), k);
        index_.prefetch(keys[k - 1]);
    }
    return keys;
}

const Row *RowTable::at(std::uint64_t key) const {
    const std::uint32_t *number = index_.find(key);
    return number == nullptr || n_learned_ - *number > capacity ? nullptr : &rows_[*number % capacity];
}

RowTable::Found RowTable::find(const std::int32_t *tail, std::size_t n) const {
    Found found;
    const Keys keys = keys_of(tail, n);
    for (std::size_t k = std::min(n, max_context); k > 0; --k) {
        const Row *row = at(keys[k - 1]);
        if (row == nullptr) {
            continue;
        }
        if (found.row == nullptr) {
            found.row = row;
            found.context = k;
            k = std::min<std::size_t>(k, 2); // next: the last token alone
        } else if (row != found.row) {
            found.shorter = row;
        }
    }
    return found;
}

} // namespace esp
