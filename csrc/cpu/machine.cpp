// The instructions that this machine multiplies with: probed once, at the first use.
#include "gemm.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace grpo {
namespace {

#if defined(__x86_64__)

bool has_amx_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & (1u << 22)) && (d & (1u << 24));
}

Machine probe() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return {"this processor has no AVX-512 (F, BW, VL, DQ)", "none", nullptr, nullptr};
  }
  if (has_amx_bf16()) {
    if (const Gemm brgemm = find_brgemm_bf16()) return {nullptr, "AMX (brgemm)", gemm_avx512_fp32, brgemm};
  }
  if (__builtin_cpu_supports("avx512bf16")) return {nullptr, "AVX512-BF16", gemm_avx512_fp32, gemm_avx512_bf16};
  return {nullptr, "AVX-512, bf16 widened", gemm_avx512_fp32, nullptr};
}

#else

Machine probe() { return {"the native engine is written for x86-64", "none", nullptr, nullptr}; }

#endif

}  // namespace

const Machine& machine() {
  static const Machine found = probe();
  return found;
}

}  // namespace grpo
