// Launching the row kernels: plain CUDA, without torch.
#pragma once

#include <cuda_runtime.h>

#include "row_steps.h"

namespace grpo {

cudaError_t launch_rows(RowMode mode, Dtype logits, Dtype out, const RowArguments& arguments, cudaStream_t stream);

}  // namespace grpo
