// Launching the row kernels: plain CUDA, without torch.
#pragma once

#include <cuda_runtime.h>

#include "row_steps.h"

namespace grpo_fused {

enum class RowMode { STATISTICS, GRADIENT, LOSS };
enum class RowType { FLOAT32, BFLOAT16, FLOAT16 };

// How a row is laid over thread blocks.
struct RowPlan {
  int blocks;   // of a cluster that holds the row; 0: one block streams it, reading twice
  int threads;  // of a block
};

constexpr int MAX_BLOCKS = 8;  // the largest cluster that every device with clusters can launch
constexpr int MAX_THREADS = 512;

// The plan for rows of `vocab_size` on the current device; `blocks` and `threads` are 0 where the choice is free, and
// `blocks` is -1 to stream.
cudaError_t plan_rows(int vocab_size, int itemsize, int blocks, int threads, RowPlan* plan);

cudaError_t launch_rows(RowMode mode, RowType logits, RowType out, const RowArguments& arguments, const RowPlan& plan,
                        cudaStream_t stream);

}  // namespace grpo_fused
