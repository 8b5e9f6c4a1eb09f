// Products of 6 rows x 64 lanes in registers: 24 accumulators, 4 vectors of b, operands of a broadcast from memory.
//
// Measured (AVX512-BF16 at one vdpbf16ps a cycle, 2 cores): 6 x 64 446 GFLOP/s, 12 x 32 423, 8 x 48 437, 14 x 32 434;
// the library's GEMMs of an lm head 316-382.
#include "avx512.h"
#include "gemm.h"

// The fp32 kernel shares its templates with bf16. Compilers emit AVX512-BF16 for its intrinsics only, so it has none.
#define WITH_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

AVX512_BEGIN
namespace grpo {
namespace {

constexpr int kRows = 6;
constexpr int kVectors = kLanes / 16;

// Depth summed at once, then added to the output: a chain of roundings is as long as a slice and as the number of
// slices, not as the vocabulary. Measured (fp32, H = 896, V = 32000; the library's products make 3.1e-6 and 7e-7):
// |dlogp| 6.9e-6 in one chain, 5.0e-6 with 512, 2.0e-6 with 256, 1.9e-6 with 128; dH 3.4e-6, 1.0e-6, 0.8e-6, 0.7e-6 off.
// Time (shortest calls): as one chain within 2 %; with 128, 2 to 6 % more.
constexpr int64_t kDepth = 256;

template <int Rows, bool Bf16>
WITH_BF16 inline __attribute__((always_inline)) void rows_of(int64_t depth, const uint32_t* a, int64_t lda,
                                                             const uint32_t* b, float* c, int64_t ldc, bool add) {
  __m512 sum[Rows][kVectors];
#pragma GCC unroll 6
  for (int i = 0; i < Rows; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) sum[i][j] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth; k++) {
    __m512i right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) right[j] = _mm512_loadu_si512(b + k * kLanes + 16 * j);
#pragma GCC unroll 6
    for (int i = 0; i < Rows; i++) {
      const __m512i left = _mm512_set1_epi32(static_cast<int>(a[i * lda + k]));
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; j++) {
        if constexpr (Bf16) {
          sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)left, (__m512bh)right[j]);
        } else {
          sum[i][j] = _mm512_fmadd_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right[j]), sum[i][j]);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Rows; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) {
      float* to = c + i * ldc + 16 * j;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), sum[i][j]) : sum[i][j]);
    }
  }
}

template <bool Bf16>
WITH_BF16 inline __attribute__((always_inline)) void all_rows(int64_t rows, int64_t depth, const uint32_t* a,
                                                              int64_t lda, const uint32_t* b, float* c, int64_t ldc,
                                                              bool add) {
  int64_t k = 0;
  do {
    const int64_t length = depth - k < kDepth ? depth - k : kDepth;
    const bool adds = add || k > 0;
    const uint32_t* slice = b + k * kLanes;
    int64_t i = 0;
    for (; i + kRows <= rows; i += kRows) {
      rows_of<kRows, Bf16>(length, a + i * lda + k, lda, slice, c + i * ldc, ldc, adds);
    }
    switch (rows - i) {
      case 5: rows_of<5, Bf16>(length, a + i * lda + k, lda, slice, c + i * ldc, ldc, adds); break;
      case 4: rows_of<4, Bf16>(length, a + i * lda + k, lda, slice, c + i * ldc, ldc, adds); break;
      case 3: rows_of<3, Bf16>(length, a + i * lda + k, lda, slice, c + i * ldc, ldc, adds); break;
      case 2: rows_of<2, Bf16>(length, a + i * lda + k, lda, slice, c + i * ldc, ldc, adds); break;
      case 1: rows_of<1, Bf16>(length, a + i * lda + k, lda, slice, c + i * ldc, ldc, adds); break;
      default: break;
    }
    k += kDepth;
  } while (k < depth);
}

}  // namespace

WITH_BF16 void gemm_avx512_fp32(int64_t rows, int64_t depth, const uint32_t* a, int64_t lda, const uint32_t* b,
                                float* c, int64_t ldc, bool add) {
  all_rows<false>(rows, depth, a, lda, b, c, ldc, add);
}

WITH_BF16 void gemm_avx512_bf16(int64_t rows, int64_t depth, const uint32_t* a, int64_t lda, const uint32_t* b,
                                float* c, int64_t ldc, bool add) {
  all_rows<true>(rows, depth, a, lda, b, c, ldc, add);
}

}  // namespace grpo
AVX512_END
