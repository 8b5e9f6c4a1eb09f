// The instruction set, and what multiplies bf16: probed at the first use.
#include "machine.h"

#include <algorithm>
#include <cstdlib>

#include "head.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace grpo {
namespace {

Machine without(const std::string& missing) { return {missing, "none", nullptr, nullptr}; }

#if defined(__x86_64__)

// Compilers differ in the names that __builtin_cpu_supports knows.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_amx_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & (1u << 22)) && (d & (1u << 24));
}

// `wanted`: as in GRPO_FUSED_ISA.
Machine probe(const std::string& wanted) {
  __builtin_cpu_init();
  const bool best = wanted.empty(), avx512 = has_avx512(), bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  std::string needs;
  if (best || wanted == "amx") {
    needs = "AVX-512 with bf16 and AMX (in the processor, the operating system, and the compiler: GCC 11 or clang 11)";
    const AmxProducts amx = bf16 && has_amx_bf16() ? amx_products() : AmxProducts{};
    if (amx.bf16 != nullptr) return {"", "AMX", &kernels_bf16, amx.bf16, amx.pieces, 2 << 20, 3, 16};
  }
  if (best || wanted == "avx512" || wanted == "avx512f") {
    needs = "AVX-512 (F, BW, VL, DQ)";
    if (bf16 && wanted != "avx512f") return {"", "AVX512-BF16", &kernels_bf16, multiply_bf16};
    if (avx512) return {"", "AVX-512, bf16 widened", &kernels_avx512, nullptr};
  }
  if (best || wanted == "avx2") {
    needs = "AVX2 and FMA (with F16C)";
    if (has_avx2()) return {"", "AVX2, bf16 widened", &kernels_avx2, nullptr};
  }
  if (needs.empty()) return without("GRPO_FUSED_ISA must be avx2, avx512 or amx; got '" + wanted + "'");
  return without((best ? "the native engine needs " : "GRPO_FUSED_ISA=" + wanted + " needs ") + needs +
                 ", which this machine lacks");
}

#else

Machine probe(const std::string&) { return without("the native engine is written for x86-64"); }

#endif

std::string wanted() {
  const char* isa = std::getenv("GRPO_FUSED_ISA");
  return isa == nullptr ? "" : isa;
}

Machine& chosen() {
  static Machine machine = probe(wanted());
  return machine;
}

}  // namespace

const Machine& machine() { return chosen(); }

void use_instruction_set(const std::string& name, int64_t group) {
  chosen() = probe(name);
  if (group != 0) chosen().group = std::clamp<int64_t>(group, 1, kMostBlocks);
}

}  // namespace grpo
