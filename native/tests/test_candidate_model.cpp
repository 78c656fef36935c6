// Probabilities of candidates: they exclude each other, follow what was observed, and stay calibrated.

#include "check.hpp"
#include "core/candidate_model.hpp"

#include <cmath>
#include <random>
#include <vector>

namespace {

using esp::Candidate;
using esp::CandidateModel;
using esp::Copy;
using esp::Evidence;

struct Case {
    std::vector<Copy> copies;
    esp::Row row;
    std::vector<std::int32_t> mask_ids;
    std::vector<float> mask_logprobs;
    Evidence evidence() const {
        Evidence e;
        e.copies = &copies;
        if (row.n > 0) {
            e.rows.row = &row;
            e.rows.context = 1;
        }
        e.mask = {mask_ids.data(), mask_logprobs.data(), mask_ids.size()};
        e.mask_slot = 1;
        return e;
    }
};

Case example() {
    Case c;
    c.copies = {{7, 3, 1, 1}, {8, 1, 2, 1}};
    c.row.n = 2;
    c.row.ids = {7, 9};
    c.row.logprobs = {-0.5f, -2.0f};
    c.mask_ids = {9, 7, 5};
    c.mask_logprobs = {-1.0f, -1.5f, -4.0f};
    return c;
}

float prob_of(CandidateModel &model, const Evidence &evidence, std::int32_t token) {
    std::vector<Candidate> out;
    model.rate(evidence, out);
    for (const Candidate &x : out) {
        if (x.token == token) {
            return x.prob;
        }
    }
    return 0.0f;
}

void children_exclude_each_other() {
    CandidateModel model;
    const Case c = example();
    std::vector<Candidate> out;
    model.rate(c.evidence(), out);
    CHECK(out.size() == 4); // 7, 8, 9, 5: what several sources propose is one candidate
    float total = 0.0f;
    for (std::size_t i = 0; i < out.size(); ++i) {
        CHECK(out[i].prob > 0.0f && out[i].prob < 1.0f);
        CHECK(i == 0 || out[i - 1].prob >= out[i].prob);
        CHECK(out[i].source != esp::Source::none);
        total += out[i].prob;
    }
    CHECK(total < 0.99f);
    CHECK(out[0].token == 7 && out[0].source == esp::Source::suffix);
}

void no_evidence_no_candidates() {
    CandidateModel model;
    const Case nothing;
    std::vector<Candidate> out = {Candidate{}};
    model.rate(nothing.evidence(), out);
    CHECK(out.empty());
    model.learn(nothing.evidence(), 5);
}

void it_learns_what_is_right() {
    CandidateModel model;
    model.set_rate(0.2f);
    const Case c = example();
    for (int i = 0; i < 300; ++i) {
        model.learn(c.evidence(), 8);
    }
    CHECK(prob_of(model, c.evidence(), 8) > 0.85f);
    CHECK(prob_of(model, c.evidence(), 7) < 0.1f);
}

// A copy that is right in three of ten cases is said to be right in three of ten, and the two stages agree.
void predictions_are_calibrated() {
    for (const float rate : {0.0f, 0.02f, 0.3f}) {
        CandidateModel model;
        model.set_rate(rate);
        std::mt19937 random(3);
        Case c;
        c.copies = {{7, 5, 1, 1}};
        for (int i = 0; i < 4000; ++i) {
            if (i == 2000) {
                model.reset_reliability();
            }
            model.learn(c.evidence(), random() % 10 < 3 ? 7 : 1);
        }
        const float prob = prob_of(model, c.evidence(), 7);
        CHECK(prob > 0.22f && prob < 0.38f);
        double predicted = 0.0, hits = 0.0, tries = 0.0;
        for (const auto &band : model.reliability()) {
            predicted += band.predicted;
            hits += band.hits;
            tries += band.tries;
        }
        CHECK(tries == 2000.0);
        CHECK(std::abs(predicted - hits) / tries < 0.05);
    }
}

void sampled_decoding_learns_apart() {
    CandidateModel model;
    const Case c = example();
    Evidence sampled = c.evidence();
    sampled.temperature = 0.8f;
    sampled.seed = 5;
    sampled.position = 11;
    const float before = prob_of(model, c.evidence(), 8);
    for (int i = 0; i < 100; ++i) {
        model.learn(sampled, 8);
    }
    CHECK(prob_of(model, c.evidence(), 8) == before);
    const float here = prob_of(model, sampled, 9);
    sampled.position = 12; // other noise
    CHECK(prob_of(model, sampled, 9) != here);
}

} // namespace

int main() {
    children_exclude_each_other();
    no_evidence_no_candidates();
    it_learns_what_is_right();
    predictions_are_calibrated();
    sampled_decoding_learns_apart();
    return check::failures;
}
