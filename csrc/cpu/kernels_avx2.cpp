// The kernels for AVX2 with FMA and F16C.
#include <immintrin.h>

#include "rows.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "kernels/simd_avx2.h"

#include "kernels/all.h"

namespace grpo {

const Kernels kernels_avx2 = kAll;

}  // namespace grpo

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
