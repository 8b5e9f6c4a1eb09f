// The CUDA functions of the row kernels, on a CPU: every thread of a block is a real thread, barriers are real, shuffles
// exchange through memory, and shared memory is NaN before it is written: a kernel that reads too early, or stores
// before all is read, gets wrong numbers or hangs.
#pragma once

#define GRPO_EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace emulated {

struct Index {
  unsigned x;
};

struct Warp {
  std::barrier<> meeting{32};
  float lanes[32];
};

struct Block {
  std::barrier<> meeting;
  std::vector<Warp> warps;
  std::vector<std::max_align_t> shared;

  Block(int threads, size_t bytes)
      : meeting(threads), warps(threads / 32), shared(bytes / sizeof(std::max_align_t) + 1) {
    std::memset(static_cast<void*>(shared.data()), 0xff, shared.size() * sizeof(std::max_align_t));
  }
};

thread_local Block* block;

}  // namespace emulated

thread_local emulated::Index threadIdx, blockIdx, blockDim;

inline void __syncthreads() { emulated::block->meeting.arrive_and_wait(); }

inline float exchange(float value, unsigned from) {
  emulated::Warp& warp = emulated::block->warps[threadIdx.x / 32];
  const unsigned lane = threadIdx.x % 32;
  warp.lanes[lane] = value;
  warp.meeting.arrive_and_wait();
  const float other = from < 32 ? warp.lanes[from] : value;
  warp.meeting.arrive_and_wait();
  return other;
}
inline float __shfl_down_sync(unsigned, float value, int offset) { return exchange(value, threadIdx.x % 32 + offset); }

namespace emulated {

// Runs `body` on every thread of block `index`, which has so many bytes of shared memory.
template <typename Body>
void launch(unsigned index, int threads, size_t bytes, Body body) {
  Block of_all(threads, bytes);
  std::vector<std::thread> running;
  for (int i = threads - 1; i >= 0; --i) {  // the last first: in place, its stores overwrite logits of those before it
    running.emplace_back([&, i] {
      block = &of_all;
      threadIdx = {unsigned(i)};
      blockIdx = {index};
      blockDim = {unsigned(threads)};
      body();
    });
  }
  for (auto& thread : running) thread.join();
}

}  // namespace emulated
