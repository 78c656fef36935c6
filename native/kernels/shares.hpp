// The rows of one matrix product, dealt out to threads that are not equally fast: cores may be of two kinds, or busy.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace esp::kernels {

// One thread's rows, in groups; it takes them from the front, others who have none left from the back.
class Share {
  public:
    struct Groups {
        std::int64_t begin = 0, end = 0;
        bool empty() const { return begin == end; }
    };

    // By the owner, when nobody has anything of the product before.
    void publish(Groups groups) { state_.store(packed(groups), std::memory_order_release); }

    // Half of what is left, at least `least`; empty when nothing is.
    Groups take_front(std::int64_t least) {
        return take(
            least, [](Groups left, std::int64_t n) { return Groups{left.begin, left.begin + n}; },
            [](Groups left, std::int64_t n) { return Groups{left.begin + n, left.end}; });
    }
    Groups take_back(std::int64_t least) {
        return take(
            least, [](Groups left, std::int64_t n) { return Groups{left.end - n, left.end}; },
            [](Groups left, std::int64_t n) { return Groups{left.begin, left.end - n}; });
    }

    std::int64_t left() const {
        const Groups groups = unpacked(state_.load(std::memory_order_relaxed));
        return groups.end - groups.begin;
    }

  private:
    template <typename Part, typename Rest> Groups take(std::int64_t least, Part part, Rest rest) {
        std::uint64_t seen = state_.load(std::memory_order_acquire);
        for (;;) {
            const Groups left = unpacked(seen);
            if (left.empty()) {
                return left;
            }
            const std::int64_t size = left.end - left.begin, half = (size + 1) / 2;
            const std::int64_t n = half < least ? (size < least ? size : least) : half;
            if (state_.compare_exchange_weak(seen, packed(rest(left, n)), std::memory_order_acq_rel)) {
                return part(left, n);
            }
        }
    }

    static std::uint64_t packed(Groups groups) {
        return static_cast<std::uint64_t>(groups.begin) << 32 | static_cast<std::uint64_t>(groups.end);
    }
    static Groups unpacked(std::uint64_t state) {
        return {static_cast<std::int64_t>(state >> 32), static_cast<std::int64_t>(state & 0xffffffffU)};
    }

    alignas(64) std::atomic<std::uint64_t> state_{0};
};

// The shares of all threads of a pool. A product begins when all threads have ended the one before.
class Shares {
  public:
    explicit Shares(std::size_t n_threads) : shares_(n_threads) {}

    std::size_t size() const { return shares_.size(); }

    // Calls work(groups) until all of n_groups are done or taken by others. A thread that comes before another has
    // published its share finds nothing there, and the other does it alone.
    template <typename Work>
    void run(std::int64_t n_groups, std::int64_t least, std::int64_t thread, std::int64_t threads, Work work) {
        Share &own = shares_[static_cast<std::size_t>(thread)];
        own.publish({n_groups * thread / threads, n_groups * (thread + 1) / threads});
        for (auto groups = own.take_front(least); !groups.empty(); groups = own.take_front(least)) {
            work(groups);
        }
        for (Share *other = fullest(threads); other != nullptr; other = fullest(threads)) {
            const Share::Groups groups = other->take_back(least);
            if (!groups.empty()) {
                work(groups);
            }
        }
    }

  private:
    Share *fullest(std::int64_t threads) {
        Share *found = nullptr;
        std::int64_t most = 0;
        for (std::int64_t i = 0; i < threads; ++i) {
            Share &share = shares_[static_cast<std::size_t>(i)];
            const std::int64_t left = share.left();
            if (left > most) {
                found = &share;
                most = left;
            }
        }
        return found;
    }

    std::vector<Share> shares_;
};

// Those of a pool of threads that is identified by an address; the same ones for as long as it has that many threads.
Shares &shares_of(const void *pool, std::int64_t n_threads);

} // namespace esp::kernels
