// The work done once for a row: its inputs, target, loss and coefficients. For host and device.
#pragma once

#include <cstdint>

#include "objective.h"
#include "row_math.h"

namespace grpo {

enum class RowMode { statistics, gradient, loss };

// Everything a row kernel reads and writes. A pointer is null where there is nothing.
struct RowArguments {
  const void* logits;
  void* out;
  int64_t stride_logits, stride_out;  // elements
  int64_t rows;
  int vocab_size;
  bool wide_logits, wide_out;  // rows start at multiples of 16 bytes
  bool stores_land_ahead;      // the gradient is narrower than the logits in whose memory it is written
  const int64_t* targets;
  const float* bias;
  const float* temperatures;  // [R], else `temperature`
  float temperature, logit_scale, softcap;
  float *max, *log_sum, *logp, *entropy;  // [R]; read for a gradient, else written
  float* loss;                            // [R]
  float* dlogp;                           // [R]; read for a gradient, written for a loss
  const float* dentropy;                  // [R]
  const float *advantages, *weight, *old_logp, *ref_logp, *is_ratio;  // [R]
  const float* entropy_weight;                                        // 0-d
  ObjectiveOptions<float> options;
};

GRPO_HOST_DEVICE RowTransform row_transform(const RowArguments& a, int64_t row) {
  const float temperature = a.temperatures != nullptr ? a.temperatures[row] : a.temperature;
  return {a.bias, a.logit_scale, a.softcap, a.softcap == 0.0f ? 0.0f : 1.0f / a.softcap, 1.0f / temperature};
}

struct Target {
  int column;
  float z, slope;
};

// The target of a row; NaN for an id outside the vocabulary: it must propagate, and nothing is read.
template <typename T>
GRPO_HOST_DEVICE Target row_target(const RowArguments& a, int64_t row, const T* logits, const RowTransform& t) {
  const int64_t id = a.targets[row];
  if (id < 0 || id >= a.vocab_size) return {-1, NAN, NAN};
  const int column = static_cast<int>(id);
  float z[1] = {widen(logits[column])}, slope[1];
  to_z<false>(z, slope, column, 1, t);
  return {column, z[0], slope[0]};
}

// Loss and coefficients of a row from its statistics; every thread computes them, `writes` says which one stores.
GRPO_HOST_DEVICE RowCoefficients row_loss(const RowArguments& a, int64_t row, const RowStatistics& s,
                                          const Target& target, bool writes) {
  const float weight = a.weight[row];
  const TokenInputs<float> token = {a.old_logp != nullptr ? a.old_logp[row] : 0.0f,
                                    a.ref_logp != nullptr ? a.ref_logp[row] : 0.0f, a.advantages[row],
                                    a.is_ratio != nullptr ? a.is_ratio[row] : 1.0f, weight};
  const TokenLoss<float> result = token_objective(s.logp, token, a.options);
  // every active token has the same share of the entropy bonus
  const float dentropy = a.entropy_weight != nullptr && weight != 0.0f ? -*a.entropy_weight : 0.0f;
  if (writes) {
    a.loss[row] = result.loss;
    a.dlogp[row] = result.dlogp;
  }
  return make_coefficients(s, result.dlogp, dentropy, target.slope, target.column);
}

GRPO_HOST_DEVICE void write_statistics(const RowArguments& a, int64_t row, const RowStatistics& s) {
  a.max[row] = s.max;
  a.log_sum[row] = s.log_sum;
  a.logp[row] = s.logp;
  if (a.entropy != nullptr) a.entropy[row] = s.entropy;
}

GRPO_HOST_DEVICE RowCoefficients known_coefficients(const RowArguments& a, int64_t row, const Target& target) {
  const RowStatistics s = {a.max[row], a.log_sum[row], a.logp[row], a.entropy != nullptr ? a.entropy[row] : 0.0f};
  const float dentropy = a.dentropy != nullptr ? a.dentropy[row] : 0.0f;
  return make_coefficients(s, a.dlogp[row], dentropy, target.slope, target.column);
}

}  // namespace grpo
