#include "kernels/product_race.hpp"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "kernels/cpu_device.hpp"
#include "kernels/ggml_hook.hpp"

namespace esp::kernels {
namespace {

constexpr std::int64_t most_rows = 1 << 24, most_k = 1 << 20, most_columns = 512;
constexpr int most_sizes = 16, most_copies = 512, most_rounds = 9, least_rounds = 3;
constexpr double given_up = 5.0; // times the budget: beside another program, threads that wait for each other crawl
constexpr std::int64_t whole_rows = 64; // a part of the rows is a multiple of this, so that it can be repacked

// Everything that ggml would end the process for is checked before it is asked.
void require(bool ok, const std::string &message) {
    if (!ok) {
        throw std::invalid_argument(message);
    }
}

bool same_name(const std::string &given, const char *name) {
    return given.size() == std::strlen(name) && std::equal(given.begin(), given.end(), name, [](char a, char b) {
               return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
           });
}

ggml_type type_of(const MatrixShape &shape) {
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K,
                                 GGML_TYPE_BF16, GGML_TYPE_F16, GGML_TYPE_F32}) {
        if (same_name(shape.type, ggml_type_name(type))) {
            return type;
        }
    }
    throw std::invalid_argument("there is no kernel of ours for the type " + shape.type);
}

ggml_type checked_type(const MatrixShape &shape, int n_threads) {
    const ggml_type type = type_of(shape);
    require(shape.n_rows >= 2 && shape.n_rows <= most_rows, "a matrix needs 2 to 2^24 rows");
    const std::int64_t unit = ggml_blck_size(type);
    require(shape.n_k >= unit && shape.n_k <= most_k && shape.n_k % unit == 0,
            "the length of a row must be a multiple of " + std::to_string(unit) + " and at most 2^20");
    require(n_threads >= 1 && n_threads <= GGML_MAX_N_THREADS, "threads must be between 1 and 512");
    return type;
}

void check_columns(std::int64_t n_columns) {
    require(n_columns >= 1 && n_columns <= most_columns, "columns must be between 1 and 512");
}

// Whether llama.cpp would keep such a matrix in buffers of this type: it asks in the same way.
bool is_home_of(ggml_backend_buffer_type_t buffers, const CpuDevice &cpu, ggml_type type, const MatrixShape &shape) {
    const ggml_context_ptr context = new_context(8 * ggml_tensor_overhead());
    ggml_tensor *const weights = ggml_new_tensor_2d(context.get(), type, shape.n_k, shape.n_rows);
    ggml_tensor *const x = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, shape.n_k, 512);
    const ggml_tensor *const y = ggml_mul_mat(context.get(), weights, x);
    const ggml_backend_buffer_ptr empty(made(ggml_backend_buft_alloc_buffer(buffers, 0), "a buffer"));
    weights->buffer = empty.get();
    return ggml_backend_dev_supports_op(cpu.device, y);
}

// The buffer type in which llama.cpp would keep such a matrix.
ggml_backend_buffer_type_t home_of(const CpuDevice &cpu, ggml_type type, const MatrixShape &shape) {
    void *const function = cpu.question("ggml_backend_dev_get_extra_bufts");
    if (function != nullptr) {
        auto *at = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(function)(cpu.device);
        for (; at != nullptr && *at != nullptr; ++at) {
            if (is_home_of(*at, cpu, type, shape)) {
                return *at;
            }
        }
    }
    return cpu.plain;
}

// Matrices of one shape in one buffer.
class Weights {
  public:
    std::vector<ggml_tensor *> copies;

    Weights(ggml_backend_buffer_type_t type_of_buffer, ggml_type type, const MatrixShape &shape, std::size_t n_copies)
        : context_(new_context((n_copies + 1) * ggml_tensor_overhead())) {
        for (std::size_t i = 0; i < n_copies; ++i) {
            copies.push_back(ggml_new_tensor_2d(context_.get(), type, shape.n_k, shape.n_rows));
        }
        buffer_.reset(made(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), type_of_buffer), "a buffer"));
        ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }

    void fill(const std::byte *weights) {
        for (ggml_tensor *const copy : copies) {
            ggml_backend_tensor_set(copy, weights, 0, ggml_nbytes(copy));
        }
    }

    void give_to_ours(const TakeSettings &settings) {
        taken_ = take(copies, settings);
        require(taken_->matrices.size() == 1 && taken_->matrices.begin()->second == static_cast<int>(copies.size()),
                "there is no kernel of ours for this matrix on this processor");
    }

  private:
    ggml_context_ptr context_; // goes last: a buffer knows nothing of its tensors
    ggml_backend_buffer_ptr buffer_;
    std::unique_ptr<Taken> taken_;
};

// The products of all copies with the same columns, as one graph.
class Graph {
  public:
    Graph(const CpuDevice &cpu, const Weights &weights, std::int64_t n_k, std::int64_t n_columns) : device_(&cpu) {
        const std::size_t n = weights.copies.size();
        context_ = new_context((n + 2) * ggml_tensor_overhead() + ggml_graph_overhead_custom(n + 8, false));
        x_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, n_k, n_columns);
        graph_ = ggml_new_graph_custom(context_.get(), n + 8, false);
        for (ggml_tensor *const matrix : weights.copies) {
            y_ = ggml_mul_mat(context_.get(), matrix, x_);
            ggml_build_forward_expand(graph_, y_);
        }
        buffer_.reset(made(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), cpu.plain), "a buffer"));
    }

    void set_columns(const float *x) { ggml_backend_tensor_set(x_, x, 0, ggml_nbytes(x_)); }

    void compute() const { device_->compute(graph_); }

    std::vector<float> result() const {
        std::vector<float> y(static_cast<std::size_t>(ggml_nelements(y_)));
        ggml_backend_tensor_get(y_, y.data(), 0, ggml_nbytes(y_));
        return y;
    }

  private:
    const CpuDevice *device_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    ggml_cgraph *graph_ = nullptr;
    ggml_tensor *x_ = nullptr, *y_ = nullptr;
};

// Numbers as a model has them; subnormal ones would be slow.
std::vector<float> some_floats(std::size_t n) {
    std::minstd_rand draw(1);
    std::vector<float> found(n);
    for (float &number : found) {
        number = static_cast<float>(draw()) / static_cast<float>(std::minstd_rand::max()) - 0.5F;
    }
    return found;
}

// A matrix that repeats a few rows: to quantise all would take longer than the race.
std::vector<std::byte> some_weights(ggml_type type, const MatrixShape &shape) {
    const std::int64_t n = std::min<std::int64_t>(shape.n_rows, 4);
    const std::size_t row = ggml_row_size(type, shape.n_k), part = row * static_cast<std::size_t>(n);
    std::vector<std::byte> weights(row * static_cast<std::size_t>(shape.n_rows));
    const std::vector<float> floats = some_floats(static_cast<std::size_t>(n * shape.n_k));
    ggml_quantize_chunk(type, floats.data(), weights.data(), 0, n, shape.n_k, nullptr);
    for (std::size_t at = part; at < weights.size(); at += part) {
        std::memcpy(weights.data() + at, weights.data(), std::min(part, weights.size() - at));
    }
    return weights;
}

// As many rows of the matrix as fit.
MatrixShape part_of(const MatrixShape &shape, ggml_type type, std::size_t n_bytes) {
    const auto fit = static_cast<std::int64_t>(n_bytes / ggml_row_size(type, shape.n_k)) / whole_rows * whole_rows;
    return {shape.type, std::min(shape.n_rows, std::max(fit, whole_rows)), shape.n_k};
}

// One side of a race: copies of the matrix, and a graph for each number of columns.
class Racer {
  public:
    Racer(const CpuDevice &cpu, Weights weights, const std::vector<int> &columns, const MatrixShape &shape)
        : weights_(std::move(weights)) {
        const int most = *std::max_element(columns.begin(), columns.end());
        const std::vector<float> x = some_floats(static_cast<std::size_t>(shape.n_k * most));
        for (const int n : columns) {
            graphs_.emplace_back(cpu, weights_, shape.n_k, n).set_columns(x.data());
        }
    }

    // Microseconds of all copies' products with the columns of this place.
    double time(std::size_t place) {
        using Clock = std::chrono::steady_clock;
        const Clock::time_point start = Clock::now();
        graphs_[place].compute();
        return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    }

  private:
    Weights weights_;
    std::vector<Graph> graphs_;
};

// Rounds in turns, as long as another one fits into the budget. `share` of what is timed is one product.
void run_rounds(Racer &ours, Racer &stock, double budget_ms, double share, RaceTimes &times) {
    const std::size_t n = times.ours.size();
    ours.time(0); // not counted: threads start, pages are mapped
    stock.time(0);
    double spent_us = 0.0;
    for (int round = 0; round < most_rounds; ++round) {
        if (round >= least_rounds && spent_us * (round + 1) / round > 1000.0 * budget_ms) {
            return;
        }
        for (std::size_t place = 0; place < n; ++place) {
            for (const bool is_ours : {true, false}) { // never one twice: it would find its weights in the cache
                const double us = (is_ours ? ours : stock).time(place);
                (is_ours ? times.ours : times.stock)[place].push_back(us * share);
                spent_us += us;
            }
            if (spent_us > given_up * 1000.0 * budget_ms) {
                return;
            }
        }
    }
}

} // namespace

std::vector<float> product(const MatrixShape &shape, const std::byte *weights, std::size_t n_bytes, const float *x,
                           std::int64_t n_columns, const ProductSettings &settings) {
    const ggml_type type = checked_type(shape, settings.n_threads);
    check_columns(n_columns);
    require(n_bytes == ggml_row_size(type, shape.n_k) * static_cast<std::size_t>(shape.n_rows),
            "the weights have another size than their shape says");
    const CpuDevice cpu(settings.n_threads);
    Weights matrix(settings.ours ? cpu.plain : home_of(cpu, type, shape), type, shape, 1);
    matrix.fill(weights);
    if (settings.ours) {
        matrix.give_to_ours({settings.limit, settings.n_threads, settings.repack, {}});
    }
    Graph graph(cpu, matrix, shape.n_k, n_columns);
    graph.set_columns(x);
    graph.compute();
    return graph.result();
}

RaceTimes race(const MatrixShape &shape, const std::vector<int> &columns, const RaceSettings &settings) {
    const ggml_type type = checked_type(shape, settings.n_threads);
    require(!columns.empty() && columns.size() <= most_sizes, "1 to 16 numbers of columns are needed");
    std::for_each(columns.begin(), columns.end(), check_columns);
    require(settings.n_bytes <= std::size_t{1} << 32, "a side may take 4 GiB at most");
    const CpuDevice cpu(settings.n_threads);
    const MatrixShape part = part_of(shape, type, settings.n_bytes);
    const std::vector<std::byte> numbers = some_weights(type, part);
    const std::size_t n = std::clamp<std::size_t>(settings.n_bytes / numbers.size(), 1, most_copies);
    ggml_backend_buffer_type_t const home = home_of(cpu, type, part);
    Weights our_weights(cpu.plain, type, part, n), stock_weights(home, type, part, n);
    our_weights.fill(numbers.data());
    our_weights.give_to_ours({settings.limit, settings.n_threads, settings.repack, {}});
    stock_weights.fill(numbers.data());
    Racer ours(cpu, std::move(our_weights), columns, part), stock(cpu, std::move(stock_weights), columns, part);
    RaceTimes times{std::vector<std::vector<double>>(columns.size()), std::vector<std::vector<double>>(columns.size()),
                    home != cpu.plain};
    const double rows_timed = static_cast<double>(part.n_rows) * static_cast<double>(n);
    run_rounds(ours, stock, settings.budget_ms, static_cast<double>(shape.n_rows) / rows_timed, times);
    return times;
}

} // namespace esp::kernels
