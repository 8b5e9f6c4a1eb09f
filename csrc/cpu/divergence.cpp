// Rows dealt out to the threads; a result depends on its own row alone.
#include "divergence.h"

#include <cmath>

namespace grpo {

void statistics_of_rows(const LogitRows& z, const int64_t* targets, const Statistics& out) {
  const Kernels& kernels = *machine().kernels;
  parallel_tasks(z.rows, worker_count(z.rows), [&](int64_t r, int64_t) {
    RowSums sums;
    kernels.row_sums(z.row(r), z.columns, out.with_entropy, &sums);
    const float target = z.row(r)[targets[r]] - sums.max;
    out.set<double>(r, sums.max, sums.rest, sums.weighted, target);
  });
}

void divergence_of_rows(const LogitRows& z, const LogitRows& other, const Statistics& own, const Statistics& others,
                        const int64_t* targets, bool forward, const float* factor, const float* dlogp, float* value) {
  const Kernels& kernels = *machine().kernels;
  parallel_tasks(z.rows, worker_count(z.rows), [&](int64_t r, int64_t) {
    const LogNormalizer ours{own.max[r], own.log_sum[r]}, theirs{others.max[r], others.log_sum[r]};
    double sum_of_x = 0.0;
    value[r] = static_cast<float>(
        kernels.row_divergence(z.row(r), other.row(r), z.columns, forward, ours, theirs, &sum_of_x));
    if (factor == nullptr) return;
    const float slope = dlogp == nullptr ? 0.0f : dlogp[r];
    // 1 - p of the target from expm1: a confident token's gradient keeps its digits
    const float at_target = -std::expm1(own.logp[r]) * slope;
    kernels.row_derivative(z.row(r), other.row(r), z.columns, ours, static_cast<float>(sum_of_x), factor[r], slope,
                           dlogp == nullptr ? -1 : targets[r], at_target);
  });
}

}  // namespace grpo
