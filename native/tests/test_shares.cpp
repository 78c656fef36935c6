// Rows dealt out to threads: each is done once, whoever is slow or late, and those of the slow are taken over.

#include "check.hpp"
#include "kernels/shares.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace {

using esp::kernels::Share;
using esp::kernels::Shares;
using esp::kernels::shares_of;
using Groups = Share::Groups;
using Random = std::mt19937;

bool equal(const Groups &groups, std::int64_t begin, std::int64_t end) {
    return groups.begin == begin && groups.end == end;
}

// Where all threads meet between products.
class Barrier {
  public:
    explicit Barrier(int n_threads) : n_threads_(n_threads) {}

    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        const int round = round_;
        if (++here_ == n_threads_) {
            here_ = 0;
            ++round_;
            changed_.notify_all();
            return;
        }
        changed_.wait(lock, [&] { return round != round_; });
    }

  private:
    const int n_threads_;
    int here_ = 0, round_ = 0;
    std::mutex mutex_;
    std::condition_variable changed_;
};

template <typename Work> void in_threads(int n_threads, Work work) {
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; ++i) {
        threads.emplace_back([=] { work(i); });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

void both_ends_of_a_share() {
    Share share;
    CHECK(share.left() == 0 && share.take_front(1).empty() && share.take_back(7).empty());
    share.publish({10, 30});
    CHECK(share.left() == 20);
    CHECK(equal(share.take_front(1), 10, 20));
    CHECK(equal(share.take_back(1), 25, 30));
    CHECK(share.left() == 5);
    CHECK(equal(share.take_front(4), 20, 24)); // more than half: the least there is
    CHECK(equal(share.take_back(4), 24, 25));  // all that is left
    CHECK(share.left() == 0 && share.take_back(4).empty() && share.take_front(1).empty());
    share.publish({3, 3});
    CHECK(share.take_front(1).empty());
    share.publish({0, 1});
    CHECK(equal(share.take_back(1), 0, 1));
}

// Who computes reads on: what one thread takes from its own share lies in a row, from its beginning.
void an_owner_goes_forward() {
    Shares shares(3);
    std::int64_t next = 0;
    shares.run(100, 3, 0, 1, [&](Groups groups) { // one of three threads: nobody else is in this product
        CHECK(groups.begin == next && groups.end > groups.begin);
        next = groups.end;
    });
    CHECK(next == 100);
}

struct Product {
    std::int64_t n_groups, least;
};

std::vector<Product> some_products(int n_threads, Random &random) {
    const std::int64_t threads = n_threads;
    std::vector<Product> products{{0, 1}, {1, 1}, {1, 7}, {threads - 1, 1}, {threads, 2}, {threads + 1, 3}, {4999, 7}};
    for (int i = 0; i < 150; ++i) {
        const std::int64_t most = random() % 8 == 0 ? 5000 : random() % 2 == 0 ? 100 : 12;
        products.push_back(
            {static_cast<std::int64_t>(random()) % (most + 1), 1 + static_cast<std::int64_t>(random() % 7)});
    }
    std::shuffle(products.begin(), products.end(), random);
    return products;
}

void dawdle(Random &random, unsigned one_in) {
    if (random() % one_in == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    } else if (random() % 2 == 0) {
        std::this_thread::yield();
    }
}

// One product after the other on the same threads. Some start late, and thread 0 is always slow.
void every_group_is_done_once(int n_threads, unsigned seed) {
    Random random(seed);
    const std::vector<Product> products = some_products(n_threads, random);
    Shares shares(static_cast<std::size_t>(n_threads));
    Barrier barrier(n_threads);
    std::vector<std::atomic<int>> done(5000);
    std::atomic<int> wrong{0};
    in_threads(n_threads, [&](int thread) {
        Random own(seed + 100U * static_cast<unsigned>(thread));
        for (const Product &product : products) {
            dawdle(own, thread % 2 == 0 ? 4 : 100);
            shares.run(product.n_groups, product.least, thread, n_threads, [&](Groups groups) {
                wrong += groups.begin < 0 || groups.begin >= groups.end || groups.end > product.n_groups;
                for (std::int64_t i = groups.begin; i < groups.end; ++i) {
                    ++done[static_cast<std::size_t>(i)];
                }
                dawdle(own, thread == 0 ? 2 : 1000);
            });
            barrier.wait();
            if (thread == 0) {
                for (std::size_t i = 0; i < done.size(); ++i) {
                    wrong += done[i].exchange(0) != (static_cast<std::int64_t>(i) < product.n_groups ? 1 : 0);
                }
            }
            barrier.wait();
        }
    });
    CHECK(wrong == 0);
}

// A thread that is held up in its first rows is left with these; all others are done meanwhile.
void a_slow_threads_groups_are_taken_over(int n_threads, std::int64_t n_groups, std::int64_t least) {
    using Clock = std::chrono::steady_clock;
    Shares shares(static_cast<std::size_t>(n_threads));
    std::atomic<std::int64_t> done{0}, held_up{0};
    std::atomic<bool> others_did_the_rest{false};
    in_threads(n_threads, [&](int thread) {
        while (thread != 0 && held_up == 0) { // the slow one comes first
            std::this_thread::yield();
        }
        shares.run(n_groups, least, thread, n_threads, [&](Groups groups) {
            if (thread == 0 && held_up.exchange(groups.end - groups.begin) == 0) {
                const Clock::time_point give_up = Clock::now() + std::chrono::seconds(10);
                while (done + held_up < n_groups && Clock::now() < give_up) {
                    std::this_thread::yield();
                }
                others_did_the_rest = done + held_up == n_groups;
            }
            done += groups.end - groups.begin;
        });
    });
    const std::int64_t own = n_groups / n_threads;
    CHECK(others_did_the_rest);
    CHECK(done == n_groups);
    CHECK(held_up <= std::max(least, (own + 1) / 2)); // so there was something to take
}

void a_pool_keeps_its_shares() {
    const int pools[2] = {};
    Shares *const two = &shares_of(&pools[0], 2);
    Shares *const three = &shares_of(&pools[0], 3);
    Shares *const others = &shares_of(&pools[1], 2);
    CHECK(two != three && two != others && three != others);
    CHECK(two->size() == 2 && three->size() == 3 && others->size() == 2);
    std::atomic<int> wrong{0};
    in_threads(4, [&](int thread) {
        for (int i = 0; i < 100; ++i) { // in turns, as when a prompt and an answer use other numbers of threads
            wrong += &shares_of(&pools[0], 2) != two;
            wrong += thread % 2 == 0 && &shares_of(&pools[0], 3) != three;
            wrong += thread > 1 && &shares_of(&pools[1], 2) != others;
        }
    });
    CHECK(wrong == 0);
}

// Threads of several pools come for the first time at once.
void many_pools_at_once() {
    static const char pools[64] = {};
    std::vector<Shares *> found[2];
    in_threads(2, [&](int thread) {
        for (const char &pool : pools) {
            found[thread].push_back(&shares_of(&pool, 4));
        }
    });
    CHECK(found[0] == found[1]);
    std::sort(found[0].begin(), found[0].end());
    CHECK(std::adjacent_find(found[0].begin(), found[0].end()) == found[0].end());
}

} // namespace

int main() {
    both_ends_of_a_share();
    an_owner_goes_forward();
    for (int n_threads = 1; n_threads <= 8; ++n_threads) {
        every_group_is_done_once(n_threads, static_cast<unsigned>(n_threads));
    }
    for (int n_threads = 2; n_threads <= 8; n_threads += 3) {
        a_slow_threads_groups_are_taken_over(n_threads, 1000, 1);
        a_slow_threads_groups_are_taken_over(n_threads, 40 * n_threads, 7);
    }
    a_pool_keeps_its_shares();
    many_pools_at_once();
    return check::failures;
}
