#include "kernels/ggml_hook.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#include "kernels/deferred_head.hpp"
#include "kernels/kernels.hpp"
#include "kernels/repacking.hpp"
#include "kernels/shares.hpp"
#include "llama.h"

#ifndef _WIN32
#include <dlfcn.h>
#endif

// ggml-cpu's own types, as of the pinned version; only pointers to them appear in public headers.
struct ggml_compute_params {
    int ith, nth;
    std::size_t wsize;
    void *wdata;
    struct ggml_threadpool *threadpool;
    bool use_ref;
};

struct ggml_backend_buffer_type {
    void *interface[6];
    ggml_backend_dev_t device;
    void *context;
};

namespace esp::kernels {
namespace {

// The layout of ggml::cpu::tensor_traits and ggml::cpu::extra_buffer_type: a virtual destructor, then these.
class TensorTraits {
  public:
    virtual ~TensorTraits() = default;
    virtual bool work_size(int n_threads, const ggml_tensor *op, std::size_t &size) = 0;
    virtual bool compute_forward(ggml_compute_params *params, ggml_tensor *op) = 0;
};

class ExtraBufferType {
  public:
    virtual ~ExtraBufferType() = default;
    virtual bool supports_op(ggml_backend_dev_t device, const ggml_tensor *op) = 0;
    virtual TensorTraits *get_tensor_traits(const ggml_tensor *op) = 0;
};

using Barrier = void (*)(ggml_threadpool *);
using ExtraTypes = std::vector<ggml_backend_buffer_type_t> &(*)();
using TensorMap = const std::vector<std::pair<std::string, ggml_tensor *>> &(*)(const llama_model *);

Barrier barrier = nullptr;
TensorMap tensor_map = nullptr;
std::atomic<std::int64_t> products{0}, attentions{0};

constexpr std::int64_t bytes_at_a_time = 8192; // of weights: some hundred nanoseconds
constexpr std::ptrdiff_t bytes_fetched = 8192; // of a thread's weights at first, as many as kernels then fetch ahead
constexpr std::int64_t shared_from = 16;       // columns; fewer are prepared by every thread, which saves a barrier

std::byte *aligned(void *memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    return reinterpret_cast<std::byte *>((address + 63) / 64 * 64);
}

Matmul rows_of(const ggml_tensor *weights) {
    Matmul matmul{};
    matmul.weights = static_cast<const std::byte *>(weights->data);
    matmul.weight_stride = weights->nb[1];
    matmul.n_rows = weights->ne[1];
    matmul.n_k = weights->ne[0];
    return matmul;
}

Matmul matmul_of(const ggml_tensor *op) {
    const ggml_tensor *const x = op->src[1];
    Matmul matmul = rows_of(op->src[0]);
    matmul.x = static_cast<const float *>(x->data);
    matmul.x_stride = x->nb[1];
    matmul.n_columns = x->ne[1] * x->ne[2] * x->ne[3];
    matmul.y = static_cast<float *>(op->data);
    matmul.y_stride = op->nb[1];
    return matmul;
}

class Attend;

// The products of a matrix that was taken over, which points here.
class Products final : public TensorTraits {
  public:
    const FormatKernel *const kernel;    // null: ggml's products, and only attention behind them is ours
    Attend *const attention;             // of the same instruction set
    const std::byte *repacked = nullptr; // null: the weights are used as they are

    Products(const FormatKernel *of, Attend *beside) : kernel(of), attention(beside) {}

    bool work_size(int n_threads, const ggml_tensor *op, std::size_t &size) override {
        const_cast<ggml_tensor *>(op)->extra = DeferredHead::for_product(op); // read by all threads of the pass
        const Matmul matmul = matmul_of(op);
        const auto copies = static_cast<std::size_t>(matmul.n_columns < shared_from ? n_threads : 1);
        size = kernel->columns_size(matmul.n_k, matmul.n_columns) * copies + 64;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        if (op->extra != nullptr) {
            static_cast<DeferredHead *>(op->extra)->keep(op, params->ith, params->nth);
            return true;
        }
        Matmul matmul = matmul_of(op);
        matmul.repacked = repacked;
        std::byte *columns = aligned(params->wdata);
        const std::int64_t n = matmul.n_columns, i = params->ith, threads = params->nth;
        const std::int64_t group = kernel->row_group, n_groups = (matmul.n_rows + group - 1) / group;
        const std::int64_t own_begin = n_groups * i / threads, own_end = n_groups * (i + 1) / threads;
        fetch(matmul, own_begin * group, own_end * group);
        if (n < shared_from) {
            columns += kernel->columns_size(matmul.n_k, n) * static_cast<std::size_t>(i);
            kernel->prepare(matmul, columns, 0, n);
        } else {
            kernel->prepare(matmul, columns, n * i / threads, n * (i + 1) / threads);
            barrier(params->threadpool);
        }
        const auto group_bytes = static_cast<std::int64_t>(matmul.weight_stride) * group;
        const std::int64_t least = (bytes_at_a_time + group_bytes - 1) / group_bytes;
        shares_of(params->threadpool, threads).run(n_groups, least, i, threads, [&](Share::Groups groups) {
            const bool is_own = groups.begin >= own_begin && groups.end <= own_end;
            matmul.fetch_end = (is_own ? own_end : groups.end) * group;
            kernel->multiply(matmul, columns, groups.begin * group, std::min(groups.end * group, matmul.n_rows));
        });
        if (i == 0) {
            products.fetch_add(1, std::memory_order_relaxed);
        }
        return true;
    }

  private:
    // Brings the first of a thread's repacked rows [begin, end) into the cache while it prepares columns.
    void fetch(const Matmul &matmul, std::int64_t begin, std::int64_t end) const {
#ifdef __GNUC__
        if (repacked != nullptr) {
            const std::byte *const first = repacked + kernel->repacked_size(begin, matmul.n_k);
            const std::byte *const last = repacked + kernel->repacked_size(end, matmul.n_k);
            for (const std::byte *at = first; at < last && at < first + bytes_fetched; at += 64) {
                __builtin_prefetch(at, 0, 2);
            }
        }
#endif
    }
};

// Attention behind weights that were taken over.
class Attend final : public TensorTraits {
  public:
    const AttentionKernel *kernel = nullptr;

    bool work_size(int, const ggml_tensor *op, std::size_t &size) override {
        size = kernel->partial_size(attention_of(op)) + 64;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const Attention task = attention_of(op);
        auto *const partial = reinterpret_cast<float *>(aligned(params->wdata));
        const std::int64_t i = params->ith, threads = params->nth;
        const std::int64_t n_outputs = task.n_rows * task.n_heads;
        kernel->attend(task, partial, i, threads);
        barrier(params->threadpool);
        kernel->combine(task, partial, n_outputs * i / threads, n_outputs * (i + 1) / threads);
        if (i == 0) {
            attentions.fetch_add(1, std::memory_order_relaxed);
        }
        return true;
    }

    // Wider passes are prompts, for which ggml has a tiled kernel.
    bool accepts(const ggml_tensor *op) const {
        const ggml_tensor *const q = op->src[0], *const k = op->src[1], *const v = op->src[2], *const mask = op->src[3];
        float parameters[3]; // scale, bias, cap
        std::memcpy(parameters, op->op_params, sizeof parameters);
        return kernel != nullptr && mask != nullptr && op->src[4] == nullptr && parameters[1] == 0.0F &&
               parameters[2] == 0.0F && q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 &&
               v->type == GGML_TYPE_F16 && mask->type == GGML_TYPE_F16 && q->ne[1] <= kernel->most_rows &&
               q->ne[3] == 1 && k->ne[3] == 1 && mask->ne[2] == 1 && mask->ne[3] == 1 && q->ne[2] % k->ne[2] == 0 &&
               v->ne[2] == k->ne[2] && k->ne[1] % kernel->cells_multiple == 0 && fits(k) && fits(v);
    }

  private:
    bool fits(const ggml_tensor *cache) const {
        return cache->ne[0] % kernel->size_multiple == 0 && cache->ne[0] <= kernel->largest_size && cache->nb[0] == 2;
    }

    static Attention attention_of(const ggml_tensor *op) {
        const ggml_tensor *const q = op->src[0], *const k = op->src[1], *const v = op->src[2], *const mask = op->src[3];
        float scale;
        std::memcpy(&scale, op->op_params, sizeof scale);
        const auto bytes = [](const ggml_tensor *tensor) { return static_cast<const std::byte *>(tensor->data); };
        return {bytes(q),
                q->nb[1],
                q->nb[2],
                bytes(k),
                k->nb[1],
                k->nb[2],
                bytes(v),
                v->nb[1],
                v->nb[2],
                bytes(mask),
                mask->nb[1],
                q->ne[1],
                q->ne[2],
                k->ne[2],
                k->ne[1],
                k->ne[0],
                v->ne[0],
                scale,
                static_cast<float *>(op->data)};
    }
};

constexpr int n_isas = 2; // kept apart, so that models may use different ones
Attend attention[n_isas];

// The marks of all matrices lie in one place, so that they can be told from what other backends attach to tensors.
class Marks {
  public:
    Products *make(const FormatKernel *kernel, Attend *beside) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (free_.empty() && used_ == most) {
            return nullptr;
        }
        void *at = storage_ + used_ * sizeof(Products);
        if (free_.empty()) {
            ++used_;
        } else {
            at = free_.back();
            free_.pop_back();
        }
        return new (at) Products(kernel, beside);
    }

    void drop(Products *mark) {
        const std::lock_guard<std::mutex> lock(mutex_);
        mark->~Products();
        free_.push_back(mark);
    }

    // The mark of a matrix, null where it has none of ours.
    Products *of(const ggml_tensor *weights) const {
        const auto *const at = static_cast<const std::byte *>(weights->extra);
        const bool is_ours = !std::less<>()(at, storage_) && std::less<>()(at, storage_ + sizeof storage_);
        return is_ours ? static_cast<Products *>(weights->extra) : nullptr;
    }

  private:
    static constexpr std::size_t most = 1 << 16;
    std::mutex mutex_;
    std::size_t used_ = 0;
    std::vector<void *> free_;
    alignas(Products) std::byte storage_[most * sizeof(Products)];
};

Marks &marks() {
    static Marks &all = *new Marks; // in pages that nothing touches before they are used; outlives every model
    return all;
}

bool is_plain_product(const ggml_tensor *op) {
    const ggml_tensor *const x = op->src[1];
    const bool rows_in_order = ggml_is_contiguous(op) && (ggml_is_contiguous(x) || (x->ne[2] == 1 && x->ne[3] == 1));
    return op->op == GGML_OP_MUL_MAT && op->type == GGML_TYPE_F32 && x->type == GGML_TYPE_F32 &&
           x->nb[0] == sizeof(float) && rows_in_order;
}

// The attention kernels of the model that an operation belongs to, told by the weights that its queries come from.
Attend *attention_behind(const ggml_tensor *op) {
    constexpr int most_steps = 12; // views, a norm, a bias, the rotation
    const ggml_tensor *tensor = op->src[0];
    for (int step = 0; tensor != nullptr && step < most_steps; ++step, tensor = tensor->src[0]) {
        if (tensor->op == GGML_OP_MUL_MAT) {
            const Products *const mark = marks().of(tensor->src[0]);
            return mark == nullptr ? nullptr : mark->attention;
        }
    }
    return nullptr;
}

class Entry final : public ExtraBufferType {
  public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }

    TensorTraits *get_tensor_traits(const ggml_tensor *op) override {
        if (op->op == GGML_OP_MUL_MAT) {
            Products *const found = op->src[0]->extra == nullptr ? nullptr : marks().of(op->src[0]);
            return found != nullptr && found->kernel != nullptr && is_plain_product(op) ? found : nullptr;
        }
        if (op->op == GGML_OP_FLASH_ATTN_EXT) {
            Attend *const found = attention_behind(op);
            return found != nullptr && found->accepts(op) ? found : nullptr;
        }
        return nullptr;
    }
};

#ifdef _LIBCPP_VERSION
constexpr const char *tensor_map_symbol = "_Z29llama_internal_get_tensor_mapPK11llama_model";
#else
constexpr const char *tensor_map_symbol = "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model";
#endif

// A symbol of the very library, already in this process, that holds `neighbour`: there may be copies of it on disk.
void *symbol_beside(void *neighbour, const char *name) {
#ifndef _WIN32
    Dl_info info{};
    void *const library = dladdr(neighbour, &info) == 0 ? nullptr : dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    void *const found = library == nullptr ? nullptr : dlsym(library, name);
    if (library != nullptr) {
        dlclose(library);
    }
    if (found != nullptr) {
        return found;
    }
#else
    static_cast<void>(neighbour);
#endif
    throw std::runtime_error(std::string("llama.cpp's libraries do not export ") + name);
}

int format_of(ggml_type type) {
    switch (type) {
    case GGML_TYPE_Q4_0:
        return static_cast<int>(Format::q4_0);
    case GGML_TYPE_Q4_1:
        return static_cast<int>(Format::q4_1);
    case GGML_TYPE_Q8_0:
        return static_cast<int>(Format::q8_0);
    case GGML_TYPE_Q4_K:
        return static_cast<int>(Format::q4_k);
    case GGML_TYPE_Q6_K:
        return static_cast<int>(Format::q6_k);
    case GGML_TYPE_BF16:
        return static_cast<int>(Format::bf16);
    case GGML_TYPE_F16:
        return static_cast<int>(Format::f16);
    case GGML_TYPE_F32:
        return static_cast<int>(Format::f32);
    default:
        return -1;
    }
}

// Whether the weights are pages of a file that the system can read again.
bool is_mapped(const ggml_tensor *tensor) {
    return std::strcmp(ggml_backend_buffer_name(tensor->buffer), "CPU_Mapped") == 0;
}

bool can_be_taken(const ggml_tensor *tensor) {
    return ggml_n_dims(tensor) == 2 && ggml_is_contiguous(tensor) && tensor->extra == nullptr &&
           tensor->buffer != nullptr && ggml_backend_buffer_is_host(tensor->buffer) && tensor->view_src == nullptr;
}

// A matrix on its way to the kernels.
struct Candidate {
    ggml_tensor *tensor;
    const FormatKernel *kernel; // null where there is none
};

std::vector<Candidate> candidates_among(const std::vector<ggml_tensor *> &tensors, const KernelTable &table) {
    std::vector<Candidate> found;
    for (ggml_tensor *const tensor : tensors) {
        if (can_be_taken(tensor)) {
            const int format = format_of(tensor->type);
            const FormatKernel *const kernel = format < 0 ? nullptr : table.formats[format];
            found.push_back({tensor, kernel != nullptr && tensor->ne[0] % kernel->k_multiple == 0 ? kernel : nullptr});
        }
    }
    const auto has_kernel = [](const Candidate &each) { return each.kernel != nullptr; };
    return std::any_of(found.begin(), found.end(), has_kernel) ? found : std::vector<Candidate>{};
}

} // namespace

std::string install() {
    static bool done = false;
    static std::mutex mutex; // models may be loaded in several threads
    const std::lock_guard<std::mutex> lock(mutex);
    const KernelTable *const best = best_kernels(nullptr);
    if (best == nullptr || done) {
        return best == nullptr ? "" : best->isa;
    }
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void *const question = device == nullptr ? nullptr
                                             : ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                                                                 "ggml_backend_dev_get_extra_bufts");
    if (question == nullptr) {
        throw std::runtime_error("llama.cpp's CPU backend does not tell its buffer types");
    }
    // the list that weights are allocated from is a copy made at the first question: asked now, it lacks our entry
    reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(question)(device);
    barrier = reinterpret_cast<Barrier>(symbol_beside(question, "ggml_barrier"));
    const auto extra_types =
        reinterpret_cast<ExtraTypes>(symbol_beside(question, "_Z39ggml_backend_cpu_get_extra_buffer_typesv"));
    tensor_map =
        reinterpret_cast<TensorMap>(symbol_beside(reinterpret_cast<void *>(&llama_model_free), tensor_map_symbol));
    static Entry entry;
    static ggml_backend_buffer_type type{{}, device, &entry};
    auto &types = extra_types();
    types.insert(types.begin(), &type);
    done = true;
    return best->isa;
}

struct Taken::Memory {
    std::vector<Products *> marks;
    RepackedMemory repacked;
};

Taken::Taken() : memory(std::make_unique<Memory>()) {}

Taken::~Taken() {
    for (Products *const mark : memory->marks) {
        marks().drop(mark);
    }
}

std::unique_ptr<Taken> take(const std::vector<ggml_tensor *> &weights, const TakeSettings &settings) {
    auto taken = std::make_unique<Taken>();
    const KernelTable *const table = best_kernels(settings.limit);
    if (table == nullptr || tensor_map == nullptr) {
        return taken;
    }
    const std::vector<Candidate> candidates = candidates_among(weights, *table);
    std::vector<Repacking> repackings;
    for (const Candidate &each : candidates) {
        const bool wanted = settings.repack && settings.lookups.count(each.tensor->name) == 0;
        if (wanted && each.kernel != nullptr && each.kernel->repack != nullptr) {
            repackings.push_back({rows_of(each.tensor), each.kernel, is_mapped(each.tensor)});
        }
    }
    taken->memory->repacked = repack(repackings, settings.n_threads);
    taken->repacked_bytes = taken->memory->repacked.size();
    Attend &beside = attention[table->isa == best_kernels(nullptr)->isa ? 0 : 1];
    beside.kernel = table->attention;
    for (const Candidate &each : candidates) {
        Products *const mark = marks().make(each.kernel, &beside);
        if (mark == nullptr) {
            break; // the rest is llama.cpp's
        }
        mark->repacked = taken->memory->repacked.of(each.tensor->data);
        taken->memory->marks.push_back(mark);
        each.tensor->extra = mark;
        if (each.kernel != nullptr) {
            ++taken->matrices[ggml_type_name(each.tensor->type)];
        }
    }
    return taken;
}

std::unique_ptr<Taken> take_over(const llama_model *model, const TakeSettings &settings) {
    std::vector<ggml_tensor *> tensors;
    if (tensor_map != nullptr) {
        for (const auto &[name, tensor] : tensor_map(model)) {
            tensors.push_back(tensor);
        }
    }
    return take(tensors, settings);
}

std::int64_t n_products() { return products.load(std::memory_order_relaxed); }

std::int64_t n_attentions() { return attentions.load(std::memory_order_relaxed); }

} // namespace esp::kernels
