// The tables of the ISAs that were compiled in; each lives in a source file of its own compiler flags.
#pragma once

#include "kernels/kernels.hpp"

namespace esp::kernels {

extern const KernelTable avx512_kernels;
extern const AttentionKernel avx512_attention;
extern const KernelTable avx2_kernels;
extern const AttentionKernel avx2_attention;
extern const KernelTable neon_kernels;
extern const AttentionKernel neon_attention;

} // namespace esp::kernels
