// Products of pairs of rows, and weighted sums of rows, for tokens that have a candidate set.
#include "avx512.h"
#include "pairs.h"

AVX512_BEGIN
namespace grpo {
namespace {

constexpr int kLine = 64;

template <Dtype Kind>
__m512 load(const void* row, int64_t at, __mmask16 there) {
  if constexpr (Kind == Dtype::fp32) {
    return _mm512_maskz_loadu_ps(there, static_cast<const float*>(row) + at);
  } else {
    const __m256i words = _mm256_maskz_loadu_epi16(there, static_cast<const uint16_t*>(row) + at);
    return Kind == Dtype::bf16 ? widen_bf16(words) : _mm512_cvtph_ps(words);
  }
}

__mmask16 mask_of(int64_t left) { return left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1); }

// Four sums side by side, since a sum waits for the one before; always added up in the same order.
template <Dtype Kind>
float dot(const void* a, const void* b, int64_t columns) {
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t start = 0; start < columns; start += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const int64_t at = start + 16 * j;
      const __mmask16 there = mask_of(at < columns ? columns - at : 0);
      sums[j] = _mm512_fmadd_ps(load<Kind>(a, at, there), load<Kind>(b, at, there), sums[j]);
    }
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

template <Dtype Kind>
void add(float* out, const void* x, float factor, int64_t columns) {
  const __m512 f = all(factor);
  for (int64_t at = 0; at < columns; at += 16) {
    const __mmask16 there = mask_of(columns - at);
    const __m512 sum = _mm512_fmadd_ps(f, load<Kind>(x, at, there), _mm512_maskz_loadu_ps(there, out + at));
    _mm512_mask_storeu_ps(out + at, there, sum);
  }
}

}  // namespace

void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) _mm_prefetch(static_cast<const char*>(row) + at, _MM_HINT_T0);
}

float row_product(Dtype dtype, const void* a, const void* b, int64_t columns) {
  switch (dtype) {
    case Dtype::fp32: return dot<Dtype::fp32>(a, b, columns);
    case Dtype::bf16: return dot<Dtype::bf16>(a, b, columns);
    default: return dot<Dtype::fp16>(a, b, columns);
  }
}

void add_row(Dtype dtype, float* out, const void* x, float factor, int64_t columns) {
  switch (dtype) {
    case Dtype::fp32: return add<Dtype::fp32>(out, x, factor, columns);
    case Dtype::bf16: return add<Dtype::bf16>(out, x, factor, columns);
    default: return add<Dtype::fp16>(out, x, factor, columns);
  }
}

}  // namespace grpo
AVX512_END
