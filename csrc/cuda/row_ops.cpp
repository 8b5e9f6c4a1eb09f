// grpo_fused_C::row_statistics, row_gradient and row_loss: arguments are checked, then launched on the current stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>

#include "row_launch.h"

namespace {

using grpo::Dtype;
using grpo::RowArguments;
using grpo::RowMode;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kMaxColumns = int64_t(1) << 30;  // columns are 32 bits in the kernels, rows and offsets 64
constexpr int64_t kMaxGrid = (int64_t(1) << 31) - 1;

Dtype dtype_of(const char* name, const Tensor& x) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, name,
                  " must be float32, bfloat16 or float16");
  return type == ScalarType::Float ? Dtype::fp32 : type == ScalarType::BFloat16 ? Dtype::bf16 : Dtype::fp16;
}

int64_t row_stride_bytes(const Tensor& x) { return x.stride(0) * int64_t(x.element_size()); }

bool is_wide(const Tensor& x) {
  const auto address = reinterpret_cast<uintptr_t>(x.data_ptr());
  return address % 16 == 0 && (x.size(0) <= 1 || row_stride_bytes(x) % 16 == 0);
}

void check_matrix(const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, name, " must be [R, V]; got ", x.dim(), " dimensions");
  STD_TORCH_CHECK(x.size(1) >= 1 && x.size(1) <= kMaxColumns, name, " must have between 1 and 2^30 columns; got ",
                  x.size(1));
  STD_TORCH_CHECK(x.size(1) == 1 || x.stride(1) == 1, "rows of ", name, " must have unit stride; got ", x.stride(1));
}

// [count] contiguous, of `type`, on the device of `logits`.
void check_vector(const char* name, const Tensor& x, ScalarType type, int64_t count, const Tensor& logits) {
  STD_TORCH_CHECK(x.scalar_type() == type, name, " must be ", type == ScalarType::Long ? "int64" : "float32");
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == count, name, " must be [", count, "]; got ", x.dim(),
                  " dimensions and ", x.numel(), " elements");
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(x.is_cuda() == logits.is_cuda() && x.get_device_index() == logits.get_device_index(), name,
                  " must be on the device of logits");
}

// The pointer of a checked [count] fp32 tensor, or null.
float* vector(const char* name, const OptionalTensor& x, int64_t count, const Tensor& logits) {
  if (!x) return nullptr;
  check_vector(name, *x, ScalarType::Float, count, logits);
  return static_cast<float*>(x->data_ptr());
}

// Whether `out` shares the memory of `logits`; then each row must start where its row of logits starts.
bool shares_memory(const Tensor& logits, const Tensor& out) {
  const auto begin = [](const Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()); };
  const auto end = [&](const Tensor& x) {
    return begin(x) + (x.size(0) - 1) * row_stride_bytes(x) + x.size(1) * x.element_size();
  };
  if (begin(logits) >= end(out) || begin(out) >= end(logits)) return false;
  const bool same_rows = begin(logits) == begin(out) && out.element_size() <= logits.element_size() &&
                         (logits.size(0) == 1 || row_stride_bytes(logits) == row_stride_bytes(out));
  STD_TORCH_CHECK(same_rows, "out may share the memory of logits only row by row");
  return true;
}

RowArguments common_arguments(const Tensor& logits, const Tensor& targets, const OptionalTensor& bias,
                              const OptionalTensor& temperatures, double temperature, double logit_scale,
                              double softcap) {
  check_matrix("logits", logits);
  dtype_of("logits", logits);
  check_vector("targets", targets, ScalarType::Long, logits.size(0), logits);
  STD_TORCH_CHECK(temperatures || temperature > 0.0, "temperature must be positive; got ", temperature);
  STD_TORCH_CHECK(softcap >= 0.0, "softcap must be positive, or 0 for none; got ", softcap);
  RowArguments a = {};
  a.logits = logits.data_ptr();
  a.stride_logits = logits.stride(0);
  a.rows = logits.size(0);
  a.vocab_size = static_cast<int>(logits.size(1));
  a.wide_logits = is_wide(logits);
  a.targets = static_cast<const int64_t*>(targets.data_ptr());
  a.bias = vector("bias", bias, logits.size(1), logits);
  a.temperatures = vector("temperatures", temperatures, logits.size(0), logits);
  a.temperature = static_cast<float>(temperature);
  a.logit_scale = static_cast<float>(logit_scale);
  a.softcap = static_cast<float>(softcap);
  return a;
}

void add_out(RowArguments& a, const Tensor& logits, const Tensor& out) {
  check_matrix("out", out);
  STD_TORCH_CHECK(out.size(0) == logits.size(0) && out.size(1) == logits.size(1), "out must be [", logits.size(0),
                  ", ", logits.size(1), "] as logits; got [", out.size(0), ", ", out.size(1), "]");
  STD_TORCH_CHECK(out.size(0) <= 1 || out.stride(0) >= out.size(1), "rows of out must not overlap; got a stride of ",
                  out.stride(0));
  STD_TORCH_CHECK(out.is_cuda() == logits.is_cuda() && out.get_device_index() == logits.get_device_index(),
                  "out must be on the device of logits");
  a.out = out.data_ptr();
  a.stride_out = out.stride(0);
  a.wide_out = is_wide(out);
  a.stores_land_ahead =
      logits.size(0) > 0 && shares_memory(logits, out) && out.element_size() < logits.element_size();
}

void add_statistics(RowArguments& a, const Tensor& logits, const Tensor& max, const Tensor& log_sum,
                    const Tensor& logp, const OptionalTensor& entropy) {
  a.max = vector("max", max, a.rows, logits);
  a.log_sum = vector("log_sum", log_sum, a.rows, logits);
  a.logp = vector("logp", logp, a.rows, logits);
  a.entropy = vector("entropy", entropy, a.rows, logits);
}

void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

void launch(RowMode mode, const RowArguments& a, const Tensor& logits, Dtype out) {
  const Dtype type = dtype_of("logits", logits);
  STD_TORCH_CHECK(type == out || type == Dtype::fp32, "out must have the dtype of logits that are not float32");
  STD_TORCH_CHECK(mode != RowMode::loss || out != Dtype::fp16,
                  "out must be float32 or bfloat16: a loss in one launch cannot scale a float16 gradient");
  STD_TORCH_CHECK(logits.is_cuda(), "logits must be on a CUDA device");
  if (a.rows == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  STD_TORCH_CHECK(a.rows <= kMaxGrid, "too many rows: ", a.rows);
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(logits.get_device_index(), &stream) == 0,
                  "torch gave no current stream for device ", logits.get_device_index());
  check_cuda(grpo::launch_rows(mode, type, out, a, static_cast<cudaStream_t>(stream)), "launching a row kernel");
}

void row_statistics(Tensor logits, Tensor targets, OptionalTensor bias, OptionalTensor temperatures,
                    double temperature, double logit_scale, double softcap, Tensor max, Tensor log_sum, Tensor logp,
                    OptionalTensor entropy) {
  RowArguments a = common_arguments(logits, targets, bias, temperatures, temperature, logit_scale, softcap);
  add_statistics(a, logits, max, log_sum, logp, entropy);
  launch(RowMode::statistics, a, logits, dtype_of("logits", logits));
}

void row_gradient(Tensor logits, Tensor out, Tensor targets, OptionalTensor bias, OptionalTensor temperatures,
                  double temperature, double logit_scale, double softcap, Tensor max, Tensor log_sum, Tensor logp,
                  OptionalTensor entropy, Tensor dlogp, OptionalTensor dentropy) {
  RowArguments a = common_arguments(logits, targets, bias, temperatures, temperature, logit_scale, softcap);
  add_out(a, logits, out);
  add_statistics(a, logits, max, log_sum, logp, entropy);
  a.dlogp = vector("dlogp", dlogp, a.rows, logits);
  a.dentropy = vector("dentropy", dentropy, a.rows, logits);
  STD_TORCH_CHECK(!dentropy || entropy, "dentropy needs entropy");
  launch(RowMode::gradient, a, logits, dtype_of("out", out));
}

void row_loss(Tensor logits, Tensor out, Tensor targets, OptionalTensor bias, OptionalTensor temperatures,
              double temperature, double logit_scale, double softcap, Tensor advantages, Tensor weight,
              OptionalTensor old_logp, OptionalTensor ref_logp, OptionalTensor is_ratio, OptionalTensor entropy_weight,
              int64_t policy, int64_t kl_estimator, bool bias_correction, double epsilon, double epsilon_high,
              double delta, double dual_clip, double tau_pos, double tau_neg, double beta, Tensor max, Tensor log_sum,
              Tensor logp, OptionalTensor entropy, Tensor loss, Tensor dlogp) {
  STD_TORCH_CHECK(0 <= policy && policy < grpo::kPolicies, "policy must be at least 0 and below ", grpo::kPolicies,
                  "; got ", policy);
  STD_TORCH_CHECK(1 <= kl_estimator && kl_estimator <= 3, "kl_estimator must be 1, 2 or 3; got ", kl_estimator);
  RowArguments a = common_arguments(logits, targets, bias, temperatures, temperature, logit_scale, softcap);
  add_out(a, logits, out);
  add_statistics(a, logits, max, log_sum, logp, entropy);
  a.loss = vector("loss", loss, a.rows, logits);
  a.dlogp = vector("dlogp", dlogp, a.rows, logits);
  a.advantages = vector("advantages", advantages, a.rows, logits);
  a.weight = vector("weight", weight, a.rows, logits);
  a.old_logp = vector("old_logp", old_logp, a.rows, logits);
  a.ref_logp = vector("ref_logp", ref_logp, a.rows, logits);
  a.is_ratio = vector("is_ratio", is_ratio, a.rows, logits);
  a.entropy_weight = vector("entropy_weight", entropy_weight, 1, logits);
  STD_TORCH_CHECK(!entropy_weight || entropy, "entropy_weight needs entropy");
  a.options = {static_cast<grpo::Policy>(policy),
               static_cast<int>(kl_estimator),
               old_logp.has_value(),
               ref_logp.has_value() && beta != 0.0,
               bias_correction,
               static_cast<float>(epsilon),
               static_cast<float>(epsilon_high),
               static_cast<float>(delta),
               static_cast<float>(dual_clip),
               static_cast<float>(tau_pos),
               static_cast<float>(tau_neg),
               static_cast<float>(beta)};
  launch(RowMode::loss, a, logits, dtype_of("out", out));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(grpo_fused_C, m) {
  m.def(
      "row_statistics(Tensor logits, Tensor targets, Tensor? bias, Tensor? temperatures, float temperature, "
      "float logit_scale, float softcap, Tensor(a!) max, Tensor(b!) log_sum, Tensor(c!) logp, Tensor(d!)? entropy) "
      "-> ()");
  m.def(
      "row_gradient(Tensor logits, Tensor(a!) out, Tensor targets, Tensor? bias, Tensor? temperatures, "
      "float temperature, float logit_scale, float softcap, Tensor max, Tensor log_sum, Tensor logp, Tensor? entropy, "
      "Tensor dlogp, Tensor? dentropy) -> ()");
  m.def(
      "row_loss(Tensor logits, Tensor(a!) out, Tensor targets, Tensor? bias, Tensor? temperatures, float temperature, "
      "float logit_scale, float softcap, Tensor advantages, Tensor weight, Tensor? old_logp, Tensor? ref_logp, "
      "Tensor? is_ratio, Tensor? entropy_weight, int policy, int kl_estimator, bool bias_correction, float epsilon, "
      "float epsilon_high, float delta, float dual_clip, float tau_pos, float tau_neg, float beta, Tensor(b!) max, "
      "Tensor(c!) log_sum, Tensor(d!) logp, Tensor(e!)? entropy, Tensor(f!) loss, Tensor(g!) dlogp) -> ()");
}

// Registered for every device, so that a tensor on a wrong one gets a clear error.
STABLE_TORCH_LIBRARY_IMPL(grpo_fused_C, CompositeExplicitAutograd, m) {
  m.impl("row_statistics", TORCH_BOX(&row_statistics));
  m.impl("row_gradient", TORCH_BOX(&row_gradient));
  m.impl("row_loss", TORCH_BOX(&row_loss));
}
