// One draft tree from every free source, sized by what a pass of its rows costs (algorithms C.5 to C.7).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/candidate_model.hpp"
#include "core/ngram_index.hpp"
#include "core/row_table.hpp"

namespace esp {

// What the next pass may use and what it costs.
struct PassBudget {
    std::int32_t rows = 1;       // nodes and masks, root included
    std::int32_t depth = 0;      // deepest node
    std::int32_t sequences = 1;  // owners of masks and leaves without
    std::int32_t masks = 0;      // mask rows behind an owner; 0 = no probing
    const float *cost = nullptr; // [n_cost] milliseconds of a pass of 1, 2, ... rows
    std::size_t n_cost = 0;
    double price = 0.0; // tokens that a millisecond is worth
    bool dense = false; // ablation: masks behind every node, as in the paper

    std::int32_t most_rows() const;           // that are allowed and have a cost
    double price_of(std::int32_t rows) const; // of a pass, in tokens
    std::int32_t slots() const;               // masks of an owner that are read
};

struct PlannedTree {
    std::vector<std::int32_t> tokens, parents, masks;
    std::vector<float> probs; // that the path to a node is accepted
    std::vector<Source> sources;
    double expected = 1.0; // tokens the pass commits
};

class FusedDrafter {
  public:
    static constexpr std::size_t max_slots = 2; // masks that are read
    static constexpr std::size_t max_ranked = 64;

    struct Sources { // switches for the ablations
        bool suffix = true, adjacency = true, esp = true, last = true;
    };

    // Starts an answer behind these tokens; the last one is the first root. With keep, what earlier answers of the
    // session taught stays. The expected text, such as an earlier version of the answer, is one more to copy from.
    void begin(const std::int32_t *tokens, std::size_t n, bool keep, const std::int32_t *expected = nullptr,
               std::size_t n_expected = 0);
    // Best next tokens of the prompt's rows first..first+n-1, width per row; the prompt is the end of the text.
    void learn_prompt(std::size_t first, const std::int32_t *ids, const float *logprobs, std::size_t n,
                      std::size_t width);
    void sampled(float temperature, std::uint64_t seed) {
        temperature_ = temperature;
        seed_ = seed;
    }

    PlannedTree draft(const PassBudget &budget);

    // One verified pass: its nodes, the accepted path below the root, the bonus token, the best next tokens of every
    // node [n_nodes, width], and those of the anchor's masks [n_slots, mask_width].
    struct Pass {
        const std::int32_t *tokens = nullptr;
        const std::int32_t *parents = nullptr;
        std::size_t n_nodes = 0;
        const std::int32_t *path = nullptr;
        std::size_t n_path = 0;
        std::int32_t bonus = -1;
        const std::int32_t *ids = nullptr;
        const float *logprobs = nullptr;
        std::size_t width = 0;
        const std::int32_t *mask_ids = nullptr;
        const float *mask_logprobs = nullptr;
        std::size_t n_slots = 0;
        std::size_t mask_width = 0;
    };
    void observe(const Pass &pass);

    CandidateModel &model() { return model_; }
    Sources &sources() { return sources_; }
    double mask_gain() const { return mask_gain_; }
    void set_mask_gain(double gain, bool fixed) {
        mask_gain_ = gain;
        fixed_gain_ = fixed;
    }
    std::size_t n_prompt() const { return static_cast<std::size_t>(position_ + 1); } // until the first pass

  private:
    struct Node {
        std::int32_t token, parent, depth;
        float prob;
        Source source;
    };

    void append_text(const std::int32_t *tokens, std::size_t n);
    void gather(const std::int32_t *tail, std::size_t n, std::int32_t depth, bool probed, Evidence &evidence);
    void tail_of(const std::vector<std::int32_t> &path);
    void grow(const PassBudget &budget, bool probed);
    bool can_pay(const PassBudget &budget, double prob, double total, double best) const;
    struct Choice {
        std::size_t nodes = 1;
        std::int32_t owners = 0; // of masks: the likeliest ends of those nodes
        double value = -1e300;   // tokens, less the price of the rows
    };
    std::vector<double> ends_of(std::size_t n) const;
    Choice choose(const PassBudget &budget) const;
    void choose_owners(const PassBudget &budget, std::size_t n, std::int32_t leaves, double total,
                       const std::vector<double> &ends, Choice &best) const;
    void update_mask_gain(const PassBudget &budget);
    void order(const std::vector<std::int32_t> &masks, std::size_t n, PlannedTree &tree) const;
    void remember(const std::int32_t *ids, const float *logprobs, std::size_t width);

    NgramIndex index_;
    RowTable rows_;
    CandidateModel model_;
    Sources sources_;
    float temperature_ = 0.0f;
    std::uint64_t seed_ = 0;
    std::int32_t n_texts_ = 0;
    std::int32_t position_ = 0; // of the root

    std::array<std::vector<std::int32_t>, max_slots> mask_ids_;
    std::array<std::vector<float>, max_slots> mask_logprobs_;
    std::vector<std::int32_t> last_ids_;
    std::vector<float> last_logprobs_;

    double mask_gain_ = 0.15; // tokens that a probed anchor brings the next pass, running mean
    bool fixed_gain_ = false;
    std::uint32_t n_drafts_ = 0;

    // scratch, reused
    std::vector<Copy> copies_;
    std::vector<Candidate> candidates_;
    std::vector<std::int32_t> tail_;
    std::vector<Node> nodes_;
};

} // namespace esp
