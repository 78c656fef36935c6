// The Python face of the fused drafter; bindings.cpp calls bind_fused.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "core/fused_drafter.hpp"
#include "core/logits.hpp"
#include "llama/decode_step.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Ints = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntRows = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename T, typename From> auto array_of(const From &values) {
    auto *data = new T[values.empty() ? 1 : values.size()];
    std::transform(values.begin(), values.end(), data, [](auto x) { return static_cast<T>(x); });
    nb::capsule owner(data, [](void *p) noexcept { delete[] static_cast<T *>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>(data, {values.size()}, owner);
}

void require(bool ok, const char *what) {
    if (!ok) {
        throw std::invalid_argument(what);
    }
}

bool same_shape(const IntRows &ids, const FloatRows &logprobs) {
    return ids.shape(0) == logprobs.shape(0) && ids.shape(1) == logprobs.shape(1);
}

auto draft(esp::FusedDrafter &self, std::int32_t rows, std::int32_t depth, std::int32_t sequences, std::int32_t masks,
           const Floats &cost, double price, bool dense) {
    require(rows >= 1 && depth >= 0 && sequences >= 1 && masks >= 0, "a pass has at least a root and one sequence");
    esp::PassBudget budget;
    budget.rows = rows;
    budget.depth = depth;
    budget.sequences = sequences;
    budget.masks = masks;
    budget.cost = cost.data();
    budget.n_cost = cost.shape(0);
    budget.price = price;
    budget.dense = dense;
    esp::PlannedTree tree;
    {
        nb::gil_scoped_release release;
        tree = self.draft(budget);
    }
    return nb::make_tuple(array_of<std::int32_t>(tree.tokens), array_of<std::int32_t>(tree.parents),
                          array_of<float>(tree.probs), array_of<std::int32_t>(tree.masks),
                          array_of<std::uint8_t>(tree.sources), tree.expected);
}

// Best next tokens of rows of a pass, [n, width].
struct Ranks {
    Ranks(std::size_t n, std::size_t row_width) : width(row_width), ids(n * width), logprobs(n * width) {}

    std::size_t width;
    std::vector<std::int32_t> ids;
    std::vector<float> logprobs;
};

// Of rows first..first+n-1. A compiled step is read in place, other outputs through their method.
Ranks ranks_of(const nb::object &outputs, std::size_t first, std::size_t n, std::size_t width) {
    Ranks found(n, width);
    std::vector<std::int32_t> rows(n);
    std::iota(rows.begin(), rows.end(), static_cast<std::int32_t>(first));
    if (nb::isinstance<esp::DecodeStep>(outputs)) {
        auto &step = nb::cast<esp::DecodeStep &>(outputs);
        const auto n_vocab = static_cast<std::size_t>(step.n_vocab());
        require(width <= n_vocab, "a row has no more best next tokens than the vocabulary");
        if (n > 0 && step.is_waiting(rows.front())) { // others run while a deferred head is computed
            nb::gil_scoped_release release;
            step.need(rows.data(), n);
        }
        for (std::size_t i = 0; i < n; ++i) {
            esp::top_k_sketch(step.logits(rows[i]), n_vocab, width, found.ids.data() + i * width,
                              found.logprobs.data() + i * width);
        }
        return found;
    }
    const nb::object ranked = outputs.attr("top_k_sketch")(array_of<std::int32_t>(rows), width);
    const auto [ids, logprobs] = nb::cast<std::tuple<IntRows, FloatRows>>(ranked);
    require(same_shape(ids, logprobs) && ids.shape(0) == n && ids.shape(1) == width,
            "best next tokens of every row were asked for, another number was found");
    std::copy_n(ids.data(), n * width, found.ids.begin());
    std::copy_n(logprobs.data(), n * width, found.logprobs.begin());
    return found;
}

void check_pass(const Ints &tokens, const Ints &parents, const Ints &masks, const std::vector<std::int32_t> &path) {
    const std::size_t n = tokens.shape(0);
    require(n > 0 && parents.shape(0) == n && masks.shape(0) == n, "a pass needs a parent and masks per node");
    for (std::size_t i = 0; i < n; ++i) {
        require(i == 0 || (parents(i) >= 0 && parents(i) < static_cast<std::int32_t>(i)),
                "a parent comes before its child");
        require(masks(i) >= 0, "a node cannot have a negative number of masks");
    }
    std::int32_t above = 0;
    for (const std::int32_t node : path) {
        require(node > 0 && node < static_cast<std::int32_t>(n) && parents(static_cast<std::size_t>(node)) == above,
                "the path does not run through the tree");
        above = node;
    }
}

void observe(esp::FusedDrafter &self, const nb::object &outputs, const Ints &tokens, const Ints &parents,
             const Ints &masks, const std::vector<std::int32_t> &path, std::int32_t bonus, std::size_t width,
             std::size_t mask_width) {
    check_pass(tokens, parents, masks, path);
    const std::size_t n = tokens.shape(0);
    const auto anchor = static_cast<std::size_t>(path.empty() ? 0 : path.back());
    const auto first_mask = n + static_cast<std::size_t>(std::accumulate(masks.data(), masks.data() + anchor, 0));
    const std::size_t n_slots = std::min(static_cast<std::size_t>(masks(anchor)), esp::FusedDrafter::max_slots);
    const Ranks nodes = ranks_of(outputs, 0, n, width);
    const Ranks slots = n_slots > 0 ? ranks_of(outputs, first_mask, n_slots, mask_width) : Ranks(0, 0);
    esp::FusedDrafter::Pass pass;
    pass.tokens = tokens.data();
    pass.parents = parents.data();
    pass.n_nodes = n;
    pass.path = path.data();
    pass.n_path = path.size();
    pass.bonus = bonus;
    pass.ids = nodes.ids.data();
    pass.logprobs = nodes.logprobs.data();
    pass.width = nodes.width;
    pass.mask_ids = slots.ids.data();
    pass.mask_logprobs = slots.logprobs.data();
    pass.n_slots = n_slots;
    pass.mask_width = slots.width;
    self.observe(pass);
}

} // namespace

void bind_fused(nb::module_ &m) {
    using Drafter = esp::FusedDrafter;
    nb::class_<Drafter>(m, "FusedDrafter", "One draft tree from copying, remembered rows, masks and last logits.")
        .def(nb::init<>())
        .def(
            "begin",
            [](Drafter &self, const Ints &tokens, bool keep, const Ints &expected) {
                require(tokens.shape(0) > 0, "a prompt has at least one token");
                self.begin(tokens.data(), tokens.shape(0), keep, expected.data(), expected.shape(0));
            },
            "tokens"_a, "keep"_a, "expected"_a, "expected: text that the answer may repeat")
        .def(
            "learn_prompt",
            [](Drafter &self, std::size_t first, const IntRows &ids, const FloatRows &logprobs) {
                require(same_shape(ids, logprobs), "ids and log-probabilities differ");
                require(first + ids.shape(0) <= self.n_prompt(), "the prompt has fewer rows");
                self.learn_prompt(first, ids.data(), logprobs.data(), ids.shape(0), ids.shape(1));
            },
            "first"_a, "ids"_a, "logprobs"_a)
        .def("sampled", &Drafter::sampled, "temperature"_a, "seed"_a)
        .def("draft", &draft, "rows"_a, "depth"_a, "sequences"_a, "masks"_a, "cost"_a, "price"_a, "dense"_a = false,
             "(token_ids, parents, probs, masks, sources, expected tokens)")
        .def("observe", &observe, "outputs"_a, "tokens"_a, "parents"_a, "masks"_a, "path"_a, "bonus"_a, "width"_a,
             "mask_width"_a, "outputs: of the pass; width and mask_width: best tokens read of a node and of a mask")
        .def_prop_rw(
            "weights", [](Drafter &self) { return array_of<float>(self.model().weights()); },
            [](Drafter &self, const Floats &weights) {
                require(weights.shape(0) == esp::CandidateModel::n_weights, "the weights are of another version");
                std::copy_n(weights.data(), weights.shape(0), self.model().weights().begin());
            },
            nb::for_getter(nb::rv_policy::move), "float32[n_weights], classes of features")
        .def_prop_rw(
            "corrections", [](Drafter &self) { return array_of<float>(self.model().corrections()); },
            [](Drafter &self, const Floats &numbers) {
                require(numbers.shape(0) == esp::CandidateModel::n_corrections,
                        "the corrections are of another version");
                self.model().set_corrections(numbers.data());
            },
            nb::for_getter(nb::rv_policy::move), "float32[n_corrections], what calibration observed in each band")
        .def(
            "set_learning",
            [](Drafter &self, float rate, bool calibrate) {
                self.model().set_rate(rate);
                self.model().set_calibrate(calibrate);
            },
            "rate"_a, "calibrate"_a)
        .def(
            "set_sources",
            [](Drafter &self, bool suffix, bool adjacency, bool masks, bool last) {
                self.sources() = {suffix, adjacency, masks, last};
            },
            "suffix"_a, "adjacency"_a, "masks"_a, "last"_a)
        .def(
            "set_apart", [](Drafter &self, bool on) { self.model().set_apart(on); }, "on"_a,
            "Each candidate by its best source alone.")
        .def("set_mask_gain", &Drafter::set_mask_gain, "gain"_a, "fixed"_a)
        .def_prop_ro("mask_gain", &Drafter::mask_gain)
        .def(
            "reliability",
            [](Drafter &self) {
                nb::list bands;
                for (const auto &band : self.model().reliability()) {
                    bands.append(nb::make_tuple(band.predicted, band.hits, band.tries));
                }
                return bands;
            },
            "(sum of predictions, hits, tries) of ten bands of probability")
        .def("reset_reliability", [](Drafter &self) { self.model().reset_reliability(); });
}
