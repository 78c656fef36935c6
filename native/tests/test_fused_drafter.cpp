// The tree of all sources: inside its budget, of the size that is worth most, never harmed by what it is fed.

#include "check.hpp"
#include "core/fused_drafter.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace {

using Ints = std::vector<std::int32_t>;
using esp::FusedDrafter;
using esp::PassBudget;
using esp::PlannedTree;

constexpr std::size_t width = 6;

// A drafter that has been through random passes over a small vocabulary.
class Driver {
  public:
    explicit Driver(unsigned seed, std::size_t n_slots = 1) : random_(seed), n_slots_(n_slots) {
        Ints prompt(5 + random_() % 30);
        std::generate(prompt.begin(), prompt.end(), [this] { return token(); });
        drafter.begin(prompt.data(), prompt.size(), false);
        root_ = prompt.back();
        for (int i = 0; i < 20; ++i) {
            PassBudget budget;
            budget.rows = 12;
            budget.depth = 6;
            budget.sequences = 12;
            budget.masks = static_cast<std::int32_t>(n_slots_);
            pass(drafter.draft(budget));
        }
    }

    // Accepts along a random path.
    void pass(const PlannedTree &tree) {
        const std::size_t n = tree.tokens.size();
        Ints path;
        std::int32_t at = 0;
        for (std::size_t i = 1; i < n; ++i) {
            if (tree.parents[i] == at && random_() % 2 == 0) {
                at = static_cast<std::int32_t>(i);
                path.push_back(at);
            }
        }
        Ints ids;
        std::vector<float> logprobs;
        rows(n, ids, logprobs);
        Ints mask_ids;
        std::vector<float> mask_logprobs;
        const std::size_t slots = tree.masks[static_cast<std::size_t>(at)] > 0 ? n_slots_ : 0;
        rows(slots, mask_ids, mask_logprobs);
        FusedDrafter::Pass seen;
        seen.tokens = tree.tokens.data();
        seen.parents = tree.parents.data();
        seen.n_nodes = n;
        seen.path = path.data();
        seen.n_path = path.size();
        seen.bonus = root_ = token();
        seen.ids = ids.data();
        seen.logprobs = logprobs.data();
        seen.width = width;
        seen.mask_ids = mask_ids.data();
        seen.mask_logprobs = mask_logprobs.data();
        seen.n_slots = slots;
        seen.mask_width = width;
        drafter.observe(seen);
    }

    std::int32_t root() const { return root_; }
    FusedDrafter drafter;

  private:
    std::int32_t token() { return static_cast<std::int32_t>(random_() % 12); }
    void rows(std::size_t n, Ints &ids, std::vector<float> &logprobs) {
        for (std::size_t i = 0; i < n; ++i) {
            const std::int32_t first = token();
            for (std::size_t j = 0; j < width; ++j) {
                ids.push_back((first + static_cast<std::int32_t>(j)) % 12);
                logprobs.push_back(-0.4f - 0.7f * static_cast<float>(j));
            }
        }
    }

    std::mt19937 random_;
    std::size_t n_slots_;
    std::int32_t root_ = 0;
};

std::int32_t n_rows(const PlannedTree &tree) {
    std::int32_t n = static_cast<std::int32_t>(tree.tokens.size());
    for (const std::int32_t masks : tree.masks) {
        n += masks;
    }
    return n;
}

void check_tree(const PlannedTree &tree, const PassBudget &budget, std::int32_t root) {
    const std::size_t n = tree.tokens.size();
    CHECK(n >= 1 && tree.tokens[0] == root && tree.parents[0] == -1);
    CHECK(tree.parents.size() == n && tree.masks.size() == n && tree.probs.size() == n && tree.sources.size() == n);
    CHECK(n_rows(tree) <= budget.rows);
    Ints depth(n, 0);
    std::set<std::pair<std::int32_t, std::int32_t>> edges;
    std::vector<bool> is_leaf(n, true);
    std::vector<float> below(n, 0.0f);
    double expected = 1.0;
    for (std::size_t i = 1; i < n; ++i) {
        CHECK(tree.parents[i] >= 0 && tree.parents[i] < static_cast<std::int32_t>(i));
        const auto parent = static_cast<std::size_t>(tree.parents[i]);
        depth[i] = depth[parent] + 1;
        is_leaf[parent] = false;
        below[parent] += tree.probs[i];
        expected += static_cast<double>(tree.probs[i]);
        CHECK(depth[i] + tree.masks[i] <= std::max(budget.depth, depth[i]));
        CHECK(depth[i] <= budget.depth);
        CHECK(edges.insert({tree.parents[i], tree.tokens[i]}).second);
        CHECK(tree.sources[i] != esp::Source::none);
    }
    std::int32_t sequences = 0;
    for (std::size_t i = 0; i < n; ++i) {
        CHECK(below[i] <= tree.probs[i]); // children exclude each other
        sequences += is_leaf[i] || tree.masks[i] > 0 ? 1 : 0;
    }
    CHECK(sequences <= budget.sequences);
    CHECK(std::abs(expected - tree.expected) < 1e-4);
}

void trees_keep_the_budget() {
    for (unsigned seed = 0; seed < 40; ++seed) {
        Driver driver(seed, 1 + seed % 2);
        std::mt19937 random(seed);
        for (int i = 0; i < 20; ++i) {
            PassBudget budget;
            budget.rows = 1 + static_cast<std::int32_t>(random() % 60);
            budget.depth = static_cast<std::int32_t>(random() % 8);
            budget.sequences = 1 + static_cast<std::int32_t>(random() % 20);
            budget.masks = static_cast<std::int32_t>(random() % 3);
            const PlannedTree tree = driver.drafter.draft(budget);
            check_tree(tree, budget, driver.root());
        }
    }
}

// With the costs of a device the tree is the prefix that is worth most, found here by trying all.
void the_size_is_worth_most() {
    for (unsigned seed = 0; seed < 60; ++seed) {
        Driver driver(seed);
        std::mt19937 random(seed);
        PassBudget budget;
        budget.rows = 24;
        budget.depth = 8;
        budget.sequences = 24;
        std::vector<float> probs = driver.drafter.draft(budget).probs; // all 24 nodes: rows are free
        std::sort(probs.rbegin(), probs.rend());
        std::vector<float> cost(24);
        float ms = 1.0f;
        for (float &value : cost) { // stairs
            value = ms;
            ms += random() % 3 == 0 ? 0.2f * static_cast<float>(random() % 5) : 0.0f;
        }
        budget.cost = cost.data();
        budget.n_cost = cost.size();
        budget.price = 0.2 + 0.1 * static_cast<double>(random() % 10);
        double best = -1e9, total = 0.0;
        for (std::size_t m = 1; m <= probs.size(); ++m) {
            total += static_cast<double>(probs[m - 1]);
            best = std::max(best, total - budget.price * static_cast<double>(cost[m - 1]));
        }
        const PlannedTree tree = driver.drafter.draft(budget);
        const double value = tree.expected - budget.price * static_cast<double>(cost[tree.tokens.size() - 1]);
        CHECK(value > best - 1e-4);
    }
}

void dear_rows_mean_plain_decoding() {
    Driver driver(3);
    std::vector<float> cost;
    for (int n = 1; n <= 20; ++n) {
        cost.push_back(static_cast<float>(n));
    }
    PassBudget budget;
    budget.rows = 20;
    budget.depth = 8;
    budget.sequences = 20;
    budget.masks = 1;
    budget.cost = cost.data();
    budget.n_cost = cost.size();
    budget.price = 1.0; // a second row would have to bring a whole token
    CHECK(n_rows(driver.drafter.draft(budget)) == 1);
}

void masks_stand_where_a_path_may_end() {
    Driver driver(4);
    driver.drafter.set_mask_gain(0.5, true);
    PassBudget budget;
    budget.rows = 20;
    budget.depth = 8;
    budget.sequences = 20;
    budget.masks = 1;
    const PlannedTree tree = driver.drafter.draft(budget);
    CHECK(n_rows(tree) == 20);
    CHECK(std::count(tree.masks.begin(), tree.masks.end(), 1) >= 2);
    driver.drafter.set_mask_gain(0.0, true);
    const PlannedTree without = driver.drafter.draft(budget);
    CHECK(without.tokens.size() == 20);
}

// A text that repeats itself is drafted whole, and sources that are switched off propose nothing.
void a_repeated_text_becomes_a_chain() {
    FusedDrafter drafter;
    Ints prompt;
    for (int i = 0; i < 40; ++i) {
        prompt.push_back(i % 10);
    }
    drafter.begin(prompt.data(), prompt.size(), false);
    PassBudget budget;
    budget.rows = 6;
    budget.depth = 5;
    budget.sequences = 6;
    const PlannedTree tree = drafter.draft(budget);
    CHECK((tree.tokens == Ints{9, 0, 1, 2, 3, 4}));
    CHECK(tree.sources[1] == esp::Source::suffix);
    drafter.sources() = {false, true, true, true};
    CHECK(drafter.draft(budget).tokens.size() == 1);
}

void an_expected_text_is_copied() {
    FusedDrafter drafter;
    const Ints prompt = {1, 2, 3};
    const Ints expected = {2, 3, 50, 51, 52};
    drafter.begin(prompt.data(), prompt.size(), false);
    PassBudget budget;
    budget.rows = 4;
    budget.depth = 3;
    budget.sequences = 4;
    CHECK(drafter.draft(budget).tokens.size() == 1);
    drafter.begin(prompt.data(), prompt.size(), false, expected.data(), expected.size());
    CHECK((drafter.draft(budget).tokens == Ints{3, 50, 51, 52}));
}

void what_was_learned_is_kept_on_demand() {
    for (const bool keep : {false, true}) {
        FusedDrafter drafter;
        const Ints first = {1, 2, 3, 4, 5, 6}, second = {9, 2, 3};
        drafter.begin(first.data(), first.size(), keep);
        drafter.begin(second.data(), second.size(), keep);
        PassBudget budget;
        budget.rows = 3;
        budget.depth = 2;
        budget.sequences = 3;
        CHECK((drafter.draft(budget).tokens.size() == 3) == keep);
    }
}

} // namespace

int main() {
    trees_keep_the_budget();
    the_size_is_worth_most();
    dear_rows_mean_plain_decoding();
    masks_stand_where_a_path_may_end();
    a_repeated_text_becomes_a_chain();
    an_expected_text_is_copied();
    what_was_learned_is_kept_on_demand();
    return check::failures;
}
