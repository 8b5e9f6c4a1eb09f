// Launching the row kernels: plain CUDA, without torch.
#pragma once

#include <cuda_runtime.h>

#include "row_plan.h"
#include "row_steps.h"

namespace grpo_fused {

enum class RowType { FLOAT32, BFLOAT16, FLOAT16 };

// `plan_row` for the current device.
cudaError_t plan_rows(int vocab_size, int itemsize, int blocks, int threads, RowPlan* plan);

cudaError_t launch_rows(RowMode mode, RowType logits, RowType out, const RowArguments& arguments, const RowPlan& plan,
                        cudaStream_t stream);

}  // namespace grpo_fused
