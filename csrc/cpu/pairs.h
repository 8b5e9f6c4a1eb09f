// Rows of two matrices taken in pairs: the work of tokens that have a candidate set.
#pragma once

#include "rows.h"

namespace grpo {

// Rows of fp32, bf16 or fp16, `stride` bytes apart.
struct Matrix {
  const char* data;
  Dtype dtype;
  int64_t stride, columns;

  const void* row(int64_t index) const { return data + index * stride; }
  int64_t row_bytes() const { return columns * (dtype == Dtype::fp32 ? 4 : 2); }
};

// AVX-512: one product, out += factor * x, and a row on its way to the cache.
float row_product(Dtype dtype, const void* a, const void* b, int64_t columns);
void add_row(Dtype dtype, float* out, const void* x, float factor, int64_t columns);
void prefetch_row(const void* row, int64_t bytes);

// out[k] = a[i[k]] . b[j[k]]
void pair_products(const Matrix& a, const Matrix& b, const int64_t* i, const int64_t* j, int64_t count, float* out);

// out[s] [columns] = sum of factor[k] * x[index[k]] over offsets[s] <= k < offsets[s + 1], in this order
void segment_sums(const Matrix& x, const int64_t* index, const float* factor, const int64_t* offsets, int64_t segments,
                  float* out);

}  // namespace grpo
