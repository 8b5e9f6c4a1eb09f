// The kernels for AVX-512 with bf16: what AVX512-BF16 and AMX multiply is packed by it; and a product for AVX512-BF16.
#include <immintrin.h>

#include "rows.h"

#define GRPO_AVX512_BF16

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#endif

#include "kernels/simd_avx512.h"

#include "kernels/all.h"

namespace grpo {
namespace {

struct Bf16 {
  static inline __attribute__((always_inline)) Floats step(Words a, Words b, Floats sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

}  // namespace

void multiply_bf16(int64_t rows, int64_t depth, Left a, Right b, float* c, bool add, Ahead) {
  multiply<Bf16>(rows, depth, a, b, c, add);
}

const Kernels kernels_bf16 = kAll;

}  // namespace grpo

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
