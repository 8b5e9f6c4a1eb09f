// Launching the row kernels: plain CUDA, without torch.
#pragma once

#include <cuda_runtime.h>

#include "row_plan.h"
#include "row_steps.h"

namespace grpo {

// `plan_row` for the current device.
cudaError_t plan_rows(int vocab_size, int itemsize, int blocks, int threads, RowPlan* plan);

cudaError_t launch_rows(RowMode mode, Dtype logits, Dtype out, const RowArguments& arguments, const RowPlan& plan,
                        cudaStream_t stream);

}  // namespace grpo
