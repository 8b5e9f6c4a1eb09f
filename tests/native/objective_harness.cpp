// csrc/objective.h over arrays of tokens, in float and double, for tests/native/test_objective_header.py.
#include <cstdint>

#include "objective.h"

namespace {

template <class T>
void run(int64_t count, const T* const* inputs, const double* options, int64_t policy, int64_t kl_estimator,
         bool bias_correction, T* loss, T* dlogp) {
  const T *logp = inputs[0], *old = inputs[1], *ref = inputs[2], *advantages = inputs[3], *weight = inputs[4],
          *ratio = inputs[5];
  const double beta = options[6];
  const grpo::ObjectiveOptions<T> chosen{
      static_cast<grpo::Policy>(policy), static_cast<int>(kl_estimator), old != nullptr,
      ref != nullptr && beta != 0.0, bias_correction, T(options[0]), T(options[1]), T(options[2]), T(options[3]),
      T(options[4]), T(options[5]), T(beta)};
  for (int64_t i = 0; i < count; i++) {
    const grpo::TokenInputs<T> token{old ? old[i] : T(0), ref ? ref[i] : T(0), advantages[i],
                                           ratio ? ratio[i] : T(1), weight[i]};
    const auto found = grpo::token_objective(logp[i], token, chosen);
    loss[i] = found.loss;
    dlogp[i] = found.dlogp;
  }
}

}  // namespace

extern "C" void objective_float(int64_t count, const float* const* inputs, const double* options, int64_t policy,
                                int64_t kl_estimator, bool bias_correction, float* loss, float* dlogp) {
  run(count, inputs, options, policy, kl_estimator, bias_correction, loss, dlogp);
}

extern "C" void objective_double(int64_t count, const double* const* inputs, const double* options, int64_t policy,
                                 int64_t kl_estimator, bool bias_correction, double* loss, double* dlogp) {
  run(count, inputs, options, policy, kl_estimator, bias_correction, loss, dlogp);
}
