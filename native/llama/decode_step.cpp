#include "llama/decode_step.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace esp {

DecodeStep::DecodeStep(llama_context *ctx, const EmbeddingTable *table, std::int32_t seq_base, std::int32_t n_seq_max)
    : ctx_(ctx), memory_(llama_get_memory(ctx)), table_(table), seq_base_(seq_base), n_seq_max_(n_seq_max),
      n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))), own_(ctx, table) {
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

// everywhere: the row belongs to all active sequences, seen through the first of seqs.
void DecodeStep::add_row(BatchPass &pass, std::int32_t pos, bool output, const std::int32_t *seqs, std::int32_t n_seqs,
                         bool everywhere) const {
    pass.open_row(pos, output);
    if (!everywhere) {
        for (std::int32_t i = 0; i < n_seqs; ++i) {
            pass.add_sequence(seq_base_ + seqs[i]);
        }
        return;
    }
    const std::int32_t first = n_seqs > 0 ? seqs[0] : 0;
    pass.add_sequence(seq_base_ + first);
    for (std::int32_t s = 0; s < n_active_; ++s) {
        if (s != first) {
            pass.add_sequence(seq_base_ + s);
        }
    }
}

int DecodeStep::prefill(const std::int32_t *tokens, std::int32_t n, std::int32_t chunk) {
    rollback();
    chunk = std::clamp(chunk, 1, own_.max_rows());
    const std::int32_t before = n_past_;
    for (std::int32_t i = 0; i < n; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab_) {
            throw std::out_of_range("token id " + std::to_string(tokens[i]) + " is outside the vocabulary of " +
                                    std::to_string(n_vocab_));
        }
    }
    for (std::int32_t done = 0; done < n; done += chunk) {
        own_.start(InputKind::ids);
        append_prefill(own_, tokens + done, std::min(chunk, n - done));
        const int status = own_.decode();
        settle(own_);
        if (status != 0) {
            truncate(before);
            return status;
        }
    }
    return 0;
}

void DecodeStep::append_prefill(BatchPass &pass, const std::int32_t *tokens, std::int32_t n) {
    rollback();
    if (pass.n_rows() + n > pass.max_rows()) {
        throw std::invalid_argument("a pass of " + std::to_string(pass.n_rows() + n) + " rows exceeds the batch size " +
                                    std::to_string(pass.max_rows()));
    }
    const std::int32_t before = pass.n_rows();
    try {
        for (std::int32_t i = 0; i < n; ++i) {
            add_row(pass, n_past_ + i, false, nullptr, 0, true);
            pass.set_token(tokens[i]);
        }
    } catch (...) {
        pass.shrink(before);
        throw;
    }
    pass_ = &pass;
    serial_ = pass.serial();
    n_logit_rows_ = 0;
    n_prefill_ = n;
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

void DecodeStep::check(const BatchPass &pass, const Input &input) const {
    const std::int32_t n_masks = input.layout->n_rows() - input.layout->n_nodes;
    if (n_masks > 0 && (pass.kind() == InputKind::ids || input.mask_index == nullptr)) {
        throw std::invalid_argument("mask rows need the embedding path and mask vectors");
    }
    const std::int32_t rows = pass.n_rows() + input.n_refeed + input.layout->n_rows() + input.pad_rows;
    if (rows > pass.max_rows()) {
        throw std::invalid_argument("a pass of " + std::to_string(rows) + " rows exceeds the batch size " +
                                    std::to_string(pass.max_rows()));
    }
}

// Tokens and mask vectors of the rows, in the order of add_rows.
void DecodeStep::add_content(BatchPass &pass, const Input &input) const {
    const auto add_token = [&pass](std::int32_t token) { pass.set_token(token); };
    std::for_each(input.refeed, input.refeed + input.n_refeed, add_token);
    std::for_each(input.tokens, input.tokens + input.layout->n_nodes, add_token);
    const std::int32_t n_masks = input.layout->n_rows() - input.layout->n_nodes;
    for (std::int32_t i = 0; i < n_masks; ++i) {
        const std::int32_t index = input.mask_index[i];
        if (index < 0 || index >= input.n_mask_vectors) {
            throw std::out_of_range("a mask row points outside the mask vectors");
        }
        const auto width = static_cast<std::size_t>(table_->n_embd());
        const float *vector = input.mask_vectors + static_cast<std::size_t>(index) * width;
        // attention multiplies a hidden cell by zero, and zero times infinity is not zero
        if (!std::all_of(vector, vector + width, [](float x) { return std::isfinite(x); })) {
            throw std::invalid_argument("a mask vector has a value that is not finite");
        }
        pass.set_vector(vector);
    }
    for (std::int32_t i = 0; i < input.pad_rows; ++i) {
        add_token(input.tokens[0]);
    }
}

void DecodeStep::add_rows(BatchPass &pass, const Input &input) const {
    const TreeLayout &layout = *input.layout;
    const std::int32_t root_pos = n_past_ + input.n_refeed;
    for (std::int32_t i = 0; i < input.n_refeed; ++i) {
        add_row(pass, n_past_ + i, false, nullptr, 0, true);
    }
    for (std::int32_t r = 0; r < layout.n_rows(); ++r) {
        const auto begin = static_cast<std::size_t>(layout.seq_offset[static_cast<std::size_t>(r)]);
        const auto end = static_cast<std::size_t>(layout.seq_offset[static_cast<std::size_t>(r) + 1]);
        add_row(pass, root_pos + layout.depth[static_cast<std::size_t>(r)], true, layout.seq_ids.data() + begin,
                static_cast<std::int32_t>(end - begin), r == 0);
    }
    for (std::int32_t i = 0; i < input.pad_rows; ++i) { // behind the root, in its sequence: seen by no other row
        const std::int32_t seq = layout.first_sequence(0);
        add_row(pass, root_pos + 1 + i, true, &seq, 1, false);
    }
}

void DecodeStep::append(BatchPass &pass, const Input &input) {
    rollback();
    check(pass, input);
    activate(input.layout->n_sequences);
    const std::int32_t before = pass.n_rows();
    try {
        add_rows(pass, input);
        add_content(pass, input);
    } catch (...) {
        pass.shrink(before);
        throw;
    }
    pass_ = &pass;
    serial_ = pass.serial();
    n_logit_rows_ = 0;
    root_row_ = before + input.n_refeed;
    root_pos_ = n_past_ + input.n_refeed;
    n_pads_ = input.pad_rows;
    pending_ = *input.layout;
    appended_ = true;
    if (was_read_.size() > 1) {
        reads_all_ = std::find(was_read_.begin(), was_read_.end(), 0) == was_read_.end();
    }
    was_read_.assign(static_cast<std::size_t>(pending_.n_nodes), 0);
}

void DecodeStep::settle(BatchPass &pass) {
    if (pass_ != &pass || serial_ != pass.serial()) {
        return; // no row of this session was in it
    }
    decode_us_ += pass.last_us();
    if (pass.ran() && appended_) {
        layout_ = &pending_;
        n_logit_rows_ = pending_.n_rows();
        n_head_rows_ = pass.is_deferred() ? 0 : n_logit_rows_;
    } else if (pass.ran()) {
        n_past_ += n_prefill_;
    }
    appended_ = false;
    n_prefill_ = 0;
}

int DecodeStep::run(const Input &input) {
    if (input.kind == InputKind::embeddings && table_ == nullptr) {
        throw std::invalid_argument("mask rows need the embedding path and mask vectors");
    }
    own_.start(input.kind);
    append(own_, input);
    const int status = own_.decode(input.may_defer_head && defers_head());
    settle(own_);
    return status;
}

// Whether a deferred head is expected to cost less, when this pass is read as the last one was: all its nodes, because
// the drafter learns from them, or the accepted path; and the masks of one owner.
bool DecodeStep::defers_head() {
    if (head_way_ != HeadPolicy::Way::in_pass && head_us_ > 0.0) {
        head_policy_.observe(head_way_, n_way_rows_, head_us_);
    }
    head_way_ = HeadPolicy::Way::in_pass; // for part_end
    head_us_ = 0.0;
    const std::int32_t n_nodes = pending_.n_nodes;
    n_way_rows_ = pending_.n_rows();
    const std::int32_t first = reads_all_ ? n_nodes : std::min(n_nodes, HeadPolicy::rows_at_once);
    const std::int32_t later = n_way_rows_ > n_nodes ? part_end(n_nodes) - n_nodes : 0;
    head_way_ = head_policy_.choose(n_way_rows_, first, later);
    return head_way_ != HeadPolicy::Way::in_pass;
}

// Hands the cells of one sequence in positions [from, to) to the parking sequence.
void DecodeStep::park(std::int32_t sequence, std::int32_t from, std::int32_t to) const {
    if (park_ >= 0 && (to < 0 || from < to)) {
        llama_memory_seq_cp(memory_, seq_base_ + sequence, park_, from, to);
    }
}

// The same for the rows of the waiting pass from first_row on. A row's own sequence has one cell at its position.
void DecodeStep::park_rows(std::int32_t first_row) const {
    if (park_ < 0) {
        return;
    }
    for (std::int32_t r = first_row; r < layout_->n_rows(); ++r) {
        const std::int32_t pos = root_pos_ + layout_->depth[static_cast<std::size_t>(r)];
        park(layout_->first_sequence(r), pos, pos + 1);
    }
    if (layout_->n_rows() == 1) { // others are not padded
        park(layout_->first_sequence(0), root_pos_ + 1, root_pos_ + 1 + n_pads_);
    }
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
        park_rows(kept + 1);
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
    appended_ = false;
    n_prefill_ = 0;
    if (layout_ != nullptr) {
        park(0, n_past_, root_pos_);
        park_rows(0);
        layout_ = nullptr;
        const llama_seq_id parking = std::exchange(park_, -1); // they are parked
        truncate(n_past_);
        park_ = parking;
    }
}

bool DecodeStep::truncate(std::int32_t n) {
    layout_ = nullptr;
    bool ok = true;
    park(0, n, -1);
    for (std::int32_t s = 0; s < n_active_; ++s) {
        ok = llama_memory_seq_rm(memory_, seq_base_ + s, n, -1) && ok;
    }
    if (ok) {
        n_past_ = std::min(n_past_, n);
    }
    return ok;
}

void DecodeStep::clear() {
    if (park_ >= 0) {
        rollback();
        park(0, 0, -1);
    }
    layout_ = nullptr;
    for (std::int32_t s = 0; s < n_active_; ++s) {
        llama_memory_seq_rm(memory_, seq_base_ + s, -1, -1);
    }
    forget();
}

std::vector<std::uint8_t> DecodeStep::save() {
    rollback();
    std::vector<std::uint8_t> data(llama_state_seq_get_size(ctx_, seq_base_));
    data.resize(llama_state_seq_get_data(ctx_, data.data(), data.size(), seq_base_));
    return data;
}

bool DecodeStep::restore(const std::uint8_t *data, std::size_t size, std::int32_t n_past) {
    clear();
    if (llama_state_seq_set_data(ctx_, data, size, seq_base_) == 0) {
        clear();
        return false;
    }
    n_past_ = n_past;
    return true;
}

void DecodeStep::share(const DecodeStep &other, std::int32_t n) {
    if (other.ctx_ != ctx_ || &other == this || n < 0 || n > other.n_past_) {
        throw std::invalid_argument("only tokens stored by another session of the context can be shared");
    }
    clear();
    if (n > 0) {
        llama_memory_seq_cp(memory_, other.seq_base_, seq_base_, 0, n);
    }
    n_past_ = n;
}

void DecodeStep::forget() {
    layout_ = nullptr;
    appended_ = false;
    n_prefill_ = 0;
    n_active_ = 1;
    n_past_ = 0;
}

bool DecodeStep::is_readable(std::int32_t row) const {
    return pass_ != nullptr && pass_->serial() == serial_ && pass_->ran() && row >= 0 && row < n_logit_rows_;
}

bool DecodeStep::is_waiting(std::int32_t row) const { return is_readable(row) && pass_->is_waiting(root_row_ + row); }

void DecodeStep::check_row(std::int32_t row) const {
    if (!is_readable(row)) {
        throw std::out_of_range("row " + std::to_string(row) + " is not in the last pass");
    }
}

// The end of the rows that a row's logits are computed with.
std::int32_t DecodeStep::part_end(std::int32_t row) const {
    if (head_way_ == HeadPolicy::Way::whole) {
        return pending_.n_rows();
    }
    if (row < pending_.n_nodes) {
        return reads_all_ ? pending_.n_nodes : std::min(pending_.n_nodes, row + HeadPolicy::rows_at_once);
    }
    std::int32_t end = row + 1;
    while (end < pending_.n_rows() && pending_.first_sequence(end) == pending_.first_sequence(row)) {
        ++end;
    }
    return end;
}

// Logits of the rows [row, end), where they wait.
void DecodeStep::compute_head(std::int32_t row, std::int32_t end) {
    const double before = pass_->last_us();
    n_head_rows_ += pass_->need(root_row_ + row, end - row);
    decode_us_ += pass_->last_us() - before;
    head_us_ += pass_->last_us() - before;
}

const float *DecodeStep::logits(std::int32_t row) {
    check_row(row);
    if (static_cast<std::size_t>(row) < was_read_.size()) {
        was_read_[static_cast<std::size_t>(row)] = 1;
    }
    if (is_waiting(row)) {
        compute_head(row, part_end(row));
    }
    const float *values = llama_get_logits_ith(ctx_, root_row_ + row);
    if (values == nullptr) {
        throw std::out_of_range("row " + std::to_string(row) + " has no logits");
    }
    return values;
}

void DecodeStep::need(const std::int32_t *rows, std::size_t n) {
    for (std::size_t i = 0, end = 0; i < n; i = end) { // each stretch of rows that follow each other
        end = i + 1;
        while (end < n && rows[end] == rows[end - 1] + 1) {
            ++end;
        }
        check_row(rows[i]);
        check_row(rows[end - 1]);
        compute_head(rows[i], rows[end - 1] + 1);
    }
}

std::pair<std::int32_t, std::int32_t> DecodeStep::stored(std::int32_t sequence) const {
    return {llama_memory_seq_pos_min(memory_, seq_base_ + sequence),
            llama_memory_seq_pos_max(memory_, seq_base_ + sequence)};
}

} // namespace esp
