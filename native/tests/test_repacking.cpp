// Matrices that are repacked together, by several threads: each as the kernel repacks it alone.

#include "check.hpp"
#include "kernels/repacking.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

using esp::kernels::best_kernels;
using esp::kernels::Format;
using esp::kernels::FormatKernel;
using esp::kernels::KernelTable;
using esp::kernels::Matmul;
using esp::kernels::repack;
using esp::kernels::RepackedMemory;
using esp::kernels::Repacking;

using Bytes = std::vector<std::byte>;

// Formats that are repacked, and the bytes of as many weights as a row must be a multiple of.
struct Layout {
    Format format;
    std::size_t unit_bytes;
};
const Layout layouts[] = {
    {Format::q4_0, 18}, {Format::q4_1, 20}, {Format::q8_0, 34}, {Format::q4_k, 144}, {Format::q6_k, 210}};

void fill(std::byte *to, std::size_t size, unsigned seed) {
    std::mt19937 random(seed);
    std::generate_n(to, size, [&] { return static_cast<std::byte>(random()); });
}

// A matrix of this many rows, of this many units each. Its weights are anywhere, and any bytes.
Repacking matrix_of(const KernelTable &table, const Layout &layout, std::int64_t n_rows, std::int64_t n_units) {
    Repacking made{};
    made.kernel = table.formats[static_cast<int>(layout.format)];
    made.matrix.weight_stride = layout.unit_bytes * static_cast<std::size_t>(n_units);
    made.matrix.n_rows = n_rows;
    made.matrix.n_k = made.kernel->k_multiple * n_units;
    return made;
}

std::size_t bytes_of(const Matmul &matrix) { return matrix.weight_stride * static_cast<std::size_t>(matrix.n_rows); }

// Memory with a matrix repacked by its kernel alone, over bytes that are all alike.
Bytes by_hand(const Repacking &of, std::byte before) {
    const std::size_t size = of.kernel->repacked_size(of.matrix.n_rows, of.matrix.n_k);
    Bytes memory(size + 64, before);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    const std::size_t skipped = (address + 63) / 64 * 64 - address;
    of.kernel->repack(of.matrix, &memory[skipped], 0, of.matrix.n_rows);
    memory.erase(memory.begin(), memory.begin() + static_cast<std::ptrdiff_t>(skipped));
    memory.resize(size);
    return memory;
}

// A matrix as its kernel repacks it. Bytes that only fill up a group are not written, so they may be any.
class Alone {
  public:
    explicit Alone(const Repacking &of) : ones_(by_hand(of, std::byte{0xff})), zeros_(by_hand(of, std::byte{0})) {
        const auto groups = (of.matrix.n_rows + of.kernel->row_group - 1) / of.kernel->row_group;
        CHECK(unwritten() <= 128 * static_cast<std::size_t>(groups));
    }

    bool is_at(const std::byte *memory) const {
        bool equal = memory != nullptr && reinterpret_cast<std::uintptr_t>(memory) % 64 == 0;
        for (std::size_t i = 0; equal && i < ones_.size(); ++i) {
            equal = ones_[i] != zeros_[i] || memory[i] == ones_[i];
        }
        return equal;
    }

  private:
    Bytes ones_, zeros_;

    std::size_t unwritten() const {
        std::size_t n = 0;
        for (std::size_t i = 0; i < ones_.size(); ++i) {
            n += ones_[i] != zeros_[i];
        }
        return n;
    }
};

// Small ones, rows that fill no group, and more than one job's bytes of rows.
struct Collection {
    std::vector<Bytes> weights;
    std::vector<Repacking> matrices;

    explicit Collection(const KernelTable &table) {
        unsigned seed = 0;
        for (const Layout &layout : layouts) {
            const auto many = static_cast<std::int64_t>((std::size_t{3} << 20) / layout.unit_bytes / 33);
            for (const auto &[n_rows, n_units] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {19, 3}, {many, 33}}) {
                matrices.push_back(matrix_of(table, layout, n_rows, n_units));
                weights.emplace_back(bytes_of(matrices.back().matrix));
                fill(weights.back().data(), weights.back().size(), ++seed);
                matrices.back().matrix.weights = weights.back().data();
            }
        }
    }
};

void each_is_repacked_as_alone(const KernelTable &table) {
    const Collection all(table);
    const std::vector<Bytes> weights = all.weights;
    const std::vector<Alone> alone(all.matrices.begin(), all.matrices.end());
    std::size_t size = 0;
    for (const Repacking &each : all.matrices) {
        size += each.kernel->repacked_size(each.matrix.n_rows, each.matrix.n_k);
    }
    for (int n_threads = 1; n_threads <= 4; ++n_threads) {
        const RepackedMemory memory = repack(all.matrices, n_threads);
        CHECK(memory.size() == size);
        for (std::size_t i = 0; i < alone.size(); ++i) {
            CHECK(alone[i].is_at(memory.of(all.matrices[i].matrix.weights)));
        }
        CHECK(all.weights == weights); // no file: nothing is given back
    }
}

void what_was_not_repacked_is_not_there(const KernelTable &table) {
    const Collection all(table);
    const RepackedMemory memory = repack({all.matrices[1]}, 2);
    CHECK(memory.of(all.matrices[1].matrix.weights) != nullptr);
    CHECK(memory.of(all.matrices[1].matrix.weights + 1) == nullptr);
    CHECK(memory.of(all.matrices[0].matrix.weights) == nullptr);
    CHECK(memory.of(nullptr) == nullptr);
    const RepackedMemory none = repack({}, 4);
    CHECK(none.size() == 0 && none.of(all.matrices[0].matrix.weights) == nullptr && none.of(nullptr) == nullptr);
    CHECK(RepackedMemory().of(&all) == nullptr);
}

// As the embedding that is the head as well may be.
void the_same_weights_are_kept_once(const KernelTable &table) {
    const Collection all(table);
    const Repacking &one = all.matrices[3], &other = all.matrices[4];
    const RepackedMemory memory = repack({one, other, one}, 1);
    CHECK(memory.size() == repack({one, other}, 1).size());
    CHECK(Alone(one).is_at(memory.of(one.matrix.weights)) && Alone(other).is_at(memory.of(other.matrix.weights)));
}

void memory_can_be_handed_on(const KernelTable &table) {
    const Collection all(table);
    RepackedMemory first = repack({all.matrices[1]}, 1);
    const std::byte *const at = first.of(all.matrices[1].matrix.weights);
    const RepackedMemory second = std::move(first);
    CHECK(second.of(all.matrices[1].matrix.weights) == at && Alone(all.matrices[1]).is_at(at));
}

#ifdef __linux__
// Here the pages are those of no file, so what is given back is lost: nothing may be that is still to be read, nor
// anything beside the matrix.
void pages_that_were_read_are_given_back(const KernelTable &table, const Layout &layout, int n_threads) {
    constexpr std::size_t beside = 1000;
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::int64_t n_units = 50;
    Repacking matrix =
        matrix_of(table, layout, static_cast<std::int64_t>((5U << 20) / (50 * layout.unit_bytes)), n_units);
    const std::size_t size = bytes_of(matrix.matrix), all = beside + size + beside;
    void *const mapped = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED);
    auto *const memory = static_cast<std::byte *>(mapped);
    fill(memory, all, 5);
    Bytes copy(memory, memory + all);
    matrix.matrix.weights = memory + beside;
    matrix.is_mapped = true;
    const RepackedMemory repacked = repack({matrix}, n_threads);
    const std::byte *const found = repacked.of(matrix.matrix.weights);
    matrix.matrix.weights = &copy[beside];
    CHECK(Alone(matrix).is_at(found));
    CHECK(std::memcmp(memory, copy.data(), beside) == 0);
    CHECK(std::memcmp(memory + beside + size, &copy[beside + size], beside) == 0);
    std::size_t kept = 0;
    for (std::size_t at = beside; at < beside + size; ++at) {
        kept += memory[at] != std::byte{0};
    }
    CHECK(kept <= 2 * page * (1 + size / (1U << 20))); // where rows of two jobs meet
    munmap(mapped, all);
}
#endif

void check_all(const KernelTable &table) {
    each_is_repacked_as_alone(table);
    what_was_not_repacked_is_not_there(table);
    the_same_weights_are_kept_once(table);
    memory_can_be_handed_on(table);
#ifdef __linux__
    pages_that_were_read_are_given_back(table, layouts[1], 1);
    pages_that_were_read_are_given_back(table, layouts[4], 3);
#endif
}

} // namespace

int main() {
    for (const char *isa : {"avx512", "avx2", "neon"}) {
        const KernelTable *const table = best_kernels(isa);
        if (table == nullptr || std::string(table->isa) != isa) {
            std::printf("%s: not on this CPU\n", isa);
            continue;
        }
        check_all(*table);
        std::printf("%s: checked\n", isa);
    }
    return check::failures;
}
