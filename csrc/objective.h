// The token-level GRPO objective: per-token loss and coefficient g = dL/dlogp, for host and device.
//
// The same formulas as grpo_fused/objective/formulas.py and kernels/objective.py; the tests compare all three.
// All that a user may vary is a run-time number; so is an option that is off (delta = inf).
#pragma once

#include <cmath>

#include "numbers.h"

#ifdef __CUDACC__
#define GRPO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GRPO_HOST_DEVICE inline
#endif

namespace grpo {

constexpr float kMaxLogRatio = 20.0f;  // log-ratios are clamped at +-20 before they are exponentiated

// min and max of the standard library drop a NaN on one side; a NaN must propagate.
template <typename T>
GRPO_HOST_DEVICE T min_or_nan(T a, T b) {
  return (a < b || a != a) ? a : b;
}

template <typename T>
GRPO_HOST_DEVICE T max_or_nan(T a, T b) {
  return (a > b || a != a) ? a : b;
}

#ifdef __CUDA_ARCH__
template <>
GRPO_HOST_DEVICE float max_or_nan(float a, float b) {  // one instruction, for the loops over elements
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
#endif

// exp(x) - 1 - x without cancellation: a series of 8 terms where |x| < 1/4 (the next is below 1e-11 of the sum).
template <typename T>
GRPO_HOST_DEVICE T exp_minus_1_minus(T x) {
  T series = T(1) + x * T(1.0 / 9.0);
  series = T(1) + x * T(1.0 / 8.0) * series;
  series = T(1) + x * T(1.0 / 7.0) * series;
  series = T(1) + x * T(1.0 / 6.0) * series;
  series = T(1) + x * T(1.0 / 5.0) * series;
  series = T(1) + x * T(1.0 / 4.0) * series;
  series = T(1) + x * T(1.0 / 3.0) * series;
  return std::abs(x) < T(0.25) ? T(0.5) * x * x * series : std::exp(x) - T(1) - x;
}

// exp(x) - 1, exact near 0; -1 at -inf.
template <typename T>
GRPO_HOST_DEVICE T expm1_of(T x) {
  return std::abs(x) < T(0.25) ? exp_minus_1_minus(x) + x : std::exp(x) - T(1);
}

// As POLICIES in kernels/objective.py.
enum class Policy : int { ppo, cispo, sapo };
constexpr int kPolicies = 3;

template <typename T>
struct ObjectiveOptions {
  Policy policy;
  int kl_estimator;      // 1, 2 or 3
  bool has_old;          // else on-policy: ratio 1, gradient kept
  bool has_kl;           // reference log-probs given and beta != 0
  bool bias_correction;  // the KL estimate is multiplied by the ratio
  T epsilon, epsilon_high;
  T delta, dual_clip;  // inf where off
  T tau_pos, tau_neg;
  T beta;
};

template <typename T>
struct TokenInputs {
  T old_logp, ref_logp;  // unread where there is none
  T advantage;
  T is_ratio;  // 1 where there is none
  T weight;    // what the token's loss is multiplied by; 0 where masked
};

template <typename T>
struct TokenLoss {
  T loss;
  T dlogp;
};

// PPO's clipped loss and its derivative in the ratio c.
template <typename T>
GRPO_HOST_DEVICE TokenLoss<T> clipped_policy(T c, T advantage, const ObjectiveOptions<T>& options) {
  const T low = T(1) - options.epsilon, high = T(1) + options.epsilon_high;
  const T clipped = min_or_nan(max_or_nan(c, low), high);
  T loss = -min_or_nan(min_or_nan(c, options.delta) * advantage, clipped * advantage);
  if (advantage < T(0)) loss = min_or_nan(loss, -options.dual_clip * advantage);
  const T cap_good = min_or_nan(options.delta, high);
  const T cap_bad = min_or_nan(max_or_nan(options.delta, high), options.dual_clip);
  const bool live = advantage > T(0) ? c <= cap_good : (c >= low && c <= cap_bad);
  return {loss, live ? -advantage : T(0)};
}

template <typename T>
struct KlEstimate {
  T value;
  T slope;  // derivative in logp
  T both;   // value + slope without what cancels in it
};

// KL estimate of q = ref - logp; k3 continues as its tangent beyond 20.
template <typename T>
GRPO_HOST_DEVICE KlEstimate<T> kl_estimate(T q, int estimator) {
  if (estimator == 1) return {-q, T(1), T(1) - q};
  if (estimator == 2) return {T(0.5) * q * q, -q, T(0.5) * q * q - q};
  const T bounded = min_or_nan(q, T(kMaxLogRatio));
  const T slope = expm1_of(bounded);
  const T tangent = slope * (q - bounded);
  return {tangent + exp_minus_1_minus(bounded), -slope, tangent - bounded};
}

// Weighted loss of a token and its coefficient.
template <typename T>
GRPO_HOST_DEVICE TokenLoss<T> token_objective(T logp, const TokenInputs<T>& token, const ObjectiveOptions<T>& options) {
  const T lowest = T(kLowestLogp), limit = T(kMaxLogRatio);
  const bool possible = !(logp < lowest);  // NaN counts as possible, since it must propagate
  logp = max_or_nan(logp, lowest);
  const T log_ratio = logp - (options.has_old ? max_or_nan(token.old_logp, lowest) : logp);
  const bool beyond = std::abs(log_ratio) > limit;
  const T c = std::exp(min_or_nan(max_or_nan(log_ratio, -limit), limit));
  const T chain = beyond ? T(0) : c;

  TokenLoss<T> result;
  if (options.policy == Policy::cispo) {  // the clipped ratio is a constant weight on the log-prob
    const T scale = min_or_nan(c, options.epsilon_high) * token.advantage;
    result = {-scale * logp, -scale};
  } else if (options.policy == Policy::sapo) {  // a sigmoid gate
    const T tau = token.advantage > T(0) ? options.tau_pos : options.tau_neg;
    const T gate = T(1) / (T(1) + std::exp(-tau * (c - T(1))));
    result = {T(-4) / tau * gate * token.advantage, chain * (T(-4) * gate * (T(1) - gate) * token.advantage)};
  } else {
    result = clipped_policy(c, token.advantage, options);
    result.dlogp *= chain;
  }
  result.loss *= token.is_ratio;
  result.dlogp *= token.is_ratio;
  if (options.has_kl) {
    const KlEstimate<T> kl = kl_estimate(max_or_nan(token.ref_logp, lowest) - logp, options.kl_estimator);
    if (options.bias_correction) {
      result.loss += options.beta * (c * kl.value);
      result.dlogp += options.beta * (chain == T(0) ? c * kl.slope : chain * kl.both);
    } else {
      result.loss += options.beta * kl.value;
      result.dlogp += options.beta * kl.slope;
    }
  }
  if (token.weight == T(0)) return {T(0), T(0)};  // for any values of a masked token
  return {token.weight * result.loss, possible ? token.weight * result.dlogp : T(0)};
}

}  // namespace grpo
