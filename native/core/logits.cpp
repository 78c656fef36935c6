#include "core/logits.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

// The loops below are compiled for wider vectors as well, and the loader takes the widest the CPU has. Not under the
// sanitizers, whose runtime is not ready when the loader asks.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) &&                           \
    !defined(__SANITIZE_ADDRESS__)
#define ESP_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#define ESP_INLINE inline __attribute__((always_inline))
#else
#define ESP_WIDE
#define ESP_INLINE inline
#endif

namespace esp {

namespace {

constexpr std::size_t block = 64;  // compared against the running best at once, so that the loop vectorises
constexpr std::size_t group = 256; // of blocks, looked at first: fewer maxima to gather from the lanes

constexpr std::size_t lanes = 16; // independent, so that they become vectors

ESP_INLINE float block_max(const float *x, std::size_t n) {
    float best[lanes];
    std::fill_n(best, lanes, -std::numeric_limits<float>::infinity());
    std::size_t i = 0;
#if defined(__GNUC__) // a loop over lanes is unrolled into single comparisons before anybody sees a vector in it
    typedef float Lanes __attribute__((vector_size(lanes * sizeof(float))));
    Lanes most, next;
    std::memcpy(&most, best, sizeof most);
    for (; i + lanes <= n; i += lanes) {
        std::memcpy(&next, x + i, sizeof next);
        most = next > most ? next : most; // NaN is never larger
    }
    std::memcpy(best, &most, sizeof most);
#else
    for (; i + lanes <= n; i += lanes) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            best[lane] = x[i + lane] > best[lane] ? x[i + lane] : best[lane];
        }
    }
#endif
    for (; i < n; ++i) {
        best[0] = x[i] > best[0] ? x[i] : best[0];
    }
    for (std::size_t width = lanes / 2; width > 0; width /= 2) { // in halves: one after the other would wait 15 times
        for (std::size_t lane = 0; lane < width; ++lane) {
            best[lane] = best[lane + width] > best[lane] ? best[lane + width] : best[lane];
        }
    }
    return best[0];
}

// exp(x) for x <= 0, relative error below 2e-7: two to the power of the rounded exponent, times a polynomial of what is
// left. Plain arithmetic, so that compilers vectorise the loop below; std::exp costs ten times as much.
ESP_INLINE float fast_exp(float x) {
    constexpr float round = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    x = x > -87.0f ? x : -87.0f;         // NaN counts as nothing
    const float n = (x * 1.44269504f + round) - round;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const std::int32_t bits = (static_cast<std::int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

// Sum of exp(x[i] - m) over one block, in independent lanes.
ESP_INLINE float block_sum_exp(const float *x, float m) {
    float sums[lanes] = {};
    for (std::size_t i = 0; i < block; i += lanes) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            sums[lane] += fast_exp(x[i + lane] - m);
        }
    }
    float total = 0.0f;
    for (const float sum : sums) {
        total += sum;
    }
    return total;
}

std::uint64_t mix(std::uint64_t x) { // the finaliser of splitmix64
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

} // namespace

ESP_WIDE std::int32_t argmax(const float *logits, std::size_t n) {
    float best = -std::numeric_limits<float>::infinity();
    std::size_t best_start = 0;
    for (std::size_t start = 0; start < n; start += block) {
        const float m = block_max(logits + start, std::min(block, n - start));
        if (m > best) {
            best = m;
            best_start = start;
        }
    }
    for (std::size_t i = best_start; i < n; ++i) {
        if (logits[i] == best) {
            return static_cast<std::int32_t>(i);
        }
    }
    return 0; // every entry is NaN or -inf
}

ESP_WIDE double log_sum_exp(const float *logits, std::size_t n) {
    const float m = block_max(logits, n);
    if (!std::isfinite(m)) {
        return m;
    }
    double sum = 0.0;
    std::size_t i = 0;
    for (; i + block <= n; i += block) {
        sum += block_sum_exp(logits + i, m);
    }
    for (; i < n; ++i) {
        sum += fast_exp(logits[i] - m);
    }
    return static_cast<double>(m) + std::log(sum);
}

// The largest number that at least k entries reach for sure: the k-th largest maximum of a group; -inf where there are
// fewer groups. Fills maxima, one a group.
ESP_INLINE float reached_by(const float *logits, std::size_t n, std::size_t k, std::vector<float> &maxima) {
    maxima.clear();
    for (std::size_t start = 0; start < n; start += group) {
        maxima.push_back(block_max(logits + start, std::min(group, n - start)));
    }
    if (maxima.size() < k) {
        return -std::numeric_limits<float>::infinity();
    }
    std::vector<float> order = maxima;
    const auto kth = order.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(order.begin(), kth, order.end(), std::greater<float>());
    return *kth;
}

ESP_WIDE std::size_t top_k(const float *logits, std::size_t n, std::size_t k, std::int32_t *ids, float *values) {
    k = std::min(k, n);
    if (k == 0) {
        return 0;
    }
    using Entry = std::pair<float, std::int32_t>;
    const auto better = [](const Entry &a, const Entry &b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    std::vector<float> maxima;
    const float least = reached_by(logits, n, k, maxima); // smaller entries are not looked at
    std::vector<Entry> heap;                              // its front is the worst entry kept
    heap.reserve(k + 1);
    for (std::size_t start = 0; start < n; start += block) {
        const std::size_t end = std::min(start + block, n);
        if (maxima[start / group] < least || block_max(logits + start, end - start) < least) {
            continue;
        }
        for (std::size_t i = start; i < end; ++i) {
            const Entry entry{std::isnan(logits[i]) ? -std::numeric_limits<float>::infinity() : logits[i],
                              static_cast<std::int32_t>(i)};
            if (entry.first < least || (heap.size() == k && !better(entry, heap.front()))) {
                continue;
            }
            heap.push_back(entry);
            std::push_heap(heap.begin(), heap.end(), better);
            if (heap.size() > k) {
                std::pop_heap(heap.begin(), heap.end(), better);
                heap.pop_back();
            }
        }
    }
    std::sort_heap(heap.begin(), heap.end(), better);
    for (std::size_t i = 0; i < k; ++i) {
        values[i] = heap[i].first;
        ids[i] = heap[i].second;
    }
    return k;
}

ESP_WIDE std::size_t top_k_sketch(const float *logits, std::size_t n, std::size_t k, std::int32_t *ids,
                                  float *logprobs) {
    constexpr std::size_t every = 8, offset = 3;
    k = top_k(logits, n, k, ids, logprobs);
    if (k == 0 || !std::isfinite(logprobs[0])) {
        return k;
    }
    const float m = logprobs[0];
    const std::size_t n_blocks = n / block;
    double sampled = 0.0, top = 0.0;
    std::size_t n_sampled = 0;
    for (std::size_t b = offset; b < n_blocks; b += every, n_sampled += block) {
        sampled += static_cast<double>(block_sum_exp(logits + b * block, m));
    }
    for (std::size_t i = 0; i < k; ++i) {
        const double mass = static_cast<double>(fast_exp(logprobs[i] - m));
        const std::size_t b = static_cast<std::size_t>(ids[i]) / block;
        top += mass;
        sampled -= b < n_blocks && b % every == offset ? mass : 0.0;
    }
    if (n_sampled == 0) { // too short to sample
        top = std::exp(log_sum_exp(logits, n) - static_cast<double>(m));
        sampled = 0.0;
    } else {
        sampled = std::max(sampled, 0.0) * static_cast<double>(n) / static_cast<double>(n_sampled);
    }
    const auto total = m + static_cast<float>(std::log(top + sampled));
    for (std::size_t i = 0; i < k; ++i) {
        logprobs[i] -= total;
    }
    return k;
}

double keyed_gumbel(std::uint64_t seed, std::uint64_t position, std::uint32_t token) {
    const std::uint64_t bits = mix(mix(mix(seed) ^ position) ^ token);
    // 52 bits and a half: exact in a double, so in (0, 1), never 0 or 1. With 53 bits the largest would round up to 1.
    const double u = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
    return -std::log(-std::log(u));
}

} // namespace esp
