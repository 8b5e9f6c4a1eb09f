// The row kernels that ship, and their launch.
#include "row_kernel.cuh"
#include "row_launch.h"

namespace grpo_fused {
namespace {

using Kernel = void (*)(RowArguments);

struct Kernels {
  Kernel cluster, stream;
};

template <RowMode MODE, typename T, typename Out>
Kernels kernels() {
  return {row_cluster_kernel<MODE, T, Out>, row_stream_kernel<MODE, T, Out>};
}

// Gradients have the dtype of the logits, or are narrower than fp32 logits; null for what no engine uses.
Kernels find_kernels(RowMode mode, RowType logits, RowType out) {
  if (mode == RowMode::STATISTICS) {
    if (logits == RowType::FLOAT32) return kernels<RowMode::STATISTICS, float, float>();
    if (logits == RowType::BFLOAT16) return kernels<RowMode::STATISTICS, Bf16, Bf16>();
    return kernels<RowMode::STATISTICS, Fp16, Fp16>();
  }
  if (mode == RowMode::LOSS) {
    if (logits == RowType::FLOAT32 && out == RowType::FLOAT32) return kernels<RowMode::LOSS, float, float>();
    if (logits == RowType::FLOAT32 && out == RowType::BFLOAT16) return kernels<RowMode::LOSS, float, Bf16>();
    return {nullptr, nullptr};
  }
  if (logits == RowType::FLOAT32) {
    if (out == RowType::FLOAT32) return kernels<RowMode::GRADIENT, float, float>();
    if (out == RowType::BFLOAT16) return kernels<RowMode::GRADIENT, float, Bf16>();
    return kernels<RowMode::GRADIENT, float, Fp16>();
  }
  if (logits != out) return {nullptr, nullptr};
  return logits == RowType::BFLOAT16 ? kernels<RowMode::GRADIENT, Bf16, Bf16>()
                                     : kernels<RowMode::GRADIENT, Fp16, Fp16>();
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

cudaError_t launch_rows(RowMode mode, RowType logits, RowType out, const RowArguments& arguments, const RowPlan& plan,
                        cudaStream_t stream) {
  const Kernels found = find_kernels(mode, logits, out);
  if (found.stream == nullptr) return cudaErrorInvalidValue;
  if (arguments.rows == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(plan.threads);
  config.stream = stream;
  cudaLaunchAttribute cluster;
  if (plan.blocks == 0) {
    config.gridDim = dim3(static_cast<unsigned>(arguments.rows));
    return cudaLaunchKernelEx(&config, found.stream, arguments);
  }
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(plan.blocks), 1, 1};
  config.gridDim = dim3(static_cast<unsigned>(arguments.rows * plan.blocks));
  config.dynamicSmemBytes = held_bytes(arguments.vocab_size, logits == RowType::FLOAT32 ? 4 : 2, plan.blocks);
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (cudaError_t error = cudaFuncSetAttribute(found.cluster, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(config.dynamicSmemBytes))) {
    return error;
  }
  return cudaLaunchKernelEx(&config, found.cluster, arguments);
}

}  // namespace grpo_fused
