// The Python face of the fused drafter; bindings.cpp calls bind_fused.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <stdexcept>

#include "core/fused_drafter.hpp"

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

void observe(esp::FusedDrafter &self, const Ints &tokens, const Ints &parents, const Ints &path, std::int32_t bonus,
             const IntRows &ids, const FloatRows &logprobs, const IntRows &mask_ids, const FloatRows &mask_logprobs) {
    const std::size_t n = tokens.shape(0);
    require(n > 0 && parents.shape(0) == n && ids.shape(0) == n, "a pass needs a parent and best next tokens per node");
    require(same_shape(ids, logprobs) && same_shape(mask_ids, mask_logprobs), "ids and log-probabilities differ");
    for (std::size_t i = 1; i < n; ++i) {
        require(parents(i) >= 0 && parents(i) < static_cast<std::int32_t>(i), "a parent comes before its child");
    }
    std::int32_t above = 0;
    for (std::size_t i = 0; i < path.shape(0); ++i) {
        require(path(i) > 0 && path(i) < static_cast<std::int32_t>(n) &&
                    parents(static_cast<std::size_t>(path(i))) == above,
                "the path does not run through the tree");
        above = path(i);
    }
    esp::FusedDrafter::Pass pass;
    pass.tokens = tokens.data();
    pass.parents = parents.data();
    pass.n_nodes = n;
    pass.path = path.data();
    pass.n_path = path.shape(0);
    pass.bonus = bonus;
    pass.ids = ids.data();
    pass.logprobs = logprobs.data();
    pass.width = ids.shape(1);
    pass.mask_ids = mask_ids.data();
    pass.mask_logprobs = mask_logprobs.data();
    pass.n_slots = mask_ids.shape(0);
    pass.mask_width = mask_ids.shape(1);
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
        .def("observe", &observe, "tokens"_a, "parents"_a, "path"_a, "bonus"_a, "ids"_a, "logprobs"_a, "mask_ids"_a,
             "mask_logprobs"_a)
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
