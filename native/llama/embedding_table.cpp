#include "llama/embedding_table.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml.h"

#if defined(__linux__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define ESP_EDGE_CAN_RELEASE 1
#endif

namespace esp {

EmbeddingTable::EmbeddingTable(const void *data, std::size_t n_bytes, int type, std::int64_t n_embd,
                               std::int64_t n_vocab, float scale)
    : data_(static_cast<const unsigned char *>(data)), n_bytes_(n_bytes), type_(type), n_embd_(n_embd),
      n_vocab_(n_vocab), row_bytes_(0), scale_(scale) {
    if (data == nullptr || type < 0 || type >= GGML_TYPE_COUNT || n_embd <= 0 || n_vocab <= 0) {
        throw std::invalid_argument("embedding table: no data, or a type or shape out of range");
    }
    const auto ggml_type_id = static_cast<enum ggml_type>(type);
    const ggml_type_traits *traits = ggml_get_type_traits(ggml_type_id);
    if (traits->blck_size <= 0 || n_embd % traits->blck_size != 0 ||
        (type != GGML_TYPE_F32 && traits->to_float == nullptr)) {
        throw std::invalid_argument(std::string("embedding table: rows of type ") + traits->type_name +
                                    " cannot be dequantised");
    }
    row_bytes_ = ggml_row_size(ggml_type_id, n_embd);
    if (row_bytes_ == 0 || static_cast<std::size_t>(n_vocab) > n_bytes / row_bytes_) {
        throw std::invalid_argument("embedding table: the tensor is larger than its data");
    }
}

void EmbeddingTable::row(std::int32_t token, float *out) const {
    if (token < 0 || token >= n_vocab_) {
        throw std::out_of_range("token id " + std::to_string(token) + " is outside the vocabulary of " +
                                std::to_string(n_vocab_));
    }
    const unsigned char *src = data_ + row_bytes_ * static_cast<std::size_t>(token);
    if (type_ == GGML_TYPE_F32) {
        std::memcpy(out, src, row_bytes_);
    } else {
        ggml_get_type_traits(static_cast<enum ggml_type>(type_))->to_float(src, out, n_embd_);
    }
    if (scale_ != 1.0f) {
        for (std::int64_t i = 0; i < n_embd_; ++i) {
            out[i] *= scale_;
        }
    }
}

void EmbeddingTable::release() const {
#ifdef ESP_EDGE_CAN_RELEASE
    if (!file_mapped) {
        return;
    }
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<std::uintptr_t>(data_) / page * page;
    const auto end = reinterpret_cast<std::uintptr_t>(data_) + n_bytes_;
    madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED); // a hint: failing costs nothing
#endif
}

void EmbeddingTable::moments(float *mean, float *std) const {
    const auto n = static_cast<std::size_t>(n_embd_);
    std::vector<float> values(n);
    std::vector<double> sum(n, 0.0);
    std::vector<double> squares(n, 0.0);
    for (std::int64_t token = 0; token < n_vocab_; ++token) {
        row(static_cast<std::int32_t>(token), values.data());
        if (token % 1024 == 0) {
            release();
        }
        for (std::size_t i = 0; i < n; ++i) {
            sum[i] += values[i];
            squares[i] += static_cast<double>(values[i]) * values[i];
        }
    }
    release();
    const auto count = static_cast<double>(n_vocab_);
    for (std::size_t i = 0; i < n; ++i) {
        const double m = sum[i] / count;
        mean[i] = static_cast<float>(m);
        std[i] = static_cast<float>(std::sqrt(std::max(0.0, squares[i] / count - m * m)));
    }
}

} // namespace esp
