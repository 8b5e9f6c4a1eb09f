// The kernels for AVX-512.
#include <immintrin.h>

#include "rows.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif

#include "kernels/simd_avx512.h"

#include "kernels/all.h"

namespace grpo {

const Kernels kernels_avx512 = kAll;

}  // namespace grpo

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
