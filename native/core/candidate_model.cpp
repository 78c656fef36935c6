#include "core/candidate_model.hpp"

#include <algorithm>
#include <cmath>

#include "core/logits.hpp"

namespace esp {

namespace {

constexpr float floor_logprob = -12.0f;
constexpr float most_mass = 0.985f;   // of all children of a node together
constexpr float band_prior = 24.0f;   // tries that the prediction itself is worth
constexpr float band_memory = 0.998f; // a try counts this much less with every later one
constexpr float first_square = 4.0f;  // AdaGrad starts as if it had seen this much

std::size_t length_bin(std::int32_t length) {
    static constexpr std::int32_t ends[] = {1, 2, 3, 4, 6, 9, 15};
    std::size_t bin = 0;
    while (bin < std::size(ends) && length > ends[bin]) {
        ++bin;
    }
    return bin;
}

std::size_t copy_bin(const Copy &copy, bool first) {
    std::size_t kind = 3;
    if (first) {
        kind = copy.seen <= 1 ? 1 : copy.agree == copy.seen ? 0 : 2;
    }
    return kind * 8 + length_bin(copy.length);
}

// 0 suffix, 1 adjacency, 2 mask, 3 last, 4 none of them in particular.
std::size_t source_of(std::size_t feature) {
    using Model = CandidateModel;
    if (feature >= Model::copy) {
        return 0;
    }
    if (feature >= Model::last_logprob) {
        return 3;
    }
    if (feature >= Model::mask_logprob) {
        return 2;
    }
    return feature >= Model::row_logprob ? 1 : 4;
}

bool says_present(std::size_t feature) {
    using Model = CandidateModel;
    return feature >= Model::copy || (feature >= Model::row_present && feature < Model::row_top) ||
           feature == Model::shorter_present || feature == Model::mask_present || feature == Model::last_present;
}

// Where a probability lies between two bands: it counts in both, so that a correction fades in and out.
struct Place {
    std::size_t band;
    float share; // of the band above
};

Place place_of(float prob) {
    const float logit = std::log(prob / (1.0f - prob));
    const float at = std::clamp((logit + 6.0f) * 1.6f, 0.0f, static_cast<float>(CandidateModel::n_bands) - 1.001f);
    const auto band = static_cast<std::size_t>(at);
    return {band, at - static_cast<float>(band)};
}

} // namespace

CandidateModel::CandidateModel() : weights_(n_weights, 0.0f), squares_(n_weights, first_square), gradient_(n_features) {
    for (std::size_t c = 0; c < n_classes; ++c) { // a start that is better than nothing; learned weights replace it
        float *w = weights_.data() + c * n_features;
        w[bias] = 1.0f;
        w[noise] = 1.0f;
        for (std::size_t k = 0; k < RowTable::max_context; ++k) {
            w[row_logprob + k] = 0.6f;
            w[row_absent + k] = -4.0f;
        }
        w[mask_logprob] = 0.4f;
        w[mask_absent] = -3.0f;
        w[last_absent] = -0.2f;
        for (std::size_t b = 0; b < 32; ++b) {
            w[copy + b] = (b < 16 ? 0.7f : 0.3f) * static_cast<float>(b % 8) + 1.5f;
        }
    }
}

std::vector<float> CandidateModel::corrections() const {
    std::vector<float> numbers;
    numbers.reserve(n_corrections);
    for (const Bin &bin : bins_) {
        numbers.push_back(bin.predicted);
        numbers.push_back(bin.hits);
    }
    return numbers;
}

void CandidateModel::set_corrections(const float *numbers) {
    for (Bin &bin : bins_) {
        bin.predicted = *numbers++;
        bin.hits = *numbers++;
    }
}

std::size_t CandidateModel::class_of(const Evidence &evidence) const {
    const bool masked = evidence.mask.n > 0;
    const std::size_t base = evidence.depth == 1 ? (masked ? 0 : 1) : evidence.depth == 2 ? (masked ? 2 : 3) : 4;
    return evidence.temperature > 0.0f ? base + 5 : base;
}

CandidateModel::Item &CandidateModel::item(std::int32_t token) {
    for (Item &known : items_) {
        if (known.token == token) {
            return known;
        }
    }
    Item fresh;
    fresh.token = token;
    items_.push_back(fresh);
    return items_.back();
}

void CandidateModel::collect(const Evidence &e) {
    items_.clear();
    const float scale = e.temperature > 0.0f ? 1.0f / std::max(e.temperature, 0.05f) : 1.0f;
    const auto logprob = [scale](float x) { return scale * std::max(x, floor_logprob); };
    bool first = true;
    for (const Copy &c : *e.copies) {
        item(c.token).add(copy + copy_bin(c, first), 1.0f);
        first = false;
    }
    const std::size_t context = e.rows.context == 0 ? 0 : e.rows.context - 1;
    for (std::int32_t i = 0; e.rows.row != nullptr && i < e.rows.row->n; ++i) {
        Item &it = item(e.rows.row->ids[static_cast<std::size_t>(i)]);
        it.add(row_logprob + context, logprob(e.rows.row->logprobs[static_cast<std::size_t>(i)]));
        it.add(row_present + context, 1.0f);
        if (i == 0) {
            it.add(row_top + context, 1.0f);
        }
    }
    for (std::int32_t i = 0; e.rows.shorter != nullptr && i < e.rows.shorter->n; ++i) {
        Item &it = item(e.rows.shorter->ids[static_cast<std::size_t>(i)]);
        it.add(shorter_logprob, logprob(e.rows.shorter->logprobs[static_cast<std::size_t>(i)]));
        it.add(shorter_present, 1.0f);
        if (i == 0) {
            it.add(shorter_top, 1.0f);
        }
    }
    for (std::size_t i = 0; i < e.mask.n; ++i) {
        Item &it = item(e.mask.ids[i]);
        it.add(mask_logprob, logprob(e.mask.logprobs[i]));
        it.add(mask_present, 1.0f);
        if (i == 0) {
            it.add(mask_top, 1.0f);
        }
    }
    for (std::size_t i = 0; i < e.last.n; ++i) {
        if (e.last.ids[i] == e.parent) {
            continue; // that one was chosen: it is the root
        }
        Item &it = item(e.last.ids[i]);
        it.add(last_logprob, logprob(e.last.logprobs[i]));
        it.add(last_present, 1.0f);
    }
    const auto has = [](const Item &it, std::size_t low, std::size_t high) {
        for (std::int32_t i = 0; i < it.n; ++i) {
            const std::size_t f = it.index[static_cast<std::size_t>(i)];
            if (f >= low && f < high) {
                return true;
            }
        }
        return false;
    };
    for (Item &it : items_) {
        it.add(bias, 1.0f);
        if (it.token == e.parent) {
            it.add(repeat, 1.0f);
        }
        if (e.temperature > 0.0f) {
            it.add(noise, static_cast<float>(keyed_gumbel(e.seed, e.position, static_cast<std::uint32_t>(it.token))));
        }
        if (e.rows.row != nullptr && !has(it, row_present, row_top)) {
            it.add(row_absent + context, 1.0f);
        }
        if (e.rows.shorter != nullptr && !has(it, shorter_present, shorter_top)) {
            it.add(shorter_absent, 1.0f);
        }
        if (e.mask.n > 0 && !has(it, mask_present, mask_top)) {
            it.add(mask_absent, 1.0f);
        }
        if (e.last.n > 0 && !has(it, last_present, last_absent)) {
            it.add(last_absent, 1.0f);
        }
    }
}

void CandidateModel::score(const Evidence &evidence) {
    const float *w = weights_.data() + class_of(evidence) * n_features;
    float most = 0.0f; // score of "none of them"
    for (Item &it : items_) {
        std::array<float, 4> part = {}; // suffix, adjacency, mask, last
        std::array<bool, 4> present = {};
        float common = 0.0f;
        for (std::int32_t i = 0; i < it.n; ++i) {
            const std::size_t f = it.index[static_cast<std::size_t>(i)];
            const float x = w[f] * it.value[static_cast<std::size_t>(i)];
            const std::size_t source = source_of(f);
            if (source == part.size()) {
                common += x;
            } else {
                part[source] += x;
                present[source] = present[source] || says_present(f);
            }
        }
        std::size_t best = part.size();
        for (std::size_t source = 0; source < part.size(); ++source) {
            if (present[source] && (best == part.size() || part[source] > part[best])) {
                best = source;
            }
        }
        it.score = common;
        for (std::size_t source = 0; source < part.size(); ++source) {
            it.score += !apart_ || source == best ? part[source] : 0.0f;
        }
        static constexpr Source names[] = {Source::suffix, Source::adjacency, Source::esp1, Source::last, Source::none};
        it.source = best == 2 && evidence.mask_slot == 2 ? Source::esp2 : names[best];
        most = std::max(most, it.score);
    }
    float total = std::exp(-most);
    for (Item &it : items_) {
        it.prob = std::exp(it.score - most);
        total += it.prob;
    }
    for (Item &it : items_) {
        it.prob = std::clamp(it.prob / total, 1e-6f, most_mass);
    }
}

void CandidateModel::rate(const Evidence &evidence, std::vector<Candidate> &out) {
    collect(evidence);
    score(evidence);
    out.clear();
    const std::size_t c = class_of(evidence);
    float mass = 0.0f;
    for (const Item &it : items_) {
        float prob = it.prob;
        if (calibrate_) {
            const Place at = place_of(prob);
            const Bin *bin = bins_.data() + c * n_bands + at.band;
            const float hits = (1.0f - at.share) * bin[0].hits + at.share * bin[1].hits;
            const float predicted = (1.0f - at.share) * bin[0].predicted + at.share * bin[1].predicted;
            prob *= (hits + band_prior * prob) / (predicted + band_prior * prob);
        }
        mass += prob;
        out.push_back({it.token, prob, it.source});
    }
    if (mass > most_mass) {
        for (Candidate &x : out) {
            x.prob *= most_mass / mass;
        }
    }
    std::sort(out.begin(), out.end(), [](const Candidate &a, const Candidate &b) {
        return a.prob > b.prob || (a.prob == b.prob && a.token < b.token);
    });
}

void CandidateModel::learn(const Evidence &evidence, std::int32_t choice) {
    std::vector<Candidate> rated;
    rate(evidence, rated);
    for (const Candidate &x : rated) {
        const auto tenth = std::min<std::size_t>(9, static_cast<std::size_t>(x.prob * 10.0f));
        Band &band = reliability_[tenth];
        band.tries += 1.0;
        band.predicted += static_cast<double>(x.prob);
        band.hits += x.token == choice ? 1.0 : 0.0;
    }
    const std::size_t c = class_of(evidence);
    float *w = weights_.data() + c * n_features;
    float *squares = squares_.data() + c * n_features;
    std::fill(gradient_.begin(), gradient_.end(), 0.0f);
    for (const Item &it : items_) {
        const float hit = it.token == choice ? 1.0f : 0.0f;
        const Place place = place_of(it.prob);
        Bin *bin = bins_.data() + c * n_bands + place.band;
        for (const float share : {1.0f - place.share, place.share}) {
            const float keep = 1.0f - share * (1.0f - band_memory);
            bin->predicted = bin->predicted * keep + share * it.prob;
            bin->hits = bin->hits * keep + share * hit;
            ++bin;
        }
        for (std::int32_t i = 0; i < it.n; ++i) {
            const auto at = static_cast<std::size_t>(i);
            gradient_[it.index[at]] += (hit - it.prob) * it.value[at];
        }
    }
    if (rate_ <= 0.0f) {
        return;
    }
    for (std::size_t f = 0; f < n_features; ++f) {
        const float g = gradient_[f];
        if (g != 0.0f) {
            squares[f] += g * g;
            w[f] += rate_ * g / std::sqrt(squares[f]);
        }
    }
}

} // namespace esp
