// Pairs and segments dealt out to the threads. A result depends on its own rows alone.
#include "pairs.h"

#include <algorithm>

#include "head.h"

namespace grpo {

namespace {

constexpr int64_t kPairs = 256;    // of a task: a few rows for each of many tokens
constexpr int64_t kSegments = 16;  // of a task

}  // namespace

void pair_products(const Matrix& a, const Matrix& b, const int64_t* i, const int64_t* j, int64_t count, float* out) {
  const int64_t tasks = ceil_div(count, kPairs);
  parallel_tasks(tasks, worker_count(tasks), [&](int64_t task, int64_t) {
    const int64_t end = std::min(count, (task + 1) * kPairs);
    for (int64_t k = task * kPairs; k < end; k++) {
      if (k + 1 < end) prefetch_row(b.row(j[k + 1]), b.row_bytes());  // rows of the weight lie anywhere in memory
      out[k] = row_product(a.dtype, a.row(i[k]), b.row(j[k]), a.columns);
    }
  });
}

void segment_sums(const Matrix& x, const int64_t* index, const float* factor, const int64_t* offsets, int64_t segments,
                  float* out) {
  const int64_t tasks = ceil_div(segments, kSegments);
  parallel_tasks(tasks, worker_count(tasks), [&](int64_t task, int64_t) {
    for (int64_t s = task * kSegments; s < std::min(segments, (task + 1) * kSegments); s++) {
      float* row = out + s * x.columns;
      std::fill(row, row + x.columns, 0.0f);
      for (int64_t k = offsets[s]; k < offsets[s + 1]; k++) {
        if (k + 1 < offsets[segments]) prefetch_row(x.row(index[k + 1]), x.row_bytes());
        add_row(x.dtype, row, x.row(index[k]), factor[k], x.columns);
      }
    }
  });
}

}  // namespace grpo
