// How likely a candidate is the target model's next choice: every draft source's evidence in one calibrated number.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ngram_index.hpp"
#include "core/row_table.hpp"

namespace esp {

enum class Source : std::uint8_t { none, suffix, adjacency, esp1, esp2, last };

// Best tokens of a row of logits, best first: of a mask row, or of the row that chose the root.
struct Ranked {
    const std::int32_t *ids = nullptr;
    const float *logprobs = nullptr; // natural, at temperature 1
    std::size_t n = 0;
};

// What the sources say about the children of one node.
struct Evidence {
    const std::vector<Copy> *copies = nullptr;
    RowTable::Found rows;
    Ranked mask;                // of the slot of this depth; n = 0 without one
    Ranked last;                // of the row that chose the root; n = 0 below depth 1
    std::int32_t depth = 1;     // of the children
    std::int32_t mask_slot = 0; // which mask it is, from 1
    std::int32_t parent = -1;   // token of the node
    float temperature = 0.0f;   // 0 = greedy
    std::uint64_t seed = 0;     // of the keyed noise, when sampled
    std::uint64_t position = 0; // absolute position of the children, when sampled
};

struct Candidate {
    std::int32_t token = 0;
    float prob = 0.0f;
    Source source = Source::none; // whose evidence weighs most
};

// A conditional logit over the candidates and "none of them": probability proportional to exp(w . features). The
// features are the sources' log-probabilities and indicators of their rank, context and match length, so it is a
// product of experts whose weights are learned; children of a node exclude each other, which the softmax respects.
// Every reached node tells which candidate was right, also of candidates that were not in the tree: learning is free.
// The last stage corrects each band of probability by what was observed in it (a Beta prior that says: as predicted).
class CandidateModel {
  public:
    enum Feature : std::size_t {
        bias,
        repeat, // the parent's token again
        noise,  // keyed Gumbel noise of a sampled choice
        row_logprob,
        row_present = row_logprob + RowTable::max_context,
        row_top = row_present + RowTable::max_context,
        row_absent = row_top + RowTable::max_context,
        shorter_logprob = row_absent + RowTable::max_context,
        shorter_present,
        shorter_top,
        shorter_absent,
        mask_logprob,
        mask_present,
        mask_top,
        mask_absent,
        last_logprob,
        last_present,
        last_absent,
        copy, // by match length and agreement
        n_features = copy + 32,
    };
    // depth 1 with and without a mask, depth 2 with and without, deeper; then the same for sampled decoding
    static constexpr std::size_t n_classes = 10;
    static constexpr std::size_t n_weights = n_classes * n_features;
    static constexpr std::size_t n_bands = 16;

    CandidateModel();

    // Fills out with every candidate, likeliest first.
    void rate(const Evidence &evidence, std::vector<Candidate> &out);
    // Learns from the model's choice where the evidence was the same as in rate.
    void learn(const Evidence &evidence, std::int32_t choice);

    std::vector<float> &weights() { return weights_; }
    // Predicted and observed hits of every class and band, faded: n_corrections numbers.
    static constexpr std::size_t n_corrections = 2 * n_classes * n_bands;
    std::vector<float> corrections() const;
    void set_corrections(const float *numbers);
    void set_rate(float rate) { rate_ = rate; }
    void set_calibrate(bool on) { calibrate_ = on; }
    // Ablation: a candidate counts with its best source alone, so that sources do not re-rank each other.
    void set_apart(bool on) { apart_ = on; }
    // What was predicted and what was observed in ten bands of probability, since the last reset.
    struct Band {
        double predicted = 0.0, hits = 0.0, tries = 0.0;
    };
    const std::array<Band, 10> &reliability() const { return reliability_; }
    void reset_reliability() { reliability_ = {}; }

  private:
    struct Item { // one candidate and its features
        static constexpr std::size_t max_active = 20;
        std::int32_t token = 0;
        std::int32_t n = 0;
        std::array<std::uint16_t, max_active> index{};
        std::array<float, max_active> value{};
        float score = 0.0f, prob = 0.0f, band_prob = 0.0f;
        Source source = Source::none;
        void add(std::size_t feature, float x) {
            index[static_cast<std::size_t>(n)] = static_cast<std::uint16_t>(feature);
            value[static_cast<std::size_t>(n)] = x;
            ++n;
        }
    };

    std::size_t class_of(const Evidence &evidence) const;
    void collect(const Evidence &evidence);
    void score(const Evidence &evidence);
    Item &item(std::int32_t token);

    std::vector<float> weights_;
    std::vector<float> squares_; // AdaGrad's sums of squared gradients
    std::vector<float> gradient_;
    std::vector<Item> items_;
    struct Bin {
        float predicted = 0.0f, hits = 0.0f;
    };
    std::array<Bin, n_classes * n_bands> bins_{};
    std::array<Band, 10> reliability_{};
    float rate_ = 0.02f;
    bool calibrate_ = true;
    bool apart_ = false;
};

} // namespace esp
