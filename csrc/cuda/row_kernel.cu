// The row kernels that ship, and their launch.
#include "row_kernel.cuh"
#include "row_launch.h"

namespace grpo {
namespace {

using Kernel = void (*)(RowArguments);

// Gradients have the dtype of the logits, or are narrower than fp32 logits; null for what no engine uses.
Kernel find_kernel(RowMode mode, Dtype logits, Dtype out) {
  if (mode == RowMode::statistics) {
    if (logits == Dtype::fp32) return row_kernel<RowMode::statistics, float, float>;
    if (logits == Dtype::bf16) return row_kernel<RowMode::statistics, Bf16, Bf16>;
    return row_kernel<RowMode::statistics, Fp16, Fp16>;
  }
  if (mode == RowMode::loss) {
    if (logits == Dtype::fp32 && out == Dtype::fp32) return row_kernel<RowMode::loss, float, float>;
    if (logits == Dtype::fp32 && out == Dtype::bf16) return row_kernel<RowMode::loss, float, Bf16>;
    return nullptr;
  }
  if (logits == Dtype::fp32) {
    if (out == Dtype::fp32) return row_kernel<RowMode::gradient, float, float>;
    if (out == Dtype::bf16) return row_kernel<RowMode::gradient, float, Bf16>;
    return row_kernel<RowMode::gradient, float, Fp16>;
  }
  if (logits != out) return nullptr;
  return logits == Dtype::bf16 ? row_kernel<RowMode::gradient, Bf16, Bf16> : row_kernel<RowMode::gradient, Fp16, Fp16>;
}

}  // namespace

cudaError_t launch_rows(RowMode mode, Dtype logits, Dtype out, const RowArguments& arguments, cudaStream_t stream) {
  const Kernel kernel = find_kernel(mode, logits, out);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  if (arguments.rows == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(arguments.rows), kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace grpo
