// The layout of a pass: a worked example, visibility against the definition by ancestors, and refused input.

#include "check.hpp"
#include "core/tree_layout.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace {

using Ints = std::vector<std::int32_t>;

struct Tree {
    Ints parents;
    Ints masks;
};

esp::TreeLayout build(const Tree &tree) {
    return esp::TreeLayout::build(tree.parents.data(), tree.masks.data(), tree.parents.size());
}

Ints sequences(const esp::TreeLayout &layout, std::int32_t row) {
    const auto r = static_cast<std::size_t>(row);
    return Ints(layout.seq_ids.begin() + layout.seq_offset[r], layout.seq_ids.begin() + layout.seq_offset[r + 1]);
}

// What llama.cpp does: the row looks through its first sequence and never at a later position.
bool visible(const esp::TreeLayout &layout, std::int32_t row, std::int32_t cell) {
    const Ints set = sequences(layout, cell);
    return std::count(set.begin(), set.end(), layout.first_sequence(row)) > 0 &&
           layout.depth[static_cast<std::size_t>(cell)] <= layout.depth[static_cast<std::size_t>(row)];
}

// What a tree means: a node sees itself and its ancestors; a mask sees what its owner sees, the owner's masks before it
// and itself.
std::vector<std::set<std::int32_t>> seen_by_definition(const Tree &tree) {
    std::vector<std::set<std::int32_t>> seen;
    for (std::size_t node = 0; node < tree.parents.size(); ++node) {
        std::set<std::int32_t> rows;
        if (node > 0) {
            rows = seen[static_cast<std::size_t>(tree.parents[node])];
        }
        rows.insert(static_cast<std::int32_t>(node));
        seen.push_back(rows);
    }
    for (std::size_t owner = 0; owner < tree.parents.size(); ++owner) {
        std::set<std::int32_t> rows = seen[owner];
        for (std::int32_t j = 0; j < tree.masks[owner]; ++j) {
            rows.insert(static_cast<std::int32_t>(seen.size()));
            seen.push_back(rows);
        }
    }
    return seen;
}

Tree random_tree(std::mt19937 &rng) {
    const int n = std::uniform_int_distribution<int>(1, 40)(rng);
    const int most_masks = std::uniform_int_distribution<int>(0, 3)(rng);
    Tree tree;
    for (int node = 0; node < n; ++node) {
        tree.parents.push_back(node == 0 ? -1 : std::uniform_int_distribution<int>(0, node - 1)(rng));
        tree.masks.push_back(std::uniform_int_distribution<int>(0, most_masks)(rng));
    }
    return tree;
}

// node 0, the root (one mask: row 4)
//   node 1
//     node 3
//   node 2 (two masks: rows 5 and 6)
//
// Sequences: 0 = owner 0, 1 = owner 2, 2 = leaf 3. Node 1 owns none and looks through that of node 3.
void worked_example() {
    const esp::TreeLayout layout = build({{-1, 0, 0, 1}, {1, 0, 2, 0}});
    CHECK(layout.n_nodes == 4);
    CHECK(layout.n_rows() == 7);
    CHECK(layout.n_sequences == 3);
    CHECK(layout.depth == (Ints{0, 1, 1, 2, 1, 2, 3}));
    CHECK(layout.seq_offset == (Ints{0, 3, 4, 5, 6, 7, 8, 9}));
    CHECK(layout.seq_ids == (Ints{0, 1, 2, 2, 1, 2, 0, 1, 1}));
}

void a_root_alone() {
    const esp::TreeLayout layout = build({{-1}, {0}});
    CHECK(layout.n_rows() == 1);
    CHECK(layout.n_sequences == 1);
    CHECK(layout.seq_ids == (Ints{0}));
}

void rows_see_what_the_tree_says() {
    std::mt19937 rng(3);
    for (int round = 0; round < 300; ++round) {
        const Tree tree = random_tree(rng);
        const esp::TreeLayout layout = build(tree);
        const auto seen = seen_by_definition(tree);
        bool same = layout.n_rows() == static_cast<std::int32_t>(seen.size());
        for (std::int32_t row = 0; same && row < layout.n_rows(); ++row) {
            for (std::int32_t cell = 0; cell < layout.n_rows(); ++cell) {
                same = same && visible(layout, row, cell) == (seen[static_cast<std::size_t>(row)].count(cell) > 0);
            }
        }
        CHECK(same);
    }
}

void no_row_is_in_a_sequence_twice() {
    std::mt19937 rng(4);
    for (int round = 0; round < 100; ++round) {
        const esp::TreeLayout layout = build(random_tree(rng));
        for (std::int32_t row = 0; row < layout.n_rows(); ++row) {
            const Ints list = sequences(layout, row);
            CHECK(std::set<std::int32_t>(list.begin(), list.end()).size() == list.size());
        }
        CHECK(sequences(layout, 0).size() == static_cast<std::size_t>(layout.n_sequences));
    }
}

void bad_trees_are_refused() {
    const auto refused = [](Ints parents, Ints masks) {
        return check::throws<std::invalid_argument>([&] { build({parents, masks}); });
    };
    CHECK(refused({}, {}));
    CHECK(refused({0}, {0}));
    CHECK(refused({-1, -1}, {0, 0}));
    CHECK(refused({-1, 1}, {0, 0}));
    CHECK(refused({-1, 2, 0}, {0, 0, 0}));
    CHECK(refused({-1, 0}, {0, -1}));
}

// The root owns no mask here, so every sequence is that of a leaf.
void at_most_256_sequences() {
    Tree star{Ints(1 + esp::max_sequences, 0), Ints(1 + esp::max_sequences, 0)};
    star.parents[0] = -1;
    CHECK(build(star).n_sequences == esp::max_sequences);
    star.masks[0] = 1;
    CHECK(check::throws<std::invalid_argument>([&] { build(star); }));
}

void rows_of_the_caller() {
    const esp::TreeLayout layout = esp::TreeLayout::from_rows({0, 1, 1}, {0, 2, 3, 4}, {0, 1, 1, 0}, 2);
    CHECK(layout.n_nodes == 2);
    CHECK(layout.n_rows() == 3);
    CHECK(layout.n_sequences == 2);
    CHECK(layout.first_sequence(1) == 1);
}

void bad_rows_are_refused() {
    const auto refused = [](Ints depth, Ints offset, Ints ids, std::int32_t n_nodes) {
        return check::throws<std::invalid_argument>([&] { esp::TreeLayout::from_rows(depth, offset, ids, n_nodes); });
    };
    CHECK(refused({}, {0}, {}, 0));                     // no root
    CHECK(refused({0}, {0, 1}, {0}, 0));                // no root
    CHECK(refused({0}, {0, 1}, {0}, 2));                // more nodes than rows
    CHECK(refused({0, 1}, {0, 1}, {0}, 1));             // an offset is missing
    CHECK(refused({0}, {}, {}, 1));                     // offsets are missing
    CHECK(refused({0}, {1, 1}, {0}, 1));                // does not start at 0
    CHECK(refused({0}, {0, 2}, {0}, 1));                // ends behind the ids
    CHECK(refused({0, 1}, {0, 1, 1}, {0}, 1));          // a row without a sequence
    CHECK(refused({0, 1, 1}, {0, 2, 1, 2}, {0, 0}, 1)); // offsets go back
    CHECK(refused({0, -1}, {0, 1, 2}, {0, 0}, 1));      // negative depth
    CHECK(refused({1}, {0, 1}, {0}, 1));                // the root is not at depth 0
    CHECK(refused({0}, {0, 1}, {256}, 1));
    CHECK(refused({0}, {0, 1}, {-1}, 1));
}

} // namespace

int main() {
    worked_example();
    a_root_alone();
    rows_see_what_the_tree_says();
    no_row_is_in_a_sequence_twice();
    bad_trees_are_refused();
    at_most_256_sequences();
    rows_of_the_caller();
    bad_rows_are_refused();
    return check::failures;
}
