// The way into ggml's CPU backend: every operation is offered to a list of "extra buffer types" before ggml computes it
// itself. An entry of ours answers for the matrix products of weights that were marked, on ggml's own threads.
#pragma once

#include <cstdint>
#include <map>
#include <string>

struct ggml_tensor;
struct llama_model;

namespace esp::kernels {

// Puts the entry in place, once a process; nothing is computed by it until weights are marked. Must not run while
// anything is being computed. Returns the name of the instruction set, empty where this CPU has no kernels. Throws
// std::runtime_error where llama.cpp's libraries do not offer what it takes.
std::string install();

// Hands the weights of a model that have kernels to them: quantised or floating-point matrices in host memory that no
// other extra buffer type holds. `limit` is best_kernels's. Returns how many matrices of which type (by name) were
// taken.
std::map<std::string, int> take_over(const llama_model *model, const char *limit);

// Hands over one matrix, under the same conditions; false where they do not hold or install() was not called.
bool take(ggml_tensor *weights, const char *limit);

// Matrix products computed here so far, in all contexts.
std::int64_t n_products();

} // namespace esp::kernels
