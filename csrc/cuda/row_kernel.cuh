// Row kernels: log-softmax statistics, objective and gradient of a chunk of logits [R, V].
//
// On sm_90 and later a cluster of thread blocks holds a row in its shared memory, so that the row is read once and
// written once (6 bytes a logit, not 10), and may be overwritten: nothing is stored before the whole row is loaded.
// Elsewhere, and for rows that fit no cluster, one block streams a row and reads it twice.
#pragma once

#include <cstdint>

#include "async.cuh"
#include "row_plan.h"
#include "row_steps.h"

namespace grpo {

constexpr int kMinBlocks = 2;   // of kMaxThreads on a multiprocessor: at most 64 registers a thread
constexpr int kMaxChunks = 15;  // of a part: 15 x 16 KiB is more than a block's shared memory

struct RowScratch {
  uint64_t arrived[kMaxChunks];
  Partial warps[kMaxThreads / kWarp];
  Partial blocks[kMaxBlocks];
};
static_assert(sizeof(RowScratch) <= kScratchBytes);

struct BlockMemory {
  RowScratch* scratch;
  unsigned char* row;  // of the size that the launch requested
};

#ifdef GRPO_EMULATED  // by tests/native/emulated.h, with real threads on a CPU
BlockMemory block_memory();
#else
__device__ __forceinline__ BlockMemory block_memory() {
  extern __shared__ __align__(128) unsigned char row[];
  __shared__ RowScratch scratch;
  return {&scratch, row};
}
#endif

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
  __device__ __forceinline__ void operator()(int) const {}
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

#if __CUDA_ARCH__ >= 900 || defined(GRPO_EMULATED)

// Starts to load part of a row into shared memory: bulk copies of its whole 16 bytes, single loads of the rest (all of
// it where the row starts at an odd address). Chunk k is loaded when `arrived[k]` completes and the block has synced.
template <typename T>
__device__ __forceinline__ void start_loading(const T* from, int count, bool wide, T* held, uint64_t* arrived) {
  const int bulk = bulk_elements<T>(count, wide);
  if (threadIdx.x == 0 && wide) {
#pragma unroll 1
    for (int chunk = 0; chunk * kChunk<T> < count; ++chunk) init_mbarrier(arrived + chunk);
    fence_mbarrier_init();
#pragma unroll 1
    for (int chunk = 0, begin = 0; begin < count; ++chunk, begin += kChunk<T>) {
      bulk_load(held + begin, from + begin, chunk_elements<T>(bulk, begin) * sizeof(T), arrived + chunk);
    }
  }
  for (int i = bulk + threadIdx.x; i < count; i += blockDim.x) held[i] = from[i];
}

template <RowMode Mode, typename T, typename Out>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) row_cluster_kernel(const __grid_constant__ RowArguments a) {
  const BlockMemory memory = block_memory();
  RowScratch& scratch = *memory.scratch;
  T* held = reinterpret_cast<T*>(memory.row);
  const int rank = cluster_rank(), blocks = cluster_size();
  const int64_t row = blockIdx.x / blocks;
  const int length = part_length(a.vocab_size, blocks);
  const int first = length * rank, count = part_count(a.vocab_size, length, rank);
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride_logits;
  Out* out = static_cast<Out*>(a.out) + row * a.stride_out + first;
  const RowTransform t = row_transform(a, row);
  const Target target = row_target(a, row, logits, t);
  const Part<T> part = {held, first, count, true};

  RowCoefficients c;
  if constexpr (Mode == RowMode::gradient) {
    c = known_coefficients(a, row, target);
    if (c.zero) return thread_zeros(count, this_thread(), out, a.wide_out);
  }
  start_loading(logits + first, count, a.wide_logits, held, scratch.arrived);
  __syncthreads();
  const auto arrived = [&](int chunk) {
    if (a.wide_logits) wait_mbarrier(scratch.arrived + chunk);
  };

  if constexpr (Mode == RowMode::gradient) {
    if (a.stores_land_ahead) {  // perhaps on columns of other blocks: all must have loaded theirs
      for (int chunk = 0; chunk * kChunk<T> < count; ++chunk) arrived(chunk);
      cluster_arrive();
      cluster_wait();
    }
    thread_gradient(part, this_thread(), t, c, out, a.wide_out, arrived, Nothing());
  } else {
    cluster_arrive_relaxed();  // the block has started: its shared memory may be written
    const bool with_entropy = a.entropy != nullptr;
    const Partial mine =
        merge_block(thread_statistics(part, this_thread(), t, with_entropy, arrived), scratch.warps);
    __syncwarp();
    cluster_wait();
    if (static_cast<int>(threadIdx.x) < blocks) {
      store_remote(scratch.blocks + rank, threadIdx.x, mine.max, mine.rest, mine.moment, 0.0f);
    }
    __syncwarp();
    // after this, every block has read its part and its target, and has the statistics of all others
    cluster_arrive();
    cluster_wait();
    const RowStatistics s = finish(merge_in_order(scratch.blocks, blocks), target.z);
    const bool writes = rank == 0 && threadIdx.x == 0;
    if (writes) write_statistics(a, row, s);
    if constexpr (Mode == RowMode::loss) {
      c = row_loss(a, row, s, target, writes);
      if (c.zero) return thread_zeros(count, this_thread(), out, a.wide_out);
      thread_gradient(part, this_thread(), t, c, out, a.wide_out, Nothing(), Nothing());
    }
  }
}

#else

// Never launched: the plan has clusters only if the device supports them.
template <RowMode Mode, typename T, typename Out>
__global__ void row_cluster_kernel(const __grid_constant__ RowArguments a) {}

#endif

template <RowMode Mode, typename T, typename Out>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) row_stream_kernel(const __grid_constant__ RowArguments a) {
  RowScratch& scratch = *block_memory().scratch;
  const int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride_logits;
  Out* out = static_cast<Out*>(a.out) + row * a.stride_out;
  const RowTransform t = row_transform(a, row);
  const Target target = row_target(a, row, logits, t);
  const Part<T> part = {logits, 0, a.vocab_size, a.wide_logits};

  RowCoefficients c;
  if constexpr (Mode == RowMode::gradient) {
    c = known_coefficients(a, row, target);
  } else {
    const bool with_entropy = a.entropy != nullptr;
    const Partial all = merge_block(thread_statistics(part, this_thread(), t, with_entropy, Nothing()), scratch.warps);
    const RowStatistics s = finish(all, target.z);
    if (threadIdx.x == 0) write_statistics(a, row, s);
    if constexpr (Mode == RowMode::loss) c = row_loss(a, row, s, target, threadIdx.x == 0);
  }
  if constexpr (Mode != RowMode::statistics) {
    if (c.zero) return thread_zeros(a.vocab_size, this_thread(), out, a.wide_out);
    if (a.stores_land_ahead) {
      // strides are processed in order, and none is stored before all threads have loaded it: what a store overwrites
      // has been read
      thread_gradient(part, this_thread(), t, c, out, a.wide_out, Nothing(), [] { __syncthreads(); });
    } else {
      thread_gradient(part, this_thread(), t, c, out, a.wide_out, Nothing(), Nothing());
    }
  }
}

}  // namespace grpo
