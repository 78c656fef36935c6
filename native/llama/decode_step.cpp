#include "llama/decode_step.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace esp {

DecodeStep::DecodeStep(llama_context *ctx, const EmbeddingTable *table, std::int32_t seq_base, std::int32_t n_seq_max)
    : ctx_(ctx), memory_(llama_get_memory(ctx)), table_(table), seq_base_(seq_base), n_seq_max_(n_seq_max),
      n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))),
      n_batch_(static_cast<std::int32_t>(llama_n_batch(ctx))) {
    if (memory_ == nullptr) {
        throw std::invalid_argument("the context has no memory: not a generating model");
    }
    if (seq_base < 0 || n_seq_max < 1 || seq_base + n_seq_max > static_cast<std::int32_t>(llama_n_seq_max(ctx))) {
        throw std::invalid_argument("the sequence range is outside the context's n_seq_max");
    }
    if (table != nullptr &&
        (table->n_embd() != llama_model_n_embd_inp(llama_get_model(ctx)) || table->n_vocab() < n_vocab_)) {
        throw std::invalid_argument("the embedding table does not fit the model");
    }
}

void DecodeStep::start_batch(std::size_t rows) {
    token_.clear();
    pos_.clear();
    n_seq_id_.clear();
    seq_start_.clear();
    seq_flat_.clear();
    output_.clear();
    pos_.reserve(rows);
}

// everywhere: the row belongs to all active sequences, seen through the first of seqs.
void DecodeStep::add_row(std::int32_t pos, bool output, const std::int32_t *seqs, std::int32_t n_seqs,
                         bool everywhere) {
    pos_.push_back(pos);
    output_.push_back(output ? 1 : 0);
    seq_start_.push_back(seq_flat_.size());
    const std::int32_t first = n_seqs > 0 ? seqs[0] : 0;
    if (everywhere) {
        seq_flat_.push_back(seq_base_ + first);
        for (std::int32_t s = 0; s < n_active_; ++s) {
            if (s != first) {
                seq_flat_.push_back(seq_base_ + s);
            }
        }
    } else {
        for (std::int32_t i = 0; i < n_seqs; ++i) {
            seq_flat_.push_back(seq_base_ + seqs[i]);
        }
    }
    n_seq_id_.push_back(static_cast<std::int32_t>(seq_flat_.size() - seq_start_.back()));
}

int DecodeStep::decode(const std::int32_t *tokens, float *embd) {
    const std::size_t n = pos_.size();
    seq_id_.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
        seq_id_[i] = seq_flat_.data() + seq_start_[i];
    }
    llama_batch batch{};
    batch.n_tokens = static_cast<std::int32_t>(n);
    batch.token = const_cast<llama_token *>(tokens); // llama.cpp copies and never writes
    batch.embd = embd;
    batch.pos = pos_.data();
    batch.n_seq_id = n_seq_id_.data();
    batch.seq_id = seq_id_.data();
    batch.logits = output_.data();
    n_logit_rows_ = 0;
    const auto start = std::chrono::steady_clock::now();
    const int status = llama_decode(ctx_, batch);
    if (status == 0) {
        llama_synchronize(ctx_);
    }
    decode_us_ += std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
    return status;
}

int DecodeStep::prefill(const std::int32_t *tokens, std::int32_t n, std::int32_t chunk) {
    rollback();
    chunk = std::clamp(chunk, 1, n_batch_);
    const std::int32_t before = n_past_;
    for (std::int32_t i = 0; i < n; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab_) {
            throw std::out_of_range("token id " + std::to_string(tokens[i]) + " is outside the vocabulary of " +
                                    std::to_string(n_vocab_));
        }
    }
    for (std::int32_t done = 0; done < n; done += chunk) {
        const std::int32_t rows = std::min(chunk, n - done);
        start_batch(static_cast<std::size_t>(rows));
        for (std::int32_t i = 0; i < rows; ++i) {
            add_row(n_past_ + i, false, nullptr, 0, true);
        }
        const int status = decode(tokens + done, nullptr);
        if (status != 0) {
            truncate(before);
            return status;
        }
        n_past_ += rows;
    }
    return 0;
}

void DecodeStep::activate(std::int32_t n_sequences) {
    if (n_sequences > n_seq_max_) {
        throw std::invalid_argument("the tree needs " + std::to_string(n_sequences) + " sequences, the session has " +
                                    std::to_string(n_seq_max_));
    }
    for (; n_active_ < n_sequences; ++n_active_) {
        if (n_past_ > 0) {
            llama_memory_seq_cp(memory_, seq_base_, seq_base_ + n_active_, 0, n_past_);
        }
    }
}

void DecodeStep::fill_embeddings(const Input &input) {
    const auto width = static_cast<std::size_t>(table_->n_embd());
    embd_.resize(pos_.size() * width);
    float *out = embd_.data();
    const auto add_token = [this, &out, width](std::int32_t token) {
        table_->row(token, out);
        table_->release();
        out += width;
    };
    std::for_each(input.refeed, input.refeed + input.n_refeed, add_token);
    std::for_each(input.tokens, input.tokens + input.layout->n_nodes, add_token);
    const std::int32_t n_masks = input.layout->n_rows() - input.layout->n_nodes;
    for (std::int32_t i = 0; i < n_masks; ++i, out += width) {
        const std::int32_t index = input.mask_index[i];
        if (index < 0 || index >= input.n_mask_vectors) {
            throw std::out_of_range("a mask row points outside the mask vectors");
        }
        const float *vector = input.mask_vectors + static_cast<std::size_t>(index) * width;
        // attention multiplies a hidden cell by zero, and zero times infinity is not zero
        if (!std::all_of(vector, vector + width, [](float x) { return std::isfinite(x); })) {
            throw std::invalid_argument("a mask vector has a value that is not finite");
        }
        std::memcpy(out, vector, width * sizeof(float));
    }
    for (std::int32_t i = 0; i < input.pad_rows; ++i) {
        add_token(input.tokens[0]);
    }
}

int DecodeStep::run(const Input &input) {
    rollback();
    const TreeLayout &layout = *input.layout;
    const bool by_id = input.kind == InputKind::ids;
    const std::int32_t n_masks = layout.n_rows() - layout.n_nodes;
    if ((!by_id && table_ == nullptr) || (by_id && n_masks > 0) || (n_masks > 0 && input.mask_index == nullptr)) {
        throw std::invalid_argument("mask rows need the embedding path and mask vectors");
    }
    const std::int32_t rows = input.n_refeed + layout.n_rows() + input.pad_rows;
    if (rows > n_batch_) {
        throw std::invalid_argument("a pass of " + std::to_string(rows) + " rows exceeds the batch size " +
                                    std::to_string(n_batch_));
    }
    activate(layout.n_sequences);

    start_batch(static_cast<std::size_t>(rows));
    root_row_ = input.n_refeed;
    root_pos_ = n_past_ + input.n_refeed;
    for (std::int32_t i = 0; i < input.n_refeed; ++i) {
        add_row(n_past_ + i, false, nullptr, 0, true);
    }
    for (std::int32_t r = 0; r < layout.n_rows(); ++r) {
        const auto begin = static_cast<std::size_t>(layout.seq_offset[static_cast<std::size_t>(r)]);
        const auto end = static_cast<std::size_t>(layout.seq_offset[static_cast<std::size_t>(r) + 1]);
        add_row(root_pos_ + layout.depth[static_cast<std::size_t>(r)], true, layout.seq_ids.data() + begin,
                static_cast<std::int32_t>(end - begin), r == 0);
    }
    for (std::int32_t i = 0; i < input.pad_rows; ++i) { // behind the root, in its sequence: seen by no other row
        const std::int32_t seq = layout.first_sequence(0);
        add_row(root_pos_ + 1 + i, true, &seq, 1, false);
    }

    if (by_id) {
        token_.assign(input.refeed, input.refeed + input.n_refeed);
        token_.insert(token_.end(), input.tokens, input.tokens + layout.n_nodes);
        token_.insert(token_.end(), static_cast<std::size_t>(input.pad_rows), input.tokens[0]);
    } else {
        fill_embeddings(input);
    }
    const int status = by_id ? decode(token_.data(), nullptr) : decode(nullptr, embd_.data());
    if (status == 0) {
        pending_ = layout;
        layout_ = &pending_;
        n_logit_rows_ = layout.n_rows();
    }
    return status;
}

std::int32_t DecodeStep::commit(const std::int32_t *path, std::int32_t n, bool in_order) {
    if (layout_ == nullptr) {
        throw std::logic_error("commit without a pass");
    }
    for (std::int32_t i = 0; i < n; ++i) {
        if (path[i] < 1 || path[i] >= layout_->n_nodes || layout_->depth[static_cast<std::size_t>(path[i])] != i + 1) {
            throw std::invalid_argument("the path to commit does not run through the tree");
        }
    }
    std::int32_t kept = n;
    if (in_order) {
        kept = 0;
        while (kept < n && path[kept] == kept + 1) {
            ++kept;
        }
    }
    const std::int32_t after_root = root_pos_ + 1;
    const std::int32_t end = after_root + kept;
    const std::int32_t keep = kept > 0 ? layout_->first_sequence(path[kept - 1]) : -1;
    for (std::int32_t s = 0; s < layout_->n_sequences; ++s) {
        llama_memory_seq_rm(memory_, seq_base_ + s, s == keep ? end : after_root, -1);
    }
    if (kept > 0) {
        for (std::int32_t s = 0; s < n_active_; ++s) {
            if (s != keep) {
                llama_memory_seq_cp(memory_, seq_base_ + keep, seq_base_ + s, after_root, end);
            }
        }
    }
    n_past_ = end;
    layout_ = nullptr;
    return kept;
}

void DecodeStep::rollback() {
    if (layout_ != nullptr) {
        layout_ = nullptr;
        truncate(n_past_);
    }
}

bool DecodeStep::truncate(std::int32_t n) {
    layout_ = nullptr;
    bool ok = true;
    for (std::int32_t s = 0; s < n_active_; ++s) {
        ok = llama_memory_seq_rm(memory_, seq_base_ + s, n, -1) && ok;
    }
    if (ok) {
        n_past_ = std::min(n_past_, n);
    }
    return ok;
}

void DecodeStep::clear() {
    layout_ = nullptr;
    for (std::int32_t s = 0; s < n_active_; ++s) {
        llama_memory_seq_rm(memory_, seq_base_ + s, -1, -1);
    }
    n_past_ = 0;
}

const float *DecodeStep::logits(std::int32_t row) const {
    if (row < 0 || row >= n_logit_rows_) {
        throw std::out_of_range("row " + std::to_string(row) + " is not in the last pass");
    }
    const float *values = llama_get_logits_ith(ctx_, root_row_ + row);
    if (values == nullptr) {
        throw std::out_of_range("row " + std::to_string(row) + " has no logits");
    }
    return values;
}

std::pair<std::int32_t, std::int32_t> DecodeStep::stored(std::int32_t sequence) const {
    return {llama_memory_seq_pos_min(memory_, seq_base_ + sequence),
            llama_memory_seq_pos_max(memory_, seq_base_ + sequence)};
}

} // namespace esp
