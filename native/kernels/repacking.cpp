#include "kernels/repacking.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace esp::kernels {
namespace {

constexpr std::size_t alignment = std::size_t{2} << 20; // of a huge page
constexpr std::size_t bytes_a_job = std::size_t{2} << 20;

// Rows of a matrix for one thread.
struct Job {
    const Repacking *matrix;
    std::byte *to; // memory of the whole matrix
    std::int64_t begin, end;
};

// A translation of addresses serves 2 MB instead of 4 KB: the kernels read all of this memory once a pass.
void use_huge_pages([[maybe_unused]] std::byte *memory, [[maybe_unused]] std::size_t size) {
#ifdef __linux__
    if (size >= 4 * alignment) {
        madvise(memory, size, MADV_HUGEPAGE); // a wish
    }
#endif
}

// The pages stay a part of the file: whoever reads them again gets them back.
void give_back([[maybe_unused]] const std::byte *from, [[maybe_unused]] const std::byte *to) {
#ifdef __linux__
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<std::uintptr_t>(from) + page - 1) / page * page;
    const auto end = reinterpret_cast<std::uintptr_t>(to) / page * page;
    if (begin < end) {
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED);
    }
#endif
}

void run(const Job &job) {
    const Repacking &of = *job.matrix;
    of.kernel->repack(of.matrix, job.to, job.begin, job.end);
    if (of.is_mapped) {
        const auto place = [&](std::int64_t row) {
            return of.matrix.weights + of.matrix.weight_stride * static_cast<std::size_t>(row);
        };
        give_back(place(job.begin), place(job.end));
    }
}

void add_jobs(const Repacking &matrix, std::byte *to, std::vector<Job> &jobs) {
    const std::int64_t group = matrix.kernel->row_group, n_rows = matrix.matrix.n_rows;
    const auto groups = static_cast<std::int64_t>(bytes_a_job / matrix.matrix.weight_stride) / group;
    const std::int64_t step = std::max<std::int64_t>(groups, 1) * group;
    for (std::int64_t begin = 0; begin < n_rows; begin += step) {
        jobs.push_back({&matrix, to, begin, std::min(begin + step, n_rows)});
    }
}

void run_all(const std::vector<Job> &jobs, int n_threads) {
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t i = next++; i < jobs.size(); i = next++) {
            run(jobs[i]);
        }
    };
    std::vector<std::thread> helpers;
    try {
        for (int i = 1; i < n_threads; ++i) {
            helpers.emplace_back(work);
        }
    } catch (const std::system_error &) { // no more threads to be had: those that there are do it
    }
    work();
    for (std::thread &helper : helpers) {
        helper.join();
    }
}

} // namespace

void RepackedMemory::Free::operator()(std::byte *memory) const {
    ::operator delete(memory, std::align_val_t{alignment});
}

RepackedMemory repack(const std::vector<Repacking> &matrices, int n_threads) {
    RepackedMemory made;
    std::vector<const Repacking *> different; // two tensors may be one matrix
    for (const Repacking &each : matrices) {
        if (made.places_.emplace(each.matrix.weights, made.size_).second) {
            made.size_ += each.kernel->repacked_size(each.matrix.n_rows, each.matrix.n_k);
            different.push_back(&each);
        }
    }
    if (made.size_ == 0) {
        return made;
    }
    made.memory_.reset(static_cast<std::byte *>(::operator new(made.size_, std::align_val_t{alignment})));
    use_huge_pages(made.memory_.get(), made.size_);
    std::vector<Job> jobs;
    for (const Repacking *const each : different) {
        add_jobs(*each, made.memory_.get() + made.places_.at(each->matrix.weights), jobs);
    }
    run_all(jobs, n_threads);
    return made;
}

} // namespace esp::kernels
