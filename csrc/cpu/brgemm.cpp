// PyTorch's micro-kernel `at::native::cpublas::brgemm`, which uses AMX. It is not part of the stable ABI, so it is
// looked up by its symbol; a build serves PyTorch versions with and without it.
#include <dlfcn.h>

#include "gemm.h"

namespace grpo {
namespace {

// void brgemm(M, N, K, lda, ldb, ldc, add_C, const BFloat16* A, const BFloat16* B, float* C, bool is_vnni)
using Brgemm = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const void*, const void*, float*,
                        bool);
// void brgemm_release(bool is_vnni)
using Release = void (*)(bool);
constexpr const char* kBrgemm = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb";
constexpr const char* kRelease = "_ZN2at6native7cpublas14brgemm_releaseEb";

Brgemm brgemm = nullptr;
Release brgemm_release = nullptr;

void multiply(int64_t rows, int64_t depth, const uint32_t* a, int64_t lda, const uint32_t* b, float* c, int64_t ldc,
              bool add) {
  brgemm(rows, kLanes, 2 * depth, 2 * lda, kLanes, ldc, add, a, b, c, true);
}

// A product of small integers, exact in bf16 and fp32, compared with plain C++; false if it throws.
bool multiplies() {
  constexpr int64_t kRows = 5, kDepth = 8;
  uint32_t a[kRows * kDepth], b[kDepth * kLanes];
  float c[kRows * kLanes];
  const auto value = [](int64_t i, int64_t k) { return static_cast<int>((3 * i + 5 * k) % 7) - 3; };
  const auto bits = [](int x) -> uint32_t {
    const float f = static_cast<float>(x);
    uint32_t word;
    __builtin_memcpy(&word, &f, sizeof word);
    return word >> 16;
  };
  for (int64_t k = 0; k < kDepth; k++) {
    for (int64_t i = 0; i < kRows; i++) a[i * kDepth + k] = bits(value(i, 2 * k)) | bits(value(i, 2 * k + 1)) << 16;
    for (int64_t j = 0; j < kLanes; j++) b[k * kLanes + j] = bits(value(2 * k, j)) | bits(value(2 * k + 1, j)) << 16;
  }
  for (float& x : c) x = 1.0f;
  try {
    multiply(kRows, kDepth, a, kDepth, b, c, kLanes, true);
    brgemm_release(true);
  } catch (...) {
    return false;
  }
  for (int64_t i = 0; i < kRows; i++) {
    for (int64_t j = 0; j < kLanes; j++) {
      int sum = 1;
      for (int64_t k = 0; k < 2 * kDepth; k++) sum += value(i, k) * value(k, j);
      if (c[i * kLanes + j] != static_cast<float>(sum)) return false;
    }
  }
  return true;
}

}  // namespace

Gemm find_brgemm_bf16() {
  brgemm = reinterpret_cast<Brgemm>(dlsym(RTLD_DEFAULT, kBrgemm));
  brgemm_release = reinterpret_cast<Release>(dlsym(RTLD_DEFAULT, kRelease));
  return brgemm != nullptr && brgemm_release != nullptr && multiplies() ? multiply : nullptr;
}

void release_tiles() {
  if (brgemm_release != nullptr) brgemm_release(true);
}

}  // namespace grpo
