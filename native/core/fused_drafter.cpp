#include "core/fused_drafter.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>

namespace esp {

namespace {

constexpr std::size_t tail_length = 32;
constexpr std::size_t last_width = 16;
constexpr double least_prob = 1e-4;         // of a path, below which nothing is kept for later
constexpr std::size_t most_text = 1U << 17; // tokens of a session after which its texts are forgotten
constexpr double gain_memory = 0.95;
constexpr std::uint32_t gain_every = 8; // drafts between two estimates of what masks bring

struct Open { // a candidate that is not a node yet
    double prob;
    std::int32_t parent;
    std::int32_t token;
    Source source;
    bool operator<(const Open &other) const { return prob < other.prob; }
};

// Indices by falling value; ties keep their order.
std::vector<std::int32_t> likeliest(const std::vector<double> &values) {
    std::vector<std::int32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
    });
    return order;
}

} // namespace

void FusedDrafter::begin(const std::int32_t *tokens, std::size_t n, bool keep, const std::int32_t *expected,
                         std::size_t n_expected) {
    if (!keep || index_.text().size() + n + n_expected > most_text) {
        index_.clear();
        rows_.clear();
        n_texts_ = 0;
    }
    if (n_expected > 0) {
        append_text(expected, n_expected);
    }
    append_text(tokens, n);
    for (std::size_t slot = 0; slot < max_slots; ++slot) {
        mask_ids_[slot].clear();
        mask_logprobs_[slot].clear();
    }
    last_ids_.clear();
    last_logprobs_.clear();
    position_ = static_cast<std::int32_t>(n) - 1;
}

void FusedDrafter::append_text(const std::int32_t *tokens, std::size_t n) {
    index_.append(-(++n_texts_)); // a separator of its own: no match runs across
    for (std::size_t i = 0; i < n; ++i) {
        index_.append(tokens[i]);
    }
}

void FusedDrafter::remember(const std::int32_t *ids, const float *logprobs, std::size_t width) {
    Row row;
    row.n = static_cast<std::int32_t>(std::min(width, Row::width));
    std::copy_n(ids, row.n, row.ids.begin());
    std::copy_n(logprobs, row.n, row.logprobs.begin());
    rows_.learn(tail_.data(), tail_.size(), row);
}

void FusedDrafter::learn_prompt(std::size_t first, const std::int32_t *ids, const float *logprobs, std::size_t n,
                                std::size_t width) {
    const std::vector<std::int32_t> &text = index_.text();
    const std::size_t start = text.size() - static_cast<std::size_t>(position_ + 1);
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t end = start + first + i + 1;
        const std::size_t from = end - std::min(end - start, RowTable::max_context);
        tail_.assign(text.begin() + static_cast<std::ptrdiff_t>(from), text.begin() + static_cast<std::ptrdiff_t>(end));
        remember(ids + i * width, logprobs + i * width, width);
    }
}

void FusedDrafter::tail_of(const std::vector<std::int32_t> &path) {
    const std::vector<std::int32_t> &text = index_.text();
    tail_.assign(text.end() - static_cast<std::ptrdiff_t>(std::min(text.size(), tail_length)), text.end());
    tail_.insert(tail_.end(), path.begin(), path.end());
}

void FusedDrafter::gather(const std::int32_t *tail, std::size_t n, std::int32_t depth, bool probed, Evidence &e) {
    copies_.clear();
    if (sources_.suffix) {
        index_.copies(tail, n, copies_);
    }
    e.copies = &copies_;
    e.rows = sources_.adjacency ? rows_.find(tail, n) : RowTable::Found{};
    e.depth = depth;
    e.parent = n > 0 ? tail[n - 1] : -1;
    e.mask = {};
    e.mask_slot = depth;
    const auto slot = static_cast<std::size_t>(depth - 1);
    if (sources_.esp && probed && slot < max_slots && !mask_ids_[slot].empty()) {
        e.mask = {mask_ids_[slot].data(), mask_logprobs_[slot].data(), mask_ids_[slot].size()};
    }
    e.last = {};
    if (sources_.last && depth == 1) {
        e.last = {last_ids_.data(), last_logprobs_.data(), last_ids_.size()};
    }
    e.temperature = temperature_;
    e.seed = seed_;
    e.position = static_cast<std::uint64_t>(position_ + depth);
}

std::int32_t PassBudget::slots() const {
    return std::clamp(masks, 0, static_cast<std::int32_t>(FusedDrafter::max_slots));
}

std::int32_t PassBudget::most_rows() const {
    return n_cost > 0 ? std::min(rows, static_cast<std::int32_t>(n_cost)) : rows;
}

double PassBudget::price_of(std::int32_t n) const {
    return n_cost > 0 ? price * static_cast<double>(cost[n - 1]) : 0.0;
}

// Whether a tree that goes on with nodes of at most this probability can still be worth more than the best so far.
bool FusedDrafter::can_pay(const PassBudget &budget, double prob, double total, double best) const {
    const auto n = static_cast<std::int32_t>(nodes_.size());
    const double masks = sources_.esp && budget.masks > 0 ? mask_gain_ : 0.0;
    for (std::int32_t m = n + 1; m <= budget.most_rows(); ++m) {
        if (total + masks + prob * (m - n) - budget.price_of(m) > best) {
            return true;
        }
    }
    return false;
}

// Best-first: nodes_ in the order of their probability, so that every prefix is the best tree of its size.
void FusedDrafter::grow(const PassBudget &budget, bool probed) {
    nodes_.clear();
    nodes_.push_back({index_.text().back(), -1, 0, 1.0f, Source::none});
    std::priority_queue<Open> open;
    std::vector<std::int32_t> path;
    Evidence evidence;
    double total = 1.0, best = 1.0 - budget.price_of(1);
    for (std::int32_t node = 0;; ++node) {
        const Node here = nodes_[static_cast<std::size_t>(node)];
        if (here.depth < budget.depth) {
            path.clear();
            for (std::int32_t at = node; at > 0; at = nodes_[static_cast<std::size_t>(at)].parent) {
                path.push_back(nodes_[static_cast<std::size_t>(at)].token);
            }
            std::reverse(path.begin(), path.end());
            tail_of(path);
            gather(tail_.data(), tail_.size(), here.depth + 1, probed, evidence);
            model_.rate(evidence, candidates_);
            for (const Candidate &x : candidates_) {
                const double prob = static_cast<double>(here.prob) * static_cast<double>(x.prob);
                if (prob < least_prob) {
                    break;
                }
                open.push({prob, node, x.token, x.source});
            }
        }
        if (open.empty() || static_cast<std::int32_t>(nodes_.size()) >= budget.most_rows()) {
            return;
        }
        const Open next = open.top();
        if (!can_pay(budget, next.prob, total, best)) {
            return;
        }
        open.pop();
        nodes_.push_back({next.token, next.parent, nodes_[static_cast<std::size_t>(next.parent)].depth + 1,
                          static_cast<float>(next.prob), next.source});
        total += next.prob;
        best = std::max(best, total - budget.price_of(static_cast<std::int32_t>(nodes_.size())));
    }
}

// What masks bring: the tokens that are expected with what they said less those without it, averaged.
void FusedDrafter::update_mask_gain(const PassBudget &budget) {
    const auto expected = [this, &budget](bool probed) {
        grow(budget, probed);
        return std::accumulate(nodes_.begin(), nodes_.end(), 0.0,
                               [](double sum, const Node &node) { return sum + static_cast<double>(node.prob); });
    };
    const double gain = expected(true) - expected(false);
    mask_gain_ = gain_memory * mask_gain_ + (1.0 - gain_memory) * std::max(0.0, gain);
}

PlannedTree FusedDrafter::draft(const PassBudget &budget) {
    const bool probed = sources_.esp && !mask_ids_[0].empty();
    if (probed && !fixed_gain_ && ++n_drafts_ % gain_every == 0) {
        update_mask_gain(budget);
    }
    grow(budget, true);
    const Choice best = choose(budget);
    std::vector<std::int32_t> masks(best.nodes, 0);
    if (best.owners > 0) {
        const std::vector<std::int32_t> owners = likeliest(ends_of(best.nodes));
        for (std::int32_t i = 0; i < best.owners; ++i) {
            masks[static_cast<std::size_t>(owners[static_cast<std::size_t>(i)])] = budget.slots();
        }
    }
    PlannedTree tree;
    order(masks, best.nodes, tree);
    tree.expected = 0.0;
    for (std::size_t i = 0; i < best.nodes; ++i) {
        tree.expected += static_cast<double>(nodes_[i].prob);
    }
    return tree;
}

// For each of the first n nodes, that it is the deepest accepted one.
std::vector<double> FusedDrafter::ends_of(std::size_t n) const {
    std::vector<double> ends(n, 0.0);
    for (std::size_t i = 0; i < n; ++i) {
        ends[i] += static_cast<double>(nodes_[i].prob);
        if (nodes_[i].parent >= 0) {
            ends[static_cast<std::size_t>(nodes_[i].parent)] -= static_cast<double>(nodes_[i].prob);
        }
    }
    return ends;
}

// Every prefix of nodes_, with masks behind its likeliest ends: the one that is worth most.
FusedDrafter::Choice FusedDrafter::choose(const PassBudget &budget) const {
    Choice best;
    std::vector<double> ends;
    std::vector<std::int32_t> n_children(nodes_.size(), 0);
    double total = 0.0;
    std::int32_t leaves = 0;
    for (std::size_t n = 1; n <= nodes_.size(); ++n) {
        const Node &added = nodes_[n - 1];
        total += static_cast<double>(added.prob);
        ends.push_back(static_cast<double>(added.prob));
        ++leaves;
        if (added.parent >= 0) {
            const auto parent = static_cast<std::size_t>(added.parent);
            ends[parent] -= static_cast<double>(added.prob);
            leaves -= n_children[parent]++ == 0 ? 1 : 0;
        }
        if (leaves > budget.sequences) {
            break;
        }
        choose_owners(budget, n, leaves, total, ends, best);
    }
    return best;
}

void FusedDrafter::choose_owners(const PassBudget &budget, std::size_t n, std::int32_t leaves, double total,
                                 const std::vector<double> &ends, Choice &best) const {
    const std::int32_t k = sources_.esp ? budget.slots() : 0;
    const std::vector<std::int32_t> order = k > 0 ? likeliest(ends) : std::vector<std::int32_t>();
    double gain = 0.0;
    for (std::int32_t owners = 0;; ++owners) {
        const std::int32_t rows = static_cast<std::int32_t>(n) + k * owners;
        if (rows > budget.most_rows() || leaves + owners > budget.sequences) {
            return;
        }
        const double value = total + gain - budget.price_of(rows);
        const bool allowed = !budget.dense || k == 0 || n == 1 || owners == static_cast<std::int32_t>(n);
        if (allowed && value > best.value + 1e-12) {
            best = {n, owners, value};
        }
        if (k == 0 || owners == static_cast<std::int32_t>(n)) {
            return;
        }
        const auto owner = static_cast<std::size_t>(order[static_cast<std::size_t>(owners)]);
        if (nodes_[owner].depth + k > budget.depth) {
            return;
        }
        gain += mask_gain_ * std::max(ends[owner], 0.0);
    }
}

// Depth first, likeliest child first: accepted rows that follow the root directly stay in the KV cache as they are.
void FusedDrafter::order(const std::vector<std::int32_t> &masks, std::size_t n, PlannedTree &tree) const {
    std::vector<std::vector<std::int32_t>> children(n);
    for (std::size_t i = 1; i < n; ++i) {
        children[static_cast<std::size_t>(nodes_[i].parent)].push_back(static_cast<std::int32_t>(i));
    }
    std::vector<std::int32_t> place(n, -1), stack = {0};
    while (!stack.empty()) {
        const auto node = static_cast<std::size_t>(stack.back());
        stack.pop_back();
        place[node] = static_cast<std::int32_t>(tree.tokens.size());
        const Node &here = nodes_[node];
        tree.tokens.push_back(here.token);
        tree.parents.push_back(here.parent < 0 ? -1 : place[static_cast<std::size_t>(here.parent)]);
        tree.masks.push_back(masks[node]);
        tree.probs.push_back(here.prob);
        tree.sources.push_back(here.source);
        stack.insert(stack.end(), children[node].rbegin(), children[node].rend());
    }
}

void FusedDrafter::observe(const Pass &pass) {
    Evidence evidence;
    std::vector<std::int32_t> path;
    for (std::size_t i = 0; i <= pass.n_path; ++i) { // every node that was reached tells what came after it
        const std::int32_t choice = i < pass.n_path ? pass.tokens[pass.path[i]] : pass.bonus;
        tail_of(path);
        gather(tail_.data(), tail_.size(), static_cast<std::int32_t>(i) + 1, true, evidence);
        model_.learn(evidence, choice);
        path.push_back(choice);
    }
    path.pop_back();
    std::vector<char> accepted(pass.n_nodes, 0);
    for (std::size_t i = 0; i < pass.n_path; ++i) {
        accepted[static_cast<std::size_t>(pass.path[i])] = 1;
    }
    std::vector<std::int32_t> above;
    for (const char wanted : {char(0), char(1)}) { // accepted rows last: they stay where contexts collide
        for (std::size_t node = 0; node < pass.n_nodes && pass.width > 0; ++node) {
            if ((node == 0 ? char(1) : accepted[node]) != wanted) {
                continue;
            }
            above.clear();
            for (auto at = static_cast<std::int32_t>(node); at > 0; at = pass.parents[at]) {
                above.push_back(pass.tokens[at]);
            }
            std::reverse(above.begin(), above.end());
            tail_of(above);
            remember(pass.ids + node * pass.width, pass.logprobs + node * pass.width, pass.width);
        }
    }
    const std::size_t anchor = pass.n_path == 0 ? 0 : static_cast<std::size_t>(pass.path[pass.n_path - 1]);
    const std::size_t width = std::min(pass.width, last_width);
    last_ids_.assign(pass.ids + anchor * pass.width, pass.ids + anchor * pass.width + width);
    last_logprobs_.assign(pass.logprobs + anchor * pass.width, pass.logprobs + anchor * pass.width + width);
    for (std::size_t slot = 0; slot < max_slots; ++slot) {
        mask_ids_[slot].clear();
        mask_logprobs_[slot].clear();
        if (slot < pass.n_slots) {
            const std::size_t n = std::min(pass.mask_width, max_ranked);
            const std::size_t first = slot * pass.mask_width;
            mask_ids_[slot].assign(pass.mask_ids + first, pass.mask_ids + first + n);
            mask_logprobs_[slot].assign(pass.mask_logprobs + first, pass.mask_logprobs + first + n);
        }
    }
    for (std::size_t i = 0; i < pass.n_path; ++i) {
        index_.append(pass.tokens[pass.path[i]]);
    }
    index_.append(pass.bonus);
    position_ += static_cast<std::int32_t>(pass.n_path) + 1;
}

} // namespace esp
