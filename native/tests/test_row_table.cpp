// Remembered rows: the longest context wins, newer rows replace older ones, old ones give way.

#include "check.hpp"
#include "core/row_table.hpp"

#include <vector>

namespace {

using Ints = std::vector<std::int32_t>;

esp::Row row(std::int32_t token) {
    esp::Row made;
    made.n = 1;
    made.ids[0] = token;
    return made;
}

void learn(esp::RowTable &table, const Ints &tail, std::int32_t token) {
    table.learn(tail.data(), tail.size(), row(token));
}

esp::RowTable::Found find(const esp::RowTable &table, const Ints &tail) { return table.find(tail.data(), tail.size()); }

void the_longest_context_wins() {
    esp::RowTable table;
    learn(table, {1, 2, 3}, 10);
    learn(table, {9, 3}, 20); // newer, so it is what 3 alone stands for
    const auto found = find(table, {7, 1, 2, 3});
    CHECK(found.context == 3 && found.row->ids[0] == 10);
    CHECK(found.shorter != nullptr && found.shorter->ids[0] == 20);
    const auto other = find(table, {8, 3});
    CHECK(other.context == 1 && other.row->ids[0] == 20 && other.shorter == nullptr);
}

void unknown_tokens() {
    esp::RowTable table;
    CHECK(find(table, {1}).row == nullptr && find(table, {}).context == 0);
    learn(table, {1, 2}, 5);
    CHECK(find(table, {1}).row == nullptr);
}

void a_newer_row_replaces() {
    esp::RowTable table;
    learn(table, {4, 5}, 1);
    learn(table, {4, 5}, 2);
    CHECK(find(table, {4, 5}).row->ids[0] == 2);
    CHECK(find(table, {4, 5}).shorter == nullptr); // the same row
}

void old_rows_give_way() {
    esp::RowTable table;
    learn(table, {1000000}, 7);
    for (std::uint32_t i = 0; i < 3 * esp::RowTable::capacity; ++i) {
        learn(table, {static_cast<std::int32_t>(i % 50000), 3}, 1);
    }
    CHECK(find(table, {1000000}).row == nullptr);
    CHECK(find(table, {3}).row != nullptr);
    table.clear();
    CHECK(find(table, {3}).row == nullptr);
}

} // namespace

int main() {
    the_longest_context_wins();
    unknown_tokens();
    a_newer_row_replaces();
    old_rows_give_way();
    return check::failures;
}
