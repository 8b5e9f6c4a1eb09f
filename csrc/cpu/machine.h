// The kernels that this machine runs.
#pragma once

#include <string>

#include "rows.h"

namespace grpo {

struct Machine {
  std::string missing;  // why the engine cannot run here; empty if it can
  const char* name;     // what multiplies bf16
  const Kernels* kernels;
  Gemm bf16;  // nullptr: bf16 inputs are widened
  Gemm pieces = nullptr;  // of fp32 in three bf16 pieces, where that is faster
  int64_t bf16_cache_bytes = 1 << 20;  // of the second level, for its products: all that have the instructions have it
  int64_t group = 1;  // vocabulary blocks of one product of dH: a few make it deep enough for AMX
  int64_t narrow_step = 1;  // words of the depth that products of bf16 or pieces take at a time
};

// Probed once: the best instruction set, or what the environment variable GRPO_FUSED_ISA names.
const Machine& machine();

// Changes it, for tests: avx2, avx512, avx512f (without bf16), amx, or empty for the best; and `group`, if it is not 0.
// No call may be running.
void use_instruction_set(const std::string& name, int64_t group);

}  // namespace grpo
