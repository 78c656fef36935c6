// The target model's choice at one row: llama.cpp's filters, then one draw keyed by (seed, position, token).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llama.h"

namespace esp {

struct SamplerParams {
    float temperature = 0.0f; // 0 = greedy
    std::int32_t top_k = 0;   // 0 = off
    float top_p = 1.0f;
    float min_p = 0.0f;
    float typical_p = 1.0f;
    std::int32_t penalty_last_n = 0;
    float repeat_penalty = 1.0f;
    float frequency_penalty = 0.0f;
    float presence_penalty = 0.0f;
    float dry_multiplier = 0.0f;
    float dry_base = 1.75f;
    std::int32_t dry_allowed_length = 2;
    std::int32_t dry_penalty_last_n = 0;
    std::vector<std::string> dry_breakers;
    std::vector<std::pair<std::int32_t, float>> logit_bias;
    std::string grammar; // GBNF, empty = none
    std::uint64_t seed = 0;
};

class Sampler {
  public:
    // Throws std::invalid_argument when the grammar does not compile.
    Sampler(const llama_model *model, const SamplerParams &params);

    // The choice at absolute position, given a row of logits[n_vocab]. Does not advance the state. Throws
    // std::runtime_error when the grammar admits no token.
    std::int32_t pick(const float *logits, std::uint64_t position);

    // Advances penalties, DRY and grammar along the committed path. Prompt tokens do not touch the grammar.
    void accept(std::int32_t token, bool generated);

    std::int32_t n_vocab() const { return n_vocab_; }
    // Whether a choice may take long: a large grammar or many texts that break repetitions cost seconds.
    bool may_be_slow() const { return grammar_ != nullptr || has_state_; }

  private:
    struct Free {
        void operator()(llama_sampler *sampler) const { llama_sampler_free(sampler); }
    };
    using Owned = std::unique_ptr<llama_sampler, Free>;

    void build_modifiers(const llama_vocab *vocab);
    void build_filters();
    void fill(const float *logits);
    bool grammar_admits(std::int32_t token);
    std::int32_t draw(std::uint64_t position) const;

    SamplerParams params_;
    std::int32_t n_vocab_;
    Owned modifiers_; // logit bias, penalties, DRY: may raise any token
    Owned filters_;   // truncation and temperature
    Owned grammar_;
    bool has_modifiers_ = false;
    bool has_state_ = false; // penalties or DRY
    std::vector<llama_token_data> data_;
    llama_token_data_array candidates_{};
    std::vector<std::int32_t> top_ids_;
    std::vector<float> top_values_;
};

} // namespace esp
