// The CUDA functions of the row kernels, on a CPU: every thread of a cluster is a real thread, barriers are real,
// shuffles exchange through memory. A bulk copy happens as late as possible, when a thread waits for it, and shared
// memory is NaN before: a kernel that reads too early, or stores before all is read, gets wrong numbers or hangs.
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
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
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
  std::vector<std::max_align_t> scratch, row;
  std::mutex lock;
  std::map<const uint64_t*, std::optional<std::vector<const void*>>> copies;

  Block(int threads, size_t scratch_bytes, size_t row_bytes)
      : meeting(threads), warps(threads / 32), scratch(scratch_bytes / sizeof(std::max_align_t) + 1),
        row(row_bytes / sizeof(std::max_align_t) + 1) {
    std::memset(static_cast<void*>(scratch.data()), 0xff, scratch.size() * sizeof(std::max_align_t));
    std::memset(static_cast<void*>(row.data()), 0xff, row.size() * sizeof(std::max_align_t));
  }
};

struct Cluster {
  std::barrier<> meeting;
  std::vector<std::unique_ptr<Block>> blocks;

  Cluster(int count, int threads, size_t scratch_bytes, size_t row_bytes) : meeting(count * threads) {
    for (int i = 0; i < count; ++i) blocks.push_back(std::make_unique<Block>(threads, scratch_bytes, row_bytes));
  }
};

thread_local Cluster* cluster;
thread_local int rank;
thread_local std::optional<std::barrier<>::arrival_token> token;

inline Block& block() { return *cluster->blocks[rank]; }

// Runs `body` on every thread of the cluster whose first block is `first`.
template <typename Body>
void launch(int blocks, int threads, unsigned first, size_t scratch_bytes, size_t row_bytes, Body body);

}  // namespace emulated

thread_local emulated::Index threadIdx, blockIdx, blockDim;

inline void __syncthreads() { emulated::block().meeting.arrive_and_wait(); }
inline void __syncwarp() {}

inline float exchange(float value, unsigned from) {
  emulated::Warp& warp = emulated::block().warps[threadIdx.x / 32];
  const unsigned lane = threadIdx.x % 32;
  warp.lanes[lane] = value;
  warp.meeting.arrive_and_wait();
  const float other = from < 32 ? warp.lanes[from] : value;
  warp.meeting.arrive_and_wait();
  return other;
}
inline float __shfl_down_sync(unsigned, float value, int offset) { return exchange(value, threadIdx.x % 32 + offset); }

template <typename Body>
void emulated::launch(int blocks, int threads, unsigned first, size_t scratch_bytes, size_t row_bytes, Body body) {
  Cluster all(blocks, threads, scratch_bytes, row_bytes);
  std::vector<std::thread> running;
  // the last block first: in place, its stores overwrite logits of the blocks before it
  for (int i = blocks * threads - 1; i >= 0; --i) {
    running.emplace_back([&, i] {
      cluster = &all;
      rank = i / threads;
      threadIdx = {unsigned(i % threads)};
      blockIdx = {first + unsigned(rank)};
      blockDim = {unsigned(threads)};
      body();
    });
  }
  for (auto& thread : running) thread.join();
}

namespace grpo {

inline int cluster_rank() { return emulated::rank; }
inline int cluster_size() { return int(emulated::cluster->blocks.size()); }
inline void cluster_arrive() { emulated::token = emulated::cluster->meeting.arrive(); }
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() {
  if (!emulated::token) std::abort();  // a thread must arrive before it waits
  emulated::cluster->meeting.wait(std::move(*emulated::token));
  emulated::token.reset();
}

inline void init_mbarrier(uint64_t* barrier) {
  const std::lock_guard guard(emulated::block().lock);
  emulated::block().copies[barrier] = std::nullopt;
}
inline void fence_mbarrier_init() {}

inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  const std::lock_guard guard(emulated::block().lock);
  const auto aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  if (!emulated::block().copies.count(barrier) || bytes % 16 != 0 || !aligned(to) || !aligned(from)) std::abort();
  emulated::block().copies[barrier] = {to, from, reinterpret_cast<const void*>(uintptr_t(bytes))};
}

inline void wait_mbarrier(uint64_t* barrier) {
  const std::lock_guard guard(emulated::block().lock);
  const auto found = emulated::block().copies.find(barrier);
  if (found == emulated::block().copies.end() || !found->second) std::abort();  // it would never complete
  auto& copy = *found->second;
  if (copy.empty()) return;
  std::memcpy(const_cast<void*>(copy[0]), copy[1], reinterpret_cast<uintptr_t>(copy[2]));
  copy.clear();
}

inline void store_remote(const void* here, int rank, float a, float b, float c, float d) {
  const auto offset = static_cast<const char*>(here) - reinterpret_cast<const char*>(emulated::block().scratch.data());
  const float values[] = {a, b, c, d};
  std::memcpy(reinterpret_cast<char*>(emulated::cluster->blocks[rank]->scratch.data()) + offset, values, sizeof values);
}

}  // namespace grpo
