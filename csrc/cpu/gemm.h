// Small products, one panel of 64 lanes wide.
#pragma once

#include <cstdint>

namespace grpo {

// Tokens (or columns of a gradient) in neighbouring vector lanes.
constexpr int64_t kLanes = 64;

// Words that are read after a product, in its last step at the latest: AMX fetches them to the second-level cache
// meanwhile. Nothing depends on it.
struct Ahead {
  const uint32_t* words = nullptr;
  int64_t count = 0;

  // The n-th of `parts` equal parts.
  Ahead part(int64_t n, int64_t parts) const {
    const int64_t first = count * n / parts;
    return {words + first, count * (n + 1) / parts - first};
  }
};

// c [rows, 64] = or += a [rows, depth] @ b [depth, 64], accumulated in fp32 in an order that depends only on the depth.
//
// A word holds one fp32 number or two bf16 numbers that are neighbours along the depth, so one layout serves both:
// a is row-major with `lda` words a row, b is [depth, 64] words without gaps. Depth and strides count words.
using Gemm = void (*)(int64_t rows, int64_t depth, const uint32_t* a, int64_t lda, const uint32_t* b, float* c,
                      int64_t ldc, bool add, Ahead ahead);

// bf16 by AVX512-BF16 (kernels_avx512.cpp).
void multiply_bf16(int64_t rows, int64_t depth, const uint32_t* a, int64_t lda, const uint32_t* b, float* c,
                   int64_t ldc, bool add, Ahead);

// bf16 by AMX (kernels_amx.cpp), on a processor that has it; nullptr if the operating system or the compiler does not
// allow it.
Gemm amx_bf16();

}  // namespace grpo
