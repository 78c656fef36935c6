#include "llama/sampler.hpp"

#include <cmath>
#include <limits>
#include <stdexcept>

#include "core/logits.hpp"

namespace esp {

namespace {

llama_sampler *new_chain() {
    llama_sampler_chain_params params = llama_sampler_chain_default_params();
    params.no_perf = true;
    return llama_sampler_chain_init(params);
}

} // namespace

Sampler::Sampler(const llama_model *model, const SamplerParams &params)
    : params_(params), n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))), modifiers_(new_chain()),
      filters_(new_chain()) {
    const llama_vocab *vocab = llama_model_get_vocab(model);
    build_modifiers(vocab);
    build_filters();
    if (!params_.grammar.empty()) {
        grammar_.reset(llama_sampler_init_grammar(vocab, params_.grammar.c_str(), "root"));
        if (grammar_ == nullptr) {
            throw std::invalid_argument("the grammar does not compile");
        }
    }
}

void Sampler::build_modifiers(const llama_vocab *vocab) {
    const auto add_modifier = [this](llama_sampler *sampler) {
        llama_sampler_chain_add(modifiers_.get(), sampler);
        has_modifiers_ = true;
    };
    std::vector<llama_logit_bias> bias;
    for (const auto &[token, value] : params_.logit_bias) {
        if (token < 0 || token >= n_vocab_) {
            throw std::invalid_argument("logit_bias: token id " + std::to_string(token) +
                                        " is outside the vocabulary of " + std::to_string(n_vocab_));
        }
        bias.push_back({token, value});
    }
    if (!bias.empty()) {
        add_modifier(llama_sampler_init_logit_bias(n_vocab_, static_cast<std::int32_t>(bias.size()), bias.data()));
    }
    const bool penalties =
        params_.repeat_penalty != 1.0f || params_.frequency_penalty != 0.0f || params_.presence_penalty != 0.0f;
    if (penalties && params_.penalty_last_n != 0) {
        add_modifier(llama_sampler_init_penalties(n_vocab_, params_.penalty_last_n, params_.repeat_penalty,
                                                  params_.frequency_penalty, params_.presence_penalty));
        has_state_ = true;
    }
    if (params_.dry_multiplier != 0.0f && params_.dry_penalty_last_n != 0) {
        std::vector<const char *> breakers;
        for (const std::string &text : params_.dry_breakers) {
            breakers.push_back(text.c_str());
        }
        add_modifier(llama_sampler_init_dry(vocab, params_.dry_multiplier, params_.dry_base, params_.dry_allowed_length,
                                            params_.dry_penalty_last_n, breakers.data(), breakers.size()));
        has_state_ = true;
    }
}

// llama.cpp's order: top-k, typical, top-p, min-p, temperature. Of these only typical can change a greedy choice.
void Sampler::build_filters() {
    const bool greedy = params_.temperature <= 0.0f;
    const auto add_filter = [this](llama_sampler *sampler) { llama_sampler_chain_add(filters_.get(), sampler); };
    if (!greedy && params_.top_k > 0) {
        add_filter(llama_sampler_init_top_k(params_.top_k));
    }
    if (params_.typical_p < 1.0f) {
        add_filter(llama_sampler_init_typical(params_.typical_p, 1));
    }
    if (!greedy && params_.top_p < 1.0f) {
        add_filter(llama_sampler_init_top_p(params_.top_p, 1));
    }
    if (!greedy && params_.min_p > 0.0f) {
        add_filter(llama_sampler_init_min_p(params_.min_p, 1));
    }
    if (!greedy) {
        add_filter(llama_sampler_init_temp(params_.temperature));
    }
}

// Candidates of one row. Without anything that could raise a token from below, top-k is taken here at once: the
// samplers then see k entries instead of the vocabulary.
void Sampler::fill(const float *logits) {
    const bool shortcut =
        !has_modifiers_ && params_.temperature > 0.0f && params_.top_k > 0 && params_.top_k < n_vocab_;
    if (shortcut) {
        const auto k = static_cast<std::size_t>(params_.top_k);
        top_ids_.resize(k);
        top_values_.resize(k);
        const std::size_t n = top_k(logits, static_cast<std::size_t>(n_vocab_), k, top_ids_.data(), top_values_.data());
        data_.resize(n);
        for (std::size_t i = 0; i < n; ++i) {
            data_[i] = {top_ids_[i], top_values_[i], 0.0f};
        }
    } else {
        data_.resize(static_cast<std::size_t>(n_vocab_));
        for (std::int32_t i = 0; i < n_vocab_; ++i) {
            data_[static_cast<std::size_t>(i)] = {i, logits[i], 0.0f};
        }
    }
    candidates_ = {data_.data(), data_.size(), -1, shortcut};
}

std::int32_t Sampler::draw(std::uint64_t position) const {
    constexpr float none = -std::numeric_limits<float>::infinity();
    const bool greedy = params_.temperature <= 0.0f;
    // No noise exceeds max_gumbel, so a candidate that far below the best score needs none drawn.
    double best = -std::numeric_limits<double>::infinity();
    std::int32_t choice = -1;
    for (std::size_t i = 0; i < candidates_.size; ++i) {
        const llama_token_data &c = candidates_.data[i];
        if (c.logit == none || std::isnan(c.logit) || (!greedy && c.logit + max_gumbel < best)) {
            continue;
        }
        const double score =
            greedy ? c.logit : c.logit + keyed_gumbel(params_.seed, position, static_cast<std::uint32_t>(c.id));
        if (score > best || (score == best && c.id < choice)) {
            best = score;
            choice = c.id;
        }
    }
    return choice;
}

bool Sampler::grammar_admits(std::int32_t token) {
    llama_token_data one{token, 1.0f, 0.0f};
    llama_token_data_array array{&one, 1, -1, false};
    llama_sampler_apply(grammar_.get(), &array);
    return one.logit != -std::numeric_limits<float>::infinity();
}

std::int32_t Sampler::pick(const float *logits, std::uint64_t position) {
    if (!has_modifiers_ && params_.temperature <= 0.0f && params_.typical_p >= 1.0f) {
        const std::int32_t token = argmax(logits, static_cast<std::size_t>(n_vocab_));
        if (grammar_ == nullptr || grammar_admits(token)) {
            return token;
        }
    } else {
        fill(logits);
        llama_sampler_apply(modifiers_.get(), &candidates_);
        llama_sampler_apply(filters_.get(), &candidates_);
        const std::int32_t token = draw(position);
        if (token >= 0 && (grammar_ == nullptr || grammar_admits(token))) {
            return token;
        }
    }
    if (grammar_ == nullptr) {
        throw std::runtime_error("every token is forbidden: check logit_bias");
    }
    // The free choice breaks the grammar: constrain the whole row first, then filter and draw, as llama.cpp does.
    data_.resize(static_cast<std::size_t>(n_vocab_));
    for (std::int32_t i = 0; i < n_vocab_; ++i) {
        data_[static_cast<std::size_t>(i)] = {i, logits[i], 0.0f};
    }
    candidates_ = {data_.data(), data_.size(), -1, false};
    llama_sampler_apply(grammar_.get(), &candidates_);
    llama_sampler_apply(modifiers_.get(), &candidates_);
    llama_sampler_apply(filters_.get(), &candidates_);
    const std::int32_t token = draw(position);
    if (token < 0) {
        throw std::runtime_error("the grammar admits no token here");
    }
    return token;
}

void Sampler::accept(std::int32_t token, bool generated) {
    if (has_state_) {
        llama_sampler_accept(modifiers_.get(), token);
    }
    if (generated && grammar_ != nullptr) {
        llama_sampler_accept(grammar_.get(), token);
    }
}

} // namespace esp
