// grpo_fused_C::token_objective on the CPU: csrc/objective.h over tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "objective.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_row_tensor(const char* name, const Tensor& x, const Tensor& logp) {
  STD_TORCH_CHECK(x.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(x.scalar_type() == logp.scalar_type(), name, " must have the dtype of logp");
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == logp.size(0), name, " must be [R] with R = ", logp.size(0), "; got ",
                  x.dim(), " dimensions and ", x.numel(), " elements");
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
}

template <typename T>
const T* pointer(const Tensor& x) {
  return static_cast<const T*>(x.data_ptr());
}

template <typename T>
const T* pointer(const std::optional<Tensor>& x) {
  return x ? pointer<T>(*x) : nullptr;
}

std::tuple<Tensor, Tensor> token_objective(Tensor logp, std::optional<Tensor> old_logp, std::optional<Tensor> ref_logp,
                                           Tensor advantages, Tensor weight, std::optional<Tensor> is_ratio,
                                           int64_t policy, int64_t kl_estimator, bool bias_correction, double epsilon,
                                           double epsilon_high, double delta, double dual_clip, double tau_pos,
                                           double tau_neg, double beta) {
  STD_TORCH_CHECK(logp.is_cpu(), "logp must be on the CPU");
  STD_TORCH_CHECK(logp.scalar_type() == ScalarType::Float || logp.scalar_type() == ScalarType::Double,
                  "logp must be float32 or float64");
  STD_TORCH_CHECK(logp.dim() == 1 && logp.is_contiguous(), "logp must be contiguous [R]; got ", logp.dim(),
                  " dimensions");
  constexpr auto policies = static_cast<int64_t>(grpo_fused::Policy::COUNT);
  STD_TORCH_CHECK(0 <= policy && policy < policies, "policy must be at least 0 and below ", policies, "; got ", policy);
  STD_TORCH_CHECK(1 <= kl_estimator && kl_estimator <= 3, "kl_estimator must be 1, 2 or 3; got ", kl_estimator);
  check_row_tensor("advantages", advantages, logp);
  check_row_tensor("weight", weight, logp);
  if (old_logp) check_row_tensor("old_logp", *old_logp, logp);
  if (ref_logp) check_row_tensor("ref_logp", *ref_logp, logp);
  if (is_ratio) check_row_tensor("is_ratio", *is_ratio, logp);

  Tensor loss = torch::stable::empty_like(logp), dlogp = torch::stable::empty_like(logp);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const grpo_fused::ObjectiveOptions<T> options{
        static_cast<grpo_fused::Policy>(policy), static_cast<int>(kl_estimator), old_logp.has_value(),
        ref_logp.has_value() && beta != 0.0, bias_correction, T(epsilon), T(epsilon_high), T(delta), T(dual_clip),
        T(tau_pos), T(tau_neg), T(beta)};
    const T *logps = pointer<T>(logp), *old_logps = pointer<T>(old_logp), *ref_logps = pointer<T>(ref_logp);
    const T *advantage = pointer<T>(advantages), *weights = pointer<T>(weight), *ratios = pointer<T>(is_ratio);
    T *loss_out = static_cast<T*>(loss.data_ptr()), *dlogp_out = static_cast<T*>(dlogp.data_ptr());
    for (int64_t i = 0, count = logp.size(0); i < count; ++i) {
      const grpo_fused::TokenInputs<T> token{old_logps ? old_logps[i] : T(0), ref_logps ? ref_logps[i] : T(0),
                                             advantage[i], ratios ? ratios[i] : T(1), weights[i]};
      const auto result = grpo_fused::token_objective(logps[i], token, options);
      loss_out[i] = result.loss;
      dlogp_out[i] = result.dlogp;
    }
  };
  if (logp.scalar_type() == ScalarType::Float) {
    run(0.0f);
  } else {
    run(0.0);
  }
  return {loss, dlogp};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(grpo_fused_C, m) {
  m.def(
      "token_objective(Tensor logp, Tensor? old_logp, Tensor? ref_logp, Tensor advantages, Tensor weight, "
      "Tensor? is_ratio, int policy, int kl_estimator, bool bias_correction, float epsilon, float epsilon_high, "
      "float delta, float dual_clip, float tau_pos, float tau_neg, float beta) -> (Tensor loss, Tensor dlogp)");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fused_C, CPU, m) { m.impl("token_objective", TORCH_BOX(&token_objective)); }
