// The Python face of the native code. Addresses come in as integers from ctypes, wrapped once.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>

#include "core/logits.hpp"
#include "core/tree_layout.hpp"
#include "llama/batch_pass.hpp"
#include "llama/decode_step.hpp"
#include "llama/embedding_table.hpp"
#include "llama/hidden_states.hpp"
#include "llama/op_profile.hpp"
#include "llama/sampler.hpp"

namespace nb = nanobind;
using namespace nb::literals;

void bind_fused(nb::module_ &m);   // bindings_fused.cpp
void bind_kernels(nb::module_ &m); // bindings_kernels.cpp

namespace {

using Ints = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename T, typename... Shape> auto new_array(Shape... shape) {
    std::size_t size = 1;
    ((size *= static_cast<std::size_t>(shape)), ...);
    auto *data = new T[size == 0 ? 1 : size];
    nb::capsule owner(data, [](void *p) noexcept { delete[] static_cast<T *>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Shape)>, nb::c_contig>(
        data, {static_cast<std::size_t>(shape)...}, owner);
}

std::int32_t length(const Ints &array) { return static_cast<std::int32_t>(array.shape(0)); }

auto embedding_rows(const esp::EmbeddingTable &table, const Ints &ids) {
    auto out = new_array<float>(ids.shape(0), table.n_embd());
    for (std::size_t i = 0; i < ids.shape(0); ++i) {
        table.row(ids(i), out.data() + i * static_cast<std::size_t>(table.n_embd()));
        table.release();
    }
    return out;
}

auto embedding_moments(const esp::EmbeddingTable &table) {
    auto mean = new_array<float>(table.n_embd());
    auto std = new_array<float>(table.n_embd());
    {
        nb::gil_scoped_release release;
        table.moments(mean.data(), std.data());
    }
    return nb::make_tuple(mean, std);
}

esp::DecodeStep::Input input_of(const esp::DecodeStep &step, const esp::TreeLayout &layout, const Ints &tokens,
                                const Ints &refeed, const std::optional<Matrix> &masks,
                                const std::optional<Ints> &mask_index, std::int32_t pad_rows) {
    if (length(tokens) != layout.n_nodes) {
        throw std::invalid_argument("the pass needs one token per node");
    }
    const std::int32_t n_masks = layout.n_rows() - layout.n_nodes;
    esp::DecodeStep::Input input;
    input.layout = &layout;
    input.tokens = tokens.data();
    input.refeed = refeed.data();
    input.n_refeed = length(refeed);
    input.pad_rows = pad_rows;
    if (n_masks > 0) {
        if (!masks || !mask_index || length(*mask_index) != n_masks ||
            static_cast<std::int64_t>(masks->shape(1)) != step.n_embd()) {
            throw std::invalid_argument("mask vectors of the model's width and one index per mask row are required");
        }
        input.mask_vectors = masks->data();
        input.mask_index = mask_index->data();
        input.n_mask_vectors = static_cast<std::int32_t>(masks->shape(0));
    }
    return input;
}

int run(esp::DecodeStep &step, const esp::TreeLayout &layout, const Ints &tokens, const Ints &refeed,
        const std::optional<Matrix> &masks, const std::optional<Ints> &mask_index, std::int32_t pad_rows, bool by_id,
        bool may_defer_head) {
    esp::DecodeStep::Input input = input_of(step, layout, tokens, refeed, masks, mask_index, pad_rows);
    input.may_defer_head = may_defer_head;
    input.kind = by_id ? esp::InputKind::ids : esp::InputKind::embeddings;
    nb::gil_scoped_release release;
    return step.run(input);
}

void append(esp::DecodeStep &step, esp::BatchPass &pass, const esp::TreeLayout &layout, const Ints &tokens,
            const Ints &refeed, const std::optional<Matrix> &masks, const std::optional<Ints> &mask_index,
            std::int32_t pad_rows) {
    step.append(pass, input_of(step, layout, tokens, refeed, masks, mask_index, pad_rows));
}

nb::bytes save(esp::DecodeStep &step) {
    std::vector<std::uint8_t> data;
    {
        nb::gil_scoped_release release;
        data = step.save();
    }
    return nb::bytes(data.data(), data.size());
}

// Others run while a deferred head is computed.
const float *logits_of(esp::DecodeStep &step, std::int32_t row) {
    if (!step.is_waiting(row)) {
        return step.logits(row);
    }
    nb::gil_scoped_release release;
    return step.logits(row);
}

auto top_k(esp::DecodeStep &step, const Ints &rows, std::int32_t k, bool sketch) {
    if (k < 1 || k > step.n_vocab()) {
        throw std::invalid_argument("top_k needs 1 <= k <= n_vocab");
    }
    auto ids = new_array<std::int32_t>(rows.shape(0), k);
    auto logprobs = new_array<float>(rows.shape(0), k);
    const auto n = static_cast<std::size_t>(step.n_vocab());
    const auto width = static_cast<std::size_t>(k);
    if (rows.shape(0) > 0 && step.is_waiting(rows(0))) {
        nb::gil_scoped_release release;
        step.need(rows.data(), rows.shape(0));
    }
    for (std::size_t i = 0; i < rows.shape(0); ++i) {
        const float *logits = logits_of(step, rows(i));
        float *values = logprobs.data() + i * width;
        if (sketch) {
            esp::top_k_sketch(logits, n, width, ids.data() + i * width, values);
            continue;
        }
        esp::top_k(logits, n, width, ids.data() + i * width, values);
        const auto total = static_cast<float>(esp::log_sum_exp(logits, n));
        for (std::size_t j = 0; j < width; ++j) {
            values[j] -= total;
        }
    }
    return nb::make_tuple(ids, logprobs);
}

double logprob(esp::DecodeStep &step, std::int32_t row, std::int32_t token) {
    if (token < 0 || token >= step.n_vocab()) {
        throw std::out_of_range("token id outside the vocabulary");
    }
    const float *logits = logits_of(step, row);
    return logits[token] - esp::log_sum_exp(logits, static_cast<std::size_t>(step.n_vocab()));
}

auto logits_copy(esp::DecodeStep &step, std::int32_t row) {
    const float *logits = logits_of(step, row);
    auto out = new_array<float>(step.n_vocab());
    std::copy(logits, logits + step.n_vocab(), out.data());
    return out;
}

nb::dict struct_sizes() {
    nb::dict sizes;
    sizes["llama_batch"] = sizeof(llama_batch);
    sizes["llama_context_params"] = sizeof(llama_context_params);
    sizes["llama_model_params"] = sizeof(llama_model_params);
    sizes["llama_token_data"] = sizeof(llama_token_data);
    return sizes;
}

void bind_layout(nb::module_ &m) {
    using esp::TreeLayout;
    nb::class_<TreeLayout>(m, "TreeLayout", "Positions and sequence sets of the rows of a pass.")
        .def_static(
            "build",
            [](const Ints &parents, const Ints &masks) {
                if (parents.shape(0) != masks.shape(0)) {
                    throw std::invalid_argument("parents and masks must have one entry per node");
                }
                return TreeLayout::build(parents.data(), masks.data(), parents.shape(0));
            },
            "parents"_a, "masks"_a)
        .def_static("from_rows", &TreeLayout::from_rows, "depth"_a, "seq_offset"_a, "seq_ids"_a, "n_nodes"_a)
        .def_ro("depth", &TreeLayout::depth)
        .def_ro("seq_offset", &TreeLayout::seq_offset)
        .def_ro("seq_ids", &TreeLayout::seq_ids)
        .def_ro("n_nodes", &TreeLayout::n_nodes)
        .def_ro("n_sequences", &TreeLayout::n_sequences)
        .def_prop_ro("n_rows", &TreeLayout::n_rows);
}

void bind_pass(nb::module_ &m) {
    using esp::BatchPass;
    nb::class_<BatchPass>(m, "BatchPass", "Rows of one llama_decode, brought by several steps that share a context.")
        .def(
            "__init__",
            [](BatchPass *self, std::uintptr_t ctx, const esp::EmbeddingTable *table) {
                new (self) BatchPass(reinterpret_cast<llama_context *>(ctx), table);
            },
            "context"_a, "table"_a.none(), nb::keep_alive<1, 3>())
        .def(
            "start",
            [](BatchPass &self, bool by_id) { self.start(by_id ? esp::InputKind::ids : esp::InputKind::embeddings); },
            "by_id"_a, "Forget the rows of the last pass.")
        .def("decode", &BatchPass::decode, "defer_head"_a = false, nb::call_guard<nb::gil_scoped_release>(),
             "llama_decode's status")
        .def(
            "clear_memory", [](BatchPass &self) { llama_memory_clear(llama_get_memory(self.context()), false); },
            "Free every cell of the context; its steps must forget theirs.")
        .def_prop_ro("n_rows", &BatchPass::n_rows)
        .def_prop_ro("decode_us", &BatchPass::decode_us)
        .def_prop_ro("last_us", &BatchPass::last_us);
}

void bind_step(nb::module_ &m) {
    using esp::DecodeStep;
    nb::class_<DecodeStep>(m, "DecodeStep", "Passes over one llama_context and the repair of its KV cache.")
        .def(
            "__init__",
            [](DecodeStep *self, std::uintptr_t ctx, const esp::EmbeddingTable *table, std::int32_t seq_base,
               std::int32_t n_seq_max) {
                new (self) DecodeStep(reinterpret_cast<llama_context *>(ctx), table, seq_base, n_seq_max);
            },
            "context"_a, "table"_a.none(), "seq_base"_a, "n_seq_max"_a, nb::keep_alive<1, 3>())
        .def(
            "prefill",
            [](DecodeStep &self, const Ints &tokens, std::int32_t chunk) {
                nb::gil_scoped_release release;
                return self.prefill(tokens.data(), length(tokens), chunk);
            },
            "tokens"_a, "chunk"_a)
        .def("run", &run, "layout"_a, "tokens"_a, "refeed"_a, "masks"_a.none(), "mask_index"_a.none(), "pad_rows"_a,
             "by_id"_a, "may_defer_head"_a = false)
        .def("append", &append, "batch"_a, "layout"_a, "tokens"_a, "refeed"_a, "masks"_a.none(), "mask_index"_a.none(),
             "pad_rows"_a, nb::keep_alive<1, 2>(), "The rows of run, as part of a shared pass.")
        .def(
            "append_prefill",
            [](DecodeStep &self, esp::BatchPass &pass, const Ints &tokens) {
                self.append_prefill(pass, tokens.data(), length(tokens));
            },
            "batch"_a, "tokens"_a, nb::keep_alive<1, 2>(), "Trunk tokens, as part of a shared pass.")
        .def("settle", &DecodeStep::settle, "batch"_a, "Take up the outcome of a shared pass.")
        .def("defers_head", &DecodeStep::defers_head,
             "Whether a pass that only this step appended a tree to should be decoded with a deferred head.")
        .def(
            "commit",
            [](DecodeStep &self, const Ints &path, bool in_order) {
                return self.commit(path.data(), length(path), in_order);
            },
            "path"_a, "in_order"_a)
        .def("truncate", &DecodeStep::truncate, "n"_a)
        .def("rollback", &DecodeStep::rollback)
        .def("clear", &DecodeStep::clear)
        .def("park_in", &DecodeStep::park_in, "sequence"_a,
             "Where dropped cells go instead of being freed; -1 = freed.")
        .def("save", &save, "The trunk as bytes.")
        .def(
            "restore",
            [](DecodeStep &self, const nb::bytes &data, std::int32_t n_past) {
                const auto *bytes = static_cast<const std::uint8_t *>(data.data());
                const std::size_t size = data.size();
                nb::gil_scoped_release release;
                return self.restore(bytes, size, n_past);
            },
            "data"_a, "n_past"_a, "Replace the trunk by a saved one; False where the cache has no room for it.")
        .def("share", &DecodeStep::share, "other"_a, "n"_a, "Take over the first n tokens of another step's trunk.")
        .def("forget", &DecodeStep::forget, "Start over after the whole memory was cleared.")
        .def(
            "argmax",
            [](DecodeStep &self, std::int32_t row) {
                return esp::argmax(logits_of(self, row), static_cast<std::size_t>(self.n_vocab()));
            },
            "row"_a)
        .def(
            "top_k", [](DecodeStep &self, const Ints &rows, std::int32_t k) { return top_k(self, rows, k, false); },
            "rows"_a, "k"_a)
        .def(
            "top_k_sketch",
            [](DecodeStep &self, const Ints &rows, std::int32_t k) { return top_k(self, rows, k, true); }, "rows"_a,
            "k"_a, "top_k with estimated log-probabilities, in a fraction of its time.")
        .def("logprob", &logprob, "row"_a, "token"_a)
        .def("logits", &logits_copy, "row"_a, "A copy; for tests and analysis.")
        .def("stored", &DecodeStep::stored, "sequence"_a)
        .def_prop_ro("n_past", &DecodeStep::n_past)
        .def_prop_ro("n_active", &DecodeStep::n_active)
        .def_prop_ro("n_head_rows", &DecodeStep::n_head_rows,
                     "Rows of the last pass whose logits were computed so far.")
        .def_prop_ro("decode_us", &DecodeStep::decode_us);
}

void bind_hidden_states(nb::module_ &m) {
    using esp::HiddenStates;
    nb::class_<HiddenStates>(m, "HiddenStates", "Hidden states after every layer of the last pass of one context.")
        .def(nb::init<std::int32_t, std::int64_t>(), "n_layers"_a, "n_embd"_a)
        .def_prop_ro(
            "callback", [](const HiddenStates &) { return reinterpret_cast<std::uintptr_t>(&HiddenStates::on_tensor); },
            "Address for llama_context_params.cb_eval.")
        .def_prop_ro(
            "address", [](const HiddenStates &self) { return reinterpret_cast<std::uintptr_t>(&self); },
            "Address for llama_context_params.cb_eval_user_data.")
        .def("start", &HiddenStates::start, "Forget the last pass and record the next one.")
        .def("stop", &HiddenStates::stop)
        .def("n_rows", &HiddenStates::n_rows, "layer"_a)
        .def(
            "rows",
            [](const HiddenStates &self, std::int32_t layer) {
                const std::int64_t n = self.n_rows(layer);
                auto out = new_array<float>(n, self.n_embd());
                for (std::int64_t i = 0; i < n; ++i) {
                    std::copy_n(self.row(layer, i), self.n_embd(), out.data() + i * self.n_embd());
                }
                return out;
            },
            "layer"_a, "float32[n_rows, n_embd], a copy; for tests.")
        .def("keep", &HiddenStates::keep, "row"_a, "Remember one row of every layer across passes.")
        .def(
            "cosines",
            [](const HiddenStates &self, std::int64_t row) {
                auto out = new_array<double>(self.n_layers());
                self.cosines(row, out.data());
                return out;
            },
            "row"_a, "float64[n_layers] between a row and the remembered one.")
        .def_prop_ro("n_layers", &HiddenStates::n_layers)
        .def_prop_ro("n_embd", &HiddenStates::n_embd)
        .def_prop_ro("problem", &HiddenStates::problem);
}

using NodeTuple =
    std::tuple<std::string, std::string, std::string, std::string, std::int64_t, std::int64_t, double, bool>;

std::vector<NodeTuple> profiled_nodes(const esp::OpProfile &profile) {
    std::vector<NodeTuple> found;
    found.reserve(profile.nodes().size());
    for (const esp::OpProfile::Node &node : profile.nodes()) {
        found.emplace_back(ggml_op_name(node.op), node.name, node.weights, ggml_type_name(node.type), node.n_bytes,
                           node.macs, node.us, node.scales_norm);
    }
    return found;
}

void bind_op_profile(nb::module_ &m) {
    using esp::OpProfile;
    nb::class_<OpProfile>(m, "OpProfile", "Time of every node of the recorded pass of one context.")
        .def(nb::init<>())
        .def_prop_ro(
            "callback", [](const OpProfile &) { return reinterpret_cast<std::uintptr_t>(&OpProfile::on_tensor); },
            "Address for llama_context_params.cb_eval.")
        .def_prop_ro(
            "address", [](const OpProfile &self) { return reinterpret_cast<std::uintptr_t>(&self); },
            "Address for llama_context_params.cb_eval_user_data.")
        .def_rw("separate", &OpProfile::separate, "Compute every node alone, as backends other than the CPU need it.")
        .def(
            "start",
            [](OpProfile &self, std::uintptr_t context) { self.start(reinterpret_cast<llama_context *>(context)); },
            "context"_a, "Forget the last pass and record the next one.")
        .def("stop", &OpProfile::stop)
        .def("nodes", &profiled_nodes,
             "(op, name, weights, their type, bytes read, multiply-adds, microseconds, scales a norm)")
        .def_prop_ro("problem", &OpProfile::problem);
}

void bind_sampler(nb::module_ &m) {
    using esp::Sampler;
    using esp::SamplerParams;
    nb::class_<SamplerParams>(m, "SamplerParams")
        .def(nb::init<>())
        .def_rw("temperature", &SamplerParams::temperature)
        .def_rw("top_k", &SamplerParams::top_k)
        .def_rw("top_p", &SamplerParams::top_p)
        .def_rw("min_p", &SamplerParams::min_p)
        .def_rw("typical_p", &SamplerParams::typical_p)
        .def_rw("penalty_last_n", &SamplerParams::penalty_last_n)
        .def_rw("repeat_penalty", &SamplerParams::repeat_penalty)
        .def_rw("frequency_penalty", &SamplerParams::frequency_penalty)
        .def_rw("presence_penalty", &SamplerParams::presence_penalty)
        .def_rw("dry_multiplier", &SamplerParams::dry_multiplier)
        .def_rw("dry_base", &SamplerParams::dry_base)
        .def_rw("dry_allowed_length", &SamplerParams::dry_allowed_length)
        .def_rw("dry_penalty_last_n", &SamplerParams::dry_penalty_last_n)
        .def_rw("dry_breakers", &SamplerParams::dry_breakers)
        .def_rw("logit_bias", &SamplerParams::logit_bias)
        .def_rw("grammar", &SamplerParams::grammar)
        .def_rw("seed", &SamplerParams::seed);
    nb::class_<Sampler>(m, "Sampler", "llama.cpp's filters, then a keyed Gumbel draw.")
        .def(
            "__init__",
            [](Sampler *self, std::uintptr_t model, const SamplerParams &params) {
                const SamplerParams own = params; // another thread may change them meanwhile
                nb::gil_scoped_release release;   // a large grammar takes seconds
                new (self) Sampler(reinterpret_cast<const llama_model *>(model), own);
            },
            "model"_a, "params"_a)
        .def(
            "pick",
            [](Sampler &self, esp::DecodeStep &step, std::int32_t row, std::uint64_t position) {
                const float *const logits = logits_of(step, row);
                if (!self.may_be_slow()) {
                    return self.pick(logits, position);
                }
                nb::gil_scoped_release release;
                return self.pick(logits, position);
            },
            "step"_a, "row"_a, "position"_a)
        .def(
            "pick_logits",
            [](Sampler &self, const Floats &logits, std::uint64_t position) {
                if (static_cast<std::int32_t>(logits.shape(0)) != self.n_vocab()) {
                    throw std::invalid_argument("pick_logits needs one logit per token of the vocabulary");
                }
                return self.pick(logits.data(), position);
            },
            "logits"_a, "position"_a)
        .def(
            "accept",
            [](Sampler &self, std::int32_t token, bool generated) {
                if (!self.may_be_slow()) {
                    self.accept(token, generated);
                    return;
                }
                nb::gil_scoped_release release;
                self.accept(token, generated);
            },
            "token"_a, "generated"_a);
}

} // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native core of esp_edge: passes over draft trees, embedding rows, sampling.";
    m.attr("LLAMA_CPP_PYTHON_VERSION") = ESP_EDGE_LLAMA_VERSION;
    m.def("struct_sizes", &struct_sizes, "sizeof of the llama.h structs this module was compiled with.");
    m.def("keyed_gumbel", &esp::keyed_gumbel, "seed"_a, "position"_a, "token"_a,
          "Standard Gumbel noise that depends on nothing but its arguments.");
    m.def(
        "argmax", [](const Floats &x) { return x.shape(0) == 0 ? -1 : esp::argmax(x.data(), x.shape(0)); }, "logits"_a);
    m.def("log_sum_exp", [](const Floats &x) { return esp::log_sum_exp(x.data(), x.shape(0)); }, "logits"_a);
    m.def(
        "top_k",
        [](const Floats &x, std::size_t k) {
            const std::size_t n = std::min(k, x.shape(0));
            auto ids = new_array<std::int32_t>(n);
            auto values = new_array<float>(n);
            esp::top_k(x.data(), x.shape(0), n, ids.data(), values.data());
            return nb::make_tuple(ids, values);
        },
        "logits"_a, "k"_a, "Largest k values, ties by lower index.");
    nb::class_<esp::EmbeddingTable>(m, "EmbeddingTable", "Token embeddings, dequantised on demand.")
        .def(
            "__init__",
            [](esp::EmbeddingTable *self, std::uintptr_t address, std::size_t n_bytes, int type, std::int64_t n_embd,
               std::int64_t n_vocab, float scale) {
                new (self)
                    esp::EmbeddingTable(reinterpret_cast<const void *>(address), n_bytes, type, n_embd, n_vocab, scale);
            },
            "address"_a, "n_bytes"_a, "ggml_type"_a, "n_embd"_a, "n_vocab"_a, "scale"_a)
        .def("rows", &embedding_rows, "token_ids"_a, "float32[len(token_ids), n_embd]")
        .def("moments", &embedding_moments, "(mean, std) over the vocabulary, each float32[n_embd]")
        .def_rw("file_mapped", &esp::EmbeddingTable::file_mapped,
                "Whether the data is a read-only file mapping, whose pages may be given back after every read.")
        .def_prop_ro("n_embd", &esp::EmbeddingTable::n_embd)
        .def_prop_ro("n_vocab", &esp::EmbeddingTable::n_vocab);
    bind_layout(m);
    bind_pass(m);
    bind_step(m);
    bind_hidden_states(m);
    bind_op_profile(m);
    bind_sampler(m);
    bind_fused(m);
    bind_kernels(m);
}
