// Weights once more, as the kernels want them.
#pragma once

#include "kernels/kernels.hpp"

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

namespace esp::kernels {

// A matrix to repack.
struct Repacking {
    Matmul matrix; // its weights
    const FormatKernel *kernel;
    bool is_mapped; // from a file: its pages are given back when they have been read
};

// Matrices that were repacked, in one stretch of memory.
class RepackedMemory {
  public:
    std::size_t size() const { return size_; }

    // The repacked form of the matrix with these weights, null where there is none.
    const std::byte *of(const void *weights) const {
        const auto found = places_.find(weights);
        return found == places_.end() ? nullptr : memory_.get() + found->second;
    }

  private:
    struct Free {
        void operator()(std::byte *memory) const;
    };

    std::unique_ptr<std::byte, Free> memory_;
    std::size_t size_ = 0;
    std::map<const void *, std::size_t> places_;

    friend RepackedMemory repack(const std::vector<Repacking> &matrices, int n_threads);
};

// Throws std::bad_alloc.
RepackedMemory repack(const std::vector<Repacking> &matrices, int n_threads);

} // namespace esp::kernels
