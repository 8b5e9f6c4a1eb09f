// Row kernels: log-softmax statistics, objective and gradient of a chunk of logits [R, V]. A block takes a row, and reads
// it twice if it makes statistics and a gradient.
#pragma once

#include <cstdint>

#include "row_steps.h"

namespace grpo {

constexpr int kWarp = 32;
constexpr int kThreads = 512;  // of a block
constexpr int kMinBlocks = 2;  // on a multiprocessor: at most 64 registers a thread

// Shared by a block: the statistics of each warp.
#ifdef GRPO_EMULATED  // by tests/native/emulated.h, with real threads on a CPU
Partial* of_warps();
#else
__device__ __forceinline__ Partial* of_warps() {
  __shared__ Partial partials[kThreads / kWarp];
  return partials;
}
#endif

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

__device__ __forceinline__ Thread this_thread() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
}

// The statistics of a block from those of its threads, known to all of them: a tree over lanes, then warps in order.
__device__ __forceinline__ Partial merge_block(Partial p, Partial* warps) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Partial pair[] = {p,
                            {__shfl_down_sync(~0u, p.max, offset), __shfl_down_sync(~0u, p.rest, offset),
                             __shfl_down_sync(~0u, p.moment, offset)}};
    p = merge_in_order(pair, 2);
  }
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = p;
  __syncthreads();
  return merge_in_order(warps, blockDim.x / kWarp);
}

template <RowMode Mode, typename T, typename Out>
__global__ void __launch_bounds__(kThreads, kMinBlocks) row_kernel(const __grid_constant__ RowArguments a) {
  const int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride_logits;
  Out* out = static_cast<Out*>(a.out) + row * a.stride_out;
  const RowTransform t = row_transform(a, row);
  const Target target = row_target(a, row, logits, t);
  const Row<T> values = {logits, a.vocab_size, a.wide_logits};

  RowCoefficients c;
  if constexpr (Mode == RowMode::gradient) {
    c = known_coefficients(a, row, target);
  } else {
    const Partial mine = thread_statistics(values, this_thread(), t, a.entropy != nullptr);
    const Partial all = merge_block(mine, of_warps());
    const RowStatistics s = finish(all, target.z);
    if (threadIdx.x == 0) write_statistics(a, row, s);
    if constexpr (Mode == RowMode::loss) c = row_loss(a, row, s, target, threadIdx.x == 0);
  }
  if constexpr (Mode != RowMode::statistics) {
    if (c.zero) return thread_zeros(a.vocab_size, this_thread(), out, a.wide_out);
    if (a.stores_land_ahead) {
      // strides are processed in order, and none is stored before all threads have loaded it: what a store overwrites
      // has been read
      thread_gradient(values, this_thread(), t, c, out, a.wide_out, [] { __syncthreads(); });
    } else {
      thread_gradient(values, this_thread(), t, c, out, a.wide_out, Nothing());
    }
  }
}

}  // namespace grpo
