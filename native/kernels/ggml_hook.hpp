// The way into ggml's CPU backend: every operation is offered to a list of "extra buffer types" before ggml computes it
// itself. An entry of ours answers for the matrix products of weights that were marked, on ggml's own threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

struct ggml_tensor;
struct llama_model;

namespace esp::kernels {

// Puts the entry in place, once a process; nothing is computed by it until weights are marked. Must not run while
// anything is being computed. Returns the name of the instruction set, empty where this CPU has no kernels. Throws
// std::runtime_error where llama.cpp's libraries do not offer what it takes.
std::string install();

struct TakeSettings {
    const char *limit = nullptr;     // best_kernels's
    int n_threads = 1;               // that repack
    bool repack = false;             // keep the weights once more, as the kernels want them
    std::set<std::string> lookups{}; // names of matrices whose rows are only looked up: they are not repacked
};

// Weights that the kernels compute with. Must be kept until nothing is computed with them any more.
class Taken {
  public:
    std::map<std::string, int> matrices; // how many of which ggml type
    std::size_t repacked_bytes = 0;

    Taken();
    ~Taken();
    Taken(const Taken &) = delete;
    Taken &operator=(const Taken &) = delete;

    struct Memory;
    std::unique_ptr<Memory> memory;
};

// Hands matrices to the kernels: those that have kernels and lie in host memory, in no extra buffer type. If there is
// any, attention behind all such matrices is ours, too. Repacked
// weights that are mapped from a file need not stay in memory: their pages are given back, and read again when needed.
// Throws std::bad_alloc where the memory for repacked weights cannot be had; then nothing was taken.
std::unique_ptr<Taken> take(const std::vector<ggml_tensor *> &weights, const TakeSettings &settings);

// The same for all matrices of a model.
std::unique_ptr<Taken> take_over(const llama_model *model, const TakeSettings &settings);

// Matrix products computed here so far, in all contexts.
std::int64_t n_products();

// The same of attention.
std::int64_t n_attentions();

} // namespace esp::kernels
