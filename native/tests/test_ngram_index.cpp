// Copying: a worked example, and random texts against what every earlier occurrence says.

#include "check.hpp"
#include "core/ngram_index.hpp"

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace {

using Ints = std::vector<std::int32_t>;

std::vector<esp::Copy> copies(const esp::NgramIndex &index, const Ints &tail) {
    std::vector<esp::Copy> out;
    index.copies(tail.data(), tail.size(), out);
    return out;
}

esp::NgramIndex indexed(const Ints &text) {
    esp::NgramIndex index;
    index.clear();
    for (const std::int32_t token : text) {
        index.append(token);
    }
    return index;
}

// Tokens before end that equal the end of the tail.
std::int32_t match(const Ints &text, const Ints &tail, std::size_t end) {
    std::int32_t length = 0;
    while (length < esp::NgramIndex::max_match && static_cast<std::size_t>(length) < std::min(end, tail.size()) &&
           text[end - 1 - static_cast<std::size_t>(length)] ==
               tail[tail.size() - 1 - static_cast<std::size_t>(length)]) {
        ++length;
    }
    return length;
}

void worked_example() {
    const Ints text = {1, 2, 7, 9, 1, 2, 8, 1, 2};
    const auto found = copies(indexed(text), text);
    CHECK(found.size() == 2);
    CHECK(found[0].token == 8 && found[0].length == 2 && found[0].seen == 2 && found[0].agree == 1);
    CHECK(found[1].token == 7 && found[1].length == 2);
}

void a_path_below_the_end_is_matched_too() {
    const Ints text = {1, 2, 3, 4, 5, 1, 2};
    const auto found = copies(indexed(text), {5, 1, 2, 3}); // 3 is a drafted token
    CHECK(found.size() == 1 && found[0].token == 4 && found[0].length == 3);
}

void texts_do_not_run_into_each_other() {
    esp::NgramIndex index = indexed({-1, 1, 2, -2, 1});
    CHECK(copies(index, {1}).size() == 1); // what follows the second 1 is nothing, not a separator
    index.append(-3);
    index.append(2);
    CHECK(copies(index, {2}).empty());
}

void nothing_known_nothing_said() {
    CHECK(copies(indexed({}), {}).empty());
    CHECK(copies(indexed({5}), {5}).empty());
    CHECK(copies(indexed({1, 2, 3}), {9}).empty());
}

void random_texts() {
    std::mt19937 random(1);
    for (int round = 0; round < 200; ++round) {
        const int symbols = 2 + static_cast<int>(random() % 5);
        Ints text(random() % 60);
        for (std::int32_t &token : text) {
            token = static_cast<std::int32_t>(random() % static_cast<unsigned>(symbols));
        }
        const auto found = copies(indexed(text), text);
        std::int32_t longest = 0;
        for (std::size_t end = 1; end < text.size(); ++end) {
            longest = std::max(longest, match(text, text, end));
        }
        std::int32_t indexed_length = 0;
        for (const std::int32_t n : {1, 2, 3, 5, 8}) {
            indexed_length = n <= longest ? n : indexed_length;
        }
        CHECK(found.empty() == (longest == 0));
        CHECK(found.empty() || found[0].length >= indexed_length);
        CHECK(found.size() <= esp::NgramIndex::max_copies);
        std::set<std::int32_t> tokens;
        for (std::size_t i = 0; i < found.size(); ++i) {
            const esp::Copy &copy = found[i];
            bool real = false;
            for (std::size_t end = 1; end < text.size(); ++end) {
                real = real || (text[end] == copy.token && match(text, text, end) == copy.length);
            }
            CHECK(real);
            CHECK(copy.agree >= 1 && copy.agree <= copy.seen);
            CHECK(tokens.insert(copy.token).second);
            CHECK(i == 0 || found[i - 1].length >= copy.length);
        }
    }
}

} // namespace

int main() {
    worked_example();
    a_path_below_the_end_is_matched_too();
    texts_do_not_run_into_each_other();
    nothing_known_nothing_said();
    random_texts();
    return check::failures;
}
