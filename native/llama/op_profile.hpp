// The time of every node of a pass, read through llama.cpp's callbacks.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "ggml.h"
#include "llama.h"

namespace esp {

// Records one pass of one context, node by node, in one of two ways.
//
// Joint: the evaluation callback only lists the nodes and asks for none, so the graph is computed as always, fused
// nodes and all. The CPU backend calls the abort callback behind every node, on the thread that called llama_decode;
// the time from call to call is the node's. It holds the wait for the slowest thread of the node before. Costs a clock
// per node.
//
// Separate: every node is asked for, so that the scheduler computes it alone and waits for it. Works on every backend,
// but each node pays for a graph of its own, and nothing is fused.
//
// on_tensor and the address of this object go into llama_context_params (cb_eval); it must outlive the context.
class OpProfile {
  public:
    struct Node {
        ggml_op op = GGML_OP_NONE;
        ggml_type type = GGML_TYPE_F32;   // of its weights
        char name[GGML_MAX_NAME] = {};    // of its result
        char weights[GGML_MAX_NAME] = {}; // of its first source
        std::int64_t n_bytes = 0;         // of weights or of K and V that it reads once; 0 for small operations
        std::int64_t macs = 0;            // multiply-adds of a matrix product or of attention
        double us = 0.0;                  // 0 where it was fused with the node before
        bool scales_norm = false;         // multiplies the node before it, which is an RMS norm
    };

    OpProfile() = default;
    OpProfile(const OpProfile &) = delete; // a context knows the address
    OpProfile &operator=(const OpProfile &) = delete;

    bool separate = false; // how the next pass is recorded

    // A ggml_backend_sched_eval_callback and a ggml_abort_callback. Neither ends the computation: trouble is told by
    // problem().
    static bool on_tensor(ggml_tensor *tensor, bool ask, void *self) noexcept;
    static bool on_node(void *self) noexcept;

    void start(llama_context *ctx); // forgets the last pass; the next one is recorded, until stop
    void stop();                    // before the context goes away

    const std::vector<Node> &nodes() const { return nodes_; } // of the recorded pass, in order, views left out
    const char *problem() const { return problem_; }          // why the record cannot be used; empty when it can

  private:
    using Clock = std::chrono::steady_clock;

    bool list(const ggml_tensor &tensor); // whether the node computes anything
    void assign();                        // gives the times of one graph to its nodes
    void fail(const char *why) { problem_ = *problem_ == '\0' ? why : problem_; }

    llama_context *ctx_ = nullptr; // while recording
    std::vector<Node> nodes_;
    std::size_t n_assigned_ = 0;            // nodes of the graphs before
    std::vector<Clock::time_point> stamps_; // behind the nodes of this graph
    Clock::time_point begin_;               // of this graph or node
    const ggml_tensor *last_ = nullptr;     // listed or left out
    const char *problem_ = "";
};

} // namespace esp
