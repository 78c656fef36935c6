// Numbers by hash: keys that meet keep their own values, growing and erasing lose none.

#include "check.hpp"
#include "core/hash_index.hpp"

#include <random>
#include <unordered_map>

namespace {

using Index = esp::HashIndex<std::int32_t>;

bool holds(const Index &index, std::uint64_t key, std::int32_t value) {
    const std::int32_t *found = index.find(key);
    return found != nullptr && *found == value;
}

void an_empty_index_knows_nothing() {
    Index index;
    CHECK(index.find(0) == nullptr && index.size() == 0);
    index.prefetch(7);
    index.erase_if([](std::int32_t) { return true; });
    CHECK(index.find(7) == nullptr);
}

void a_new_key_starts_at_zero() {
    Index index;
    CHECK(index.at(0) == 0);
    CHECK(holds(index, 0, 0) && index.size() == 1);
    CHECK(index.find(1) == nullptr);
}

void keys_of_one_place_keep_their_values() {
    Index index;
    for (std::uint64_t i = 0; i < 400; ++i) {
        index.at(i << 32) = static_cast<std::int32_t>(i); // the low half alone chooses the place
    }
    for (std::uint64_t i = 0; i < 400; ++i) {
        CHECK(holds(index, i << 32, static_cast<std::int32_t>(i)));
    }
    CHECK(index.find(400ULL << 32) == nullptr);
}

void does_what_a_map_does() {
    std::mt19937_64 rng(1);
    Index index;
    std::unordered_map<std::uint64_t, std::int32_t> map;
    for (std::int32_t i = 0; i < 20000; ++i) {
        const std::uint64_t key = rng() % 8000;
        index.at(key) = map[key] = i;
    }
    CHECK(index.size() == map.size());
    const auto is_old = [](std::int32_t value) { return value < 15000; };
    for (const auto &[key, value] : map) {
        CHECK(holds(index, key, value));
    }
    index.erase_if(is_old);
    for (const auto &[key, value] : map) {
        CHECK(is_old(value) ? index.find(key) == nullptr : holds(index, key, value));
    }
    index.clear();
    CHECK(index.size() == 0 && index.find(3) == nullptr);
}

} // namespace

int main() {
    an_empty_index_knows_nothing();
    a_new_key_starts_at_zero();
    keys_of_one_place_keep_their_values();
    does_what_a_map_does();
    return check::failures;
}
