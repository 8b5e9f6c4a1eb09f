// How a row is split over thread blocks, from the properties of a device.
#pragma once

#include <cstdint>

#include "row_math.h"

namespace grpo {

struct RowPlan {
  int blocks;   // of the cluster that holds a row; 0: one block streams it, reading twice
  int threads;  // of a block
};

struct DeviceLimits {
  bool clusters;         // sm_90 and later
  int block_bytes;       // shared memory that a block may have
  int processor_bytes;   // shared memory of a multiprocessor
};

constexpr int kWarp = 32;
constexpr int kMaxBlocks = 8;  // the largest cluster that every device with clusters can launch
constexpr int kMaxThreads = 512;
constexpr int kScratchBytes = 512;    // of a block's shared memory, besides the row
constexpr int kReservedBytes = 1024;  // of a block's shared memory, by the system

// Unmeasured; `python -m benchmarks.rows` times the choices. 256 threads of at most 64 registers leave room for three
// blocks with 76 KiB of a row each (V = 151936 over 8).
constexpr int kClusterThreads = 256;
constexpr int kStreamThreads = 512;

inline int64_t held_bytes(int vocab_size, int itemsize, int blocks) {
  return int64_t(part_length(vocab_size, blocks)) * itemsize;
}

// The smallest cluster that leaves room for two blocks a multiprocessor, so that one loads while the other waits or
// stores; else the largest. `blocks` and `threads` are 0 for a free choice, `blocks` is -1 to stream. False if the
// requested cluster cannot hold a row.
inline bool plan_row(int vocab_size, int itemsize, const DeviceLimits& limits, int blocks, int threads, RowPlan* plan) {
  const int64_t most = limits.block_bytes - kScratchBytes;
  const int64_t shared = limits.processor_bytes / 2 - kReservedBytes - kScratchBytes;
  int chosen = blocks;
  if (blocks == 0) {
    for (chosen = 1; chosen < kMaxBlocks && held_bytes(vocab_size, itemsize, chosen) > shared;) chosen *= 2;
  }
  if (chosen > 0 && limits.clusters && held_bytes(vocab_size, itemsize, chosen) <= most) {
    *plan = {chosen, threads > 0 ? threads : kClusterThreads};
    return true;
  }
  *plan = {0, threads > 0 ? threads : kStreamThreads};
  return blocks <= 0;
}

}  // namespace grpo
