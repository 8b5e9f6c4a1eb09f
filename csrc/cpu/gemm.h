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

// Operands of a product, in words: a word holds one fp32 number, or two bf16 numbers that are neighbours along the depth.
// An operand in three pieces (rows.h) has one after the other, `piece` words apart.
struct Left {
  const uint32_t* words;  // row-major
  int64_t stride;         // from row to row
  int64_t piece;
};
struct Right {
  const uint32_t* words;  // [depth, 64] without gaps
  int64_t piece;
  int64_t lanes = kLanes;  // the first ones, which are needed: others of the result may be left as they are
};

// c [rows, 64], without gaps, = or += a [rows, depth] @ b [depth, 64], accumulated in fp32 in an order that depends only
// on the depth, which counts words.
using Gemm = void (*)(int64_t rows, int64_t depth, Left a, Right b, float* c, bool add, Ahead ahead);

// bf16 by AVX512-BF16 (kernels_bf16.cpp).
void multiply_bf16(int64_t rows, int64_t depth, Left a, Right b, float* c, bool add, Ahead);

// By AMX (kernels_amx.cpp), on a processor that has it: bf16, and fp32 in three pieces.
struct AmxProducts {
  Gemm bf16, pieces;  // nullptr if the operating system or the compiler does not allow it
};
AmxProducts amx_products();

}  // namespace grpo
