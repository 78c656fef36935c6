// One session's part of a pass of the target model (root + draft nodes + mask rows), and the repair of the KV cache.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/head_policy.hpp"
#include "core/tree_layout.hpp"
#include "llama.h"
#include "llama/batch_pass.hpp"
#include "llama/embedding_table.hpp"

namespace esp {

// A session's view of a llama_context: sequences [seq_base, seq_base + n_seq_max) of a unified KV cache.
//
// Invariant between passes: cells of positions 0..n_past-1 belong to every active sequence, nothing else is stored. The
// root of the next pass (the last committed token) has no cell yet. Sequences become active when a tree first needs
// them, so plain decoding pays for one.
//
// A pass of its own is prefill or run. In a pass shared with other sessions, each appends its rows to one BatchPass,
// and after its decode each settles, reads its logits and commits.
class DecodeStep {
  public:
    // table may be null: then every pass goes through token ids and masks are refused.
    DecodeStep(llama_context *ctx, const EmbeddingTable *table, std::int32_t seq_base, std::int32_t n_seq_max);

    // Appends tokens to the trunk through the id path in chunks of at most chunk rows. Returns llama_decode's status (0
    // = done, 1 = no room, 2 = aborted, negative = failed); on failure the trunk is what had been there before the
    // call.
    int prefill(const std::int32_t *tokens, std::int32_t n, std::int32_t chunk);

    // One pass: the trunk continues with refeed tokens, then comes the tree, whose root is tokens[0]. Tokens:
    // [layout.n_nodes]; masks: [n_mask_vectors, n_embd] where mask row r reads vector mask_index[r]. pad_rows: rows
    // appended to the pass and read by nobody (exact mode). Returns llama_decode's status.
    struct Input {
        const TreeLayout *layout = nullptr;
        const std::int32_t *tokens = nullptr;
        const std::int32_t *refeed = nullptr;
        std::int32_t n_refeed = 0;
        const float *mask_vectors = nullptr;
        const std::int32_t *mask_index = nullptr;
        std::int32_t n_mask_vectors = 0;
        std::int32_t pad_rows = 0;
        InputKind kind = InputKind::embeddings; // of a pass of its own; a shared one knows its kind
        bool may_defer_head = false;            // of a pass of its own
    };
    int run(const Input &input);

    // The same for a pass shared with other sessions of the context: append this session's rows (or trunk tokens of
    // which no logits are wanted), let the pass decode, then settle. When append throws, the pass is as before.
    void append(BatchPass &pass, const Input &input);
    void append_prefill(BatchPass &pass, const std::int32_t *tokens, std::int32_t n);
    void settle(BatchPass &pass);

    // Whether a pass that only this session appended a tree to should be decoded with a deferred head.
    bool defers_head();

    // Keeps the root and the accepted path of the last pass, drops every other row. With in_order, only the part of the
    // path whose rows directly follow the root is kept, so that cells stay in position order. Returns the number of
    // path nodes kept; the caller feeds the rest again.
    std::int32_t commit(const std::int32_t *path, std::int32_t n, bool in_order);

    // Forgets everything from position n on. Returns false where the memory cannot (recurrent models).
    bool truncate(std::int32_t n);
    // Drops the rows of a pass that will not be committed.
    void rollback();
    void clear();

    // Dropped cells are not freed but handed to this sequence, which no row sees through; -1 = they are freed. A freed
    // cell in front of another session's cells would be filled by that session's next rows, out of position order.
    void park_in(llama_seq_id sequence) { park_ = sequence; }

    // The trunk as bytes, and back. restore replaces what is stored and returns false, with an empty trunk, where the
    // cache has no room for it.
    std::vector<std::uint8_t> save();
    bool restore(const std::uint8_t *data, std::size_t size, std::int32_t n_past);
    // Takes over the first n tokens of another session's trunk, whose cells then belong to both.
    void share(const DecodeStep &other, std::int32_t n);
    // The caller emptied the whole memory.
    void forget();

    // Of the last pass; throws std::out_of_range. Where the head was deferred, they are computed now, and with them
    // those of the rows behind this one that are likely to be asked for next: nodes, or the other masks of an owner.
    const float *logits(std::int32_t row);
    // The same for rows that are about to be asked for, in rising order: together they cost less.
    void need(const std::int32_t *rows, std::size_t n);
    // Whether the logits of a row of the last pass would be computed now; false for what is no such row.
    bool is_waiting(std::int32_t row) const;
    // Rows of the last pass whose logits were computed so far.
    std::int32_t n_head_rows() const { return n_head_rows_; }
    std::int32_t n_past() const { return n_past_; }
    std::int32_t n_vocab() const { return n_vocab_; }
    std::int32_t n_active() const { return n_active_; }
    std::int64_t n_embd() const { return table_ == nullptr ? 0 : table_->n_embd(); }
    // All llama_decode calls so far that this session had rows in, deferred heads included.
    double decode_us() const { return decode_us_; }
    llama_context *context() const { return ctx_; }
    // Lowest and highest stored position of one of the session's sequences, -1 when empty.
    std::pair<std::int32_t, std::int32_t> stored(std::int32_t sequence) const;

  private:
    void activate(std::int32_t n_sequences);
    void add_row(BatchPass &pass, std::int32_t pos, bool output, const std::int32_t *seqs, std::int32_t n_seqs,
                 bool everywhere) const;
    void add_rows(BatchPass &pass, const Input &input) const;
    void add_content(BatchPass &pass, const Input &input) const;
    void check(const BatchPass &pass, const Input &input) const;
    void park(std::int32_t sequence, std::int32_t from, std::int32_t to) const;
    void park_rows(std::int32_t first_row) const;
    bool is_readable(std::int32_t row) const;
    void check_row(std::int32_t row) const;
    std::int32_t part_end(std::int32_t row) const;
    void compute_head(std::int32_t row, std::int32_t end);

    llama_context *ctx_;
    llama_memory_t memory_;
    const EmbeddingTable *table_;
    std::int32_t seq_base_;
    std::int32_t n_seq_max_;
    std::int32_t n_vocab_;
    std::int32_t n_active_ = 1;
    std::int32_t n_past_ = 0;
    llama_seq_id park_ = -1;
    double decode_us_ = 0.0;

    // the pass that waits for commit
    const TreeLayout *layout_ = nullptr; // null once committed
    std::int32_t root_pos_ = 0;
    std::int32_t root_row_ = 0;
    std::int32_t n_pads_ = 0;
    TreeLayout pending_; // copy of the sequence bookkeeping, so that a layout may go away

    // the part in the last pass
    BatchPass own_;             // for passes of this session alone
    BatchPass *pass_ = nullptr; // whose logits are read
    std::uint64_t serial_ = 0;
    std::int32_t n_logit_rows_ = 0;
    std::int32_t n_prefill_ = 0; // trunk rows appended and not settled
    bool appended_ = false;      // a tree was

    HeadPolicy head_policy_;
    HeadPolicy::Way head_way_ = HeadPolicy::Way::in_pass; // of the last pass that asked
    std::int32_t n_way_rows_ = 0;                         // its rows
    double head_us_ = 0.0;                                // what was read of its head took
    std::vector<char> was_read_;                          // by node of the last pass
    bool reads_all_ = true;                               // the last pass with drafts had all its nodes read
    std::int32_t n_head_rows_ = 0;
};

} // namespace esp
