// Rows of logits in memory: their statistics, and the KL divergence of two heads.
#pragma once

#include "head.h"

namespace grpo {

// fp32 rows, `stride` numbers apart.
struct LogitRows {
  float* data;
  int64_t rows, columns, stride;

  float* row(int64_t index) const { return data + index * stride; }
};

void statistics_of_rows(const LogitRows& z, const int64_t* targets, const Statistics& out);

// value[r] = KL of row r, forward (the other's from ours) or reverse. With `factor` ([rows], or nullptr) `other` becomes
// factor * dKL/dz + dlogp * d(log-prob of the target)/dz; otherwise its content has no meaning. dlogp may be nullptr.
void divergence_of_rows(const LogitRows& z, const LogitRows& other, const Statistics& own, const Statistics& others,
                        const int64_t* targets, bool forward, const float* factor, const float* dlogp, float* value);

}  // namespace grpo
