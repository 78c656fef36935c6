#include "core/tree_layout.hpp"

#include <algorithm>
#include <bitset>
#include <stdexcept>

namespace esp {

namespace {

using Set = std::bitset<max_sequences>;

void check_tree(const std::int32_t *parents, const std::int32_t *masks, std::size_t n) {
    if (n == 0 || parents[0] != -1) {
        throw std::invalid_argument("a tree needs a root with parent -1");
    }
    for (std::size_t i = 0; i < n; ++i) {
        if (i > 0 && (parents[i] < 0 || static_cast<std::size_t>(parents[i]) >= i)) {
            throw std::invalid_argument("every parent must precede its child");
        }
        if (masks[i] < 0) {
            throw std::invalid_argument("a node cannot have a negative number of masks");
        }
    }
}

// own[i] = the sequence of node i, or -1. Returns the number of sequences.
std::int32_t assign_sequences(const std::int32_t *parents, const std::int32_t *masks, std::size_t n,
                              std::vector<std::int32_t> &own) {
    std::vector<bool> is_leaf(n, true);
    for (std::size_t i = 1; i < n; ++i) {
        is_leaf[static_cast<std::size_t>(parents[i])] = false;
    }
    std::int32_t next = 0;
    own.assign(n, -1);
    for (std::size_t i = 0; i < n; ++i) {
        if (is_leaf[i] || masks[i] > 0) {
            own[i] = next++;
        }
    }
    if (next > max_sequences) {
        throw std::invalid_argument("the tree needs more than 256 sequences (owners and leaves)");
    }
    return next;
}

void push_row(TreeLayout &layout, std::int32_t depth, const Set &set, std::int32_t first) {
    layout.depth.push_back(depth);
    if (first >= 0) {
        layout.seq_ids.push_back(first);
    }
    for (std::int32_t s = 0; s < layout.n_sequences; ++s) {
        if (s != first && set.test(static_cast<std::size_t>(s))) {
            layout.seq_ids.push_back(s);
        }
    }
    layout.seq_offset.push_back(static_cast<std::int32_t>(layout.seq_ids.size()));
}

} // namespace

TreeLayout TreeLayout::build(const std::int32_t *parents, const std::int32_t *masks, std::size_t n) {
    check_tree(parents, masks, n);
    std::vector<std::int32_t> own;
    TreeLayout layout;
    layout.n_nodes = static_cast<std::int32_t>(n);
    layout.n_sequences = assign_sequences(parents, masks, n, own);

    std::vector<Set> sets(n);
    std::vector<std::int32_t> depth(n, 0);
    for (std::size_t i = 1; i < n; ++i) {
        depth[i] = depth[static_cast<std::size_t>(parents[i])] + 1;
    }
    for (std::size_t i = n; i-- > 0;) {
        if (own[i] >= 0) {
            sets[i].set(static_cast<std::size_t>(own[i]));
        }
        if (i > 0) {
            sets[static_cast<std::size_t>(parents[i])] |= sets[i];
        }
    }

    layout.seq_offset.push_back(0);
    for (std::size_t i = 0; i < n; ++i) {
        push_row(layout, depth[i], sets[i], own[i]);
    }
    for (std::size_t i = 0; i < n; ++i) {
        for (std::int32_t j = 0; j < masks[i]; ++j) {
            push_row(layout, depth[i] + 1 + j, Set(), own[i]);
        }
    }
    return layout;
}

TreeLayout TreeLayout::from_rows(std::vector<std::int32_t> depth, std::vector<std::int32_t> seq_offset,
                                 std::vector<std::int32_t> seq_ids, std::int32_t n_nodes) {
    const std::size_t n = depth.size();
    if (n_nodes < 1 || static_cast<std::size_t>(n_nodes) > n || seq_offset.size() != n + 1 || seq_offset.front() != 0 ||
        static_cast<std::size_t>(seq_offset.back()) != seq_ids.size()) {
        throw std::invalid_argument("row arrays do not belong together");
    }
    for (std::size_t i = 0; i < n; ++i) {
        if (seq_offset[i + 1] <= seq_offset[i] || depth[i] < 0 || (i == 0 && depth[i] != 0)) {
            throw std::invalid_argument("every row needs a sequence and a depth, the root depth 0");
        }
    }
    std::int32_t highest = -1;
    for (const std::int32_t s : seq_ids) {
        if (s < 0 || s >= max_sequences) {
            throw std::invalid_argument("sequence ids must be between 0 and 255");
        }
        highest = std::max(highest, s);
    }
    TreeLayout layout;
    layout.depth = std::move(depth);
    layout.seq_offset = std::move(seq_offset);
    layout.seq_ids = std::move(seq_ids);
    layout.n_nodes = n_nodes;
    layout.n_sequences = highest + 1;
    return layout;
}

} // namespace esp
