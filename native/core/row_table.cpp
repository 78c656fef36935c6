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
    for (std::size_t k = 1; k <= std::min(n, max_context); ++k) {
        index_[hash_tokens(tail + (n - k), k)] = number;
    }
    if (index_.size() > 2 * max_context * static_cast<std::size_t>(capacity)) {
        drop_stale();
    }
}

void RowTable::drop_stale() {
    for (auto it = index_.begin(); it != index_.end();) {
        it = n_learned_ - it->second > capacity ? index_.erase(it) : std::next(it);
    }
}

const Row *RowTable::at(const std::int32_t *tail, std::size_t n) const {
    const auto found = index_.find(hash_tokens(tail, n));
    if (found == index_.end() || n_learned_ - found->second > capacity) {
        return nullptr;
    }
    return &rows_[found->second % capacity];
}

RowTable::Found RowTable::find(const std::int32_t *tail, std::size_t n) const {
    Found found;
    for (std::size_t k = std::min(n, max_context); k > 0; --k) {
        const Row *row = at(tail + (n - k), k);
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
