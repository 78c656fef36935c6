// Rows of one llama_decode, brought by one DecodeStep or by several that share a context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/deferred_head.hpp"
#include "llama.h"
#include "llama/embedding_table.hpp"

namespace esp {

enum class InputKind { ids, embeddings };

// A llama_batch holds token ids or embeddings, never both, so the kind is chosen before the first row.
class BatchPass {
  public:
    // table may be null: then every pass goes through token ids.
    BatchPass(llama_context *ctx, const EmbeddingTable *table);

    // Forgets all rows; the logits of the pass before are no longer read.
    void start(InputKind kind);

    // A row: position, whether its logits are wanted, then its sequence ids (the one it sees through first) and its
    // token or vector of [n_embd].
    void open_row(llama_pos pos, bool output);
    void add_sequence(llama_seq_id id) { sequences_.push_back(id); }
    void set_token(std::int32_t token);
    void set_vector(const float *vector);
    void shrink(std::int32_t n_rows); // drops the rows from n_rows on

    // Runs the pass. Returns llama_decode's status (0 = done, 1 = no room, 2 = aborted, negative = failed). With
    // defer_head, and where our kernels compute the output head, logits wait until they are needed.
    int decode(bool defer_head = false);

    // Makes the logits of rows [row, row + n) readable, all of them wanted ones of a pass that ran. Returns the number
    // of rows that were computed for it: none where the head was not deferred, or where they were before.
    std::int32_t need(std::int32_t row, std::int32_t n);
    bool is_deferred() const { return !is_computed_.empty(); }
    bool is_waiting(std::int32_t row) const; // for need

    InputKind kind() const { return kind_; }
    std::int32_t n_rows() const { return static_cast<std::int32_t>(pos_.size()); }
    std::int32_t max_rows() const { return n_batch_; }
    std::uint64_t serial() const { return serial_; } // of the pass; grows with every start
    bool ran() const { return ran_; }                // whether the logits of this pass can be read
    double decode_us() const { return decode_us_; }  // all passes so far, with what was computed of deferred heads
    double last_us() const { return last_us_; }      // the last one
    const EmbeddingTable *table() const { return table_; }
    llama_context *context() const { return ctx_; }

  private:
    std::size_t output_number(std::int32_t row) const;

    llama_context *ctx_;
    const EmbeddingTable *table_;
    std::int32_t n_batch_;
    InputKind kind_ = InputKind::ids;
    std::uint64_t serial_ = 0;
    bool ran_ = false;
    double decode_us_ = 0.0;
    double last_us_ = 0.0;

    // batch buffers, reused
    std::vector<llama_token> tokens_;
    std::vector<float> vectors_;
    std::vector<llama_pos> pos_;
    std::vector<std::int8_t> output_;
    std::vector<std::size_t> sequence_start_;
    std::vector<llama_seq_id> sequences_;
    std::vector<std::int32_t> n_sequences_;
    std::vector<llama_seq_id *> sequence_ptr_;

    kernels::DeferredHead head_;
    std::vector<char> is_computed_; // by number among the rows with logits; empty where all are
};

} // namespace esp
