// Tokens that have a candidate set: products with the rows of their set alone, and sums of chosen rows.
#pragma once

#include "head.h"

namespace grpo {

// Rows of fp32, bf16 or fp16, `stride` bytes apart.
struct Matrix {
  char* data;
  Dtype dtype;
  int64_t stride, columns;

  void* row(int64_t index) const { return data + index * stride; }
};

// The sets of some tokens, one after the other, and what turns products into z.
struct CandidateSets {
  int64_t tokens;
  const int64_t* offsets;  // [tokens + 1]
  const int64_t* ids;      // [offsets[tokens]]
  const int64_t* targets;  // [tokens]; one that is not in the set belongs to another rank
  const float* bias;       // by id, or nullptr
  const float* temperature;  // [tokens]
  float scale;
  float softcap;  // 0: none
};

// z of each candidate, whose row of the weight is `index[k]`, and the statistics of each token.
void score_sets(const CandidateSets& sets, const Matrix& hidden, const Matrix& weight, const int64_t* index, float* z,
                const Statistics& out);

// out[k] = dL/d(product) of each candidate; dentropy may be nullptr.
void differentiate_sets(const CandidateSets& sets, const float* z, const Statistics& statistics, const float* dlogp,
                        const float* dentropy, float* out);

// out[rows[s]] += sum of factor[k] * x[index[k]] over offsets[s] <= k < offsets[s + 1], in this order; rows differ.
void add_segment_sums(const Matrix& out, const int64_t* rows, const Matrix& x, const int64_t* index,
                      const float* factor, const int64_t* offsets, int64_t segments);

}  // namespace grpo
