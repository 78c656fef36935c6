// Rows of token_embd.weight, dequantised on demand from the memory-mapped model file, never the whole table in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace esp {

class EmbeddingTable {
  public:
    // data: first byte of the tensor, n_bytes long, which must outlive this object. type: a ggml_type. scale:
    // multiplied into every value (what the id path of some architectures does inside the graph). Throws
    // std::invalid_argument.
    EmbeddingTable(const void *data, std::size_t n_bytes, int type, std::int64_t n_embd, std::int64_t n_vocab,
                   float scale);

    std::int64_t n_embd() const { return n_embd_; }
    std::int64_t n_vocab() const { return n_vocab_; }

    // out[n_embd]; the same values that ggml's get_rows produces. Throws std::out_of_range on a bad id.
    void row(std::int32_t token, float *out) const;

    // Gives the mapped pages back to the page cache, which the model's own mapping of the file shares. One row can map
    // 2 MiB around it, so without this the resident set would grow by the whole table. Does nothing unless file_mapped:
    // anonymous memory would be lost.
    void release() const;
    bool file_mapped = false; // set by who knows that data is a read-only mapping of a file

    // Mean and standard deviation over the vocabulary, per dimension, accumulated in double. mean, std: [n_embd].
    void moments(float *mean, float *std) const;

  private:
    const unsigned char *data_;
    std::size_t n_bytes_;
    int type_;
    std::int64_t n_embd_;
    std::int64_t n_vocab_;
    std::size_t row_bytes_;
    float scale_;
};

} // namespace esp
