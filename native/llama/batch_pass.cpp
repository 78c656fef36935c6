#include "llama/batch_pass.hpp"

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>

namespace esp {

BatchPass::BatchPass(llama_context *ctx, const EmbeddingTable *table)
    : ctx_(ctx), table_(table), n_batch_(static_cast<std::int32_t>(llama_n_batch(ctx))) {}

void BatchPass::start(InputKind kind) {
    if (kind == InputKind::embeddings && table_ == nullptr) {
        throw std::invalid_argument("embedding rows need an embedding table");
    }
    kind_ = kind;
    ran_ = false;
    is_computed_.clear();
    ++serial_;
    shrink(0);
}

void BatchPass::open_row(llama_pos pos, bool output) {
    pos_.push_back(pos);
    output_.push_back(output ? 1 : 0);
    sequence_start_.push_back(sequences_.size());
}

void BatchPass::set_token(std::int32_t token) {
    if (kind_ == InputKind::ids) {
        tokens_.push_back(token);
        return;
    }
    const auto width = static_cast<std::size_t>(table_->n_embd());
    vectors_.resize(vectors_.size() + width);
    table_->row(token, vectors_.data() + (vectors_.size() - width));
}

void BatchPass::set_vector(const float *vector) { vectors_.insert(vectors_.end(), vector, vector + table_->n_embd()); }

void BatchPass::shrink(std::int32_t n_rows) {
    const auto n = static_cast<std::size_t>(n_rows);
    if (n < sequence_start_.size()) {
        sequences_.resize(sequence_start_[n]);
    }
    pos_.resize(n);
    output_.resize(n);
    sequence_start_.resize(n);
    if (kind_ == InputKind::ids) {
        tokens_.resize(n);
        vectors_.clear();
    } else {
        tokens_.clear();
        vectors_.resize(n * static_cast<std::size_t>(table_->n_embd()));
    }
}

int BatchPass::decode(bool defer_head) {
    const std::size_t n = pos_.size();
    n_sequences_.resize(n);
    sequence_ptr_.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t end = i + 1 < n ? sequence_start_[i + 1] : sequences_.size();
        n_sequences_[i] = static_cast<std::int32_t>(end - sequence_start_[i]);
        sequence_ptr_[i] = sequences_.data() + sequence_start_[i];
    }
    llama_batch batch{};
    batch.n_tokens = static_cast<std::int32_t>(n);
    batch.token = kind_ == InputKind::ids ? tokens_.data() : nullptr;
    batch.embd = kind_ == InputKind::ids ? nullptr : vectors_.data();
    batch.pos = pos_.data();
    batch.n_seq_id = n_sequences_.data();
    batch.seq_id = sequence_ptr_.data();
    batch.logits = output_.data();
    if (kind_ == InputKind::embeddings) {
        table_->release(); // once a pass: a call for every row would take longer than reading them
    }
    const auto start = std::chrono::steady_clock::now();
    std::optional<kernels::DeferredHead::Scope> scope;
    if (defer_head) {
        scope.emplace(head_);
    }
    const int status = llama_decode(ctx_, batch);
    if (status == 0) {
        llama_synchronize(ctx_);
    }
    if (defer_head && status == 0) {
        is_computed_.assign(static_cast<std::size_t>(head_.n_rows()), 0);
    }
    last_us_ = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
    decode_us_ += last_us_;
    ran_ = status == 0;
    return status;
}

// llama.cpp keeps logits side by side, in the order of the rows that have any.
std::size_t BatchPass::output_number(std::int32_t row) const {
    return static_cast<std::size_t>(std::count(output_.begin(), output_.begin() + row, 1));
}

bool BatchPass::is_waiting(std::int32_t row) const { return is_deferred() && is_computed_[output_number(row)] == 0; }

std::int32_t BatchPass::need(std::int32_t row, std::int32_t n) {
    while (n > 0 && !is_waiting(row)) {
        ++row;
        --n;
    }
    while (n > 0 && !is_waiting(row + n - 1)) {
        --n;
    }
    if (n > 0) {
        const auto start = std::chrono::steady_clock::now();
        const auto first = output_number(row), count = static_cast<std::size_t>(n);
        const auto at = is_computed_.begin() + static_cast<std::ptrdiff_t>(first);
        head_.compute(static_cast<std::int64_t>(first), n, llama_get_logits_ith(ctx_, row),
                      llama_n_threads_batch(ctx_));
        std::fill_n(at, count, 1);
        const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
        last_us_ += us;
        decode_us_ += us;
    }
    return n;
}

} // namespace esp
