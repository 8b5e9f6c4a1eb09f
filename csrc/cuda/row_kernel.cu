// The row kernels that ship, and their launch.
#include "row_kernel.cuh"
#include "row_launch.h"

namespace grpo {
namespace {

using Kernel = void (*)(RowArguments);

struct KernelPair {
  Kernel cluster, stream;
};

template <RowMode Mode, typename T, typename Out>
KernelPair kernels() {
  return {row_cluster_kernel<Mode, T, Out>, row_stream_kernel<Mode, T, Out>};
}

// Gradients have the dtype of the logits, or are narrower than fp32 logits; null for what no engine uses.
KernelPair find_kernels(RowMode mode, Dtype logits, Dtype out) {
  if (mode == RowMode::statistics) {
    if (logits == Dtype::fp32) return kernels<RowMode::statistics, float, float>();
    if (logits == Dtype::bf16) return kernels<RowMode::statistics, Bf16, Bf16>();
    return kernels<RowMode::statistics, Fp16, Fp16>();
  }
  if (mode == RowMode::loss) {
    if (logits == Dtype::fp32 && out == Dtype::fp32) return kernels<RowMode::loss, float, float>();
    if (logits == Dtype::fp32 && out == Dtype::bf16) return kernels<RowMode::loss, float, Bf16>();
    return {nullptr, nullptr};
  }
  if (logits == Dtype::fp32) {
    if (out == Dtype::fp32) return kernels<RowMode::gradient, float, float>();
    if (out == Dtype::bf16) return kernels<RowMode::gradient, float, Bf16>();
    return kernels<RowMode::gradient, float, Fp16>();
  }
  if (logits != out) return {nullptr, nullptr};
  return logits == Dtype::bf16 ? kernels<RowMode::gradient, Bf16, Bf16>() : kernels<RowMode::gradient, Fp16, Fp16>();
}

}  // namespace

cudaError_t plan_rows(int vocab_size, int itemsize, int blocks, int threads, RowPlan* plan) {
  int device = 0, major = 0;
  DeviceLimits limits = {};
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return error;
  if (cudaError_t error =
          cudaDeviceGetAttribute(&limits.block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
    return error;
  }
  if (cudaError_t error =
          cudaDeviceGetAttribute(&limits.processor_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)) {
    return error;
  }
  limits.clusters = major >= 9;
  return plan_row(vocab_size, itemsize, limits, blocks, threads, plan) ? cudaSuccess : cudaErrorInvalidConfiguration;
}

cudaError_t launch_rows(RowMode mode, Dtype logits, Dtype out, const RowArguments& arguments, const RowPlan& plan,
                        cudaStream_t stream) {
  const KernelPair kernel = find_kernels(mode, logits, out);
  if (kernel.stream == nullptr) return cudaErrorInvalidValue;
  if (arguments.rows == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(plan.threads);
  config.stream = stream;
  cudaLaunchAttribute cluster;
  if (plan.blocks == 0) {
    config.gridDim = dim3(static_cast<unsigned>(arguments.rows));
    return cudaLaunchKernelEx(&config, kernel.stream, arguments);
  }
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(plan.blocks), 1, 1};
  config.gridDim = dim3(static_cast<unsigned>(arguments.rows * plan.blocks));
  config.dynamicSmemBytes = held_bytes(arguments.vocab_size, item_bytes(logits), plan.blocks);
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (cudaError_t error = cudaFuncSetAttribute(kernel.cluster, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(config.dynamicSmemBytes))) {
    return error;
  }
  return cudaLaunchKernelEx(&config, kernel.cluster, arguments);
}

}  // namespace grpo
