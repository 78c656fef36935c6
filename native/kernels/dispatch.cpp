#include "kernels/tables.hpp"

#include <string_view>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define ESP_KERNELS_X86 1
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define ESP_KERNELS_ARM 1
#elif defined(__aarch64__) && defined(__APPLE__)
#define ESP_KERNELS_ARM 1
#endif

namespace esp::kernels {
namespace {

bool allows(const char *limit, std::string_view isa) {
    if (limit == nullptr || isa == limit) {
        return true;
    }
    return isa == "avx2" && std::string_view(limit) == "avx512"; // a limit is the best that may be used
}

#ifdef ESP_KERNELS_X86
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

KernelTable without_bf16(KernelTable table) {
    table.formats[static_cast<int>(Format::bf16)] = nullptr;
    return table;
}

const KernelTable *find(const char *limit) {
    __builtin_cpu_init();
    if (has_avx512() && allows(limit, "avx512")) {
        static const KernelTable older = without_bf16(avx512_kernels);
        return __builtin_cpu_supports("avx512bf16") ? &avx512_kernels : &older;
    }
    return has_avx2() && allows(limit, "avx2") ? &avx2_kernels : nullptr;
}
#elif defined(ESP_KERNELS_ARM)
bool has_dotprod() {
#ifdef __APPLE__
    return true; // every Apple silicon processor
#else
    constexpr unsigned long asimd_dotprod = 1UL << 20; // HWCAP_ASIMDDP
    return (getauxval(AT_HWCAP) & asimd_dotprod) != 0;
#endif
}

const KernelTable *find(const char *limit) { return has_dotprod() && allows(limit, "neon") ? &neon_kernels : nullptr; }
#else
const KernelTable *find(const char *) { return nullptr; }
#endif

} // namespace

const KernelTable *best_kernels(const char *limit) { return find(limit); }

} // namespace esp::kernels
