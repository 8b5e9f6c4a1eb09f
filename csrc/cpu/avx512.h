// Vector helpers for the AVX-512 sources. A function here is compiled for AVX-512 with any compiler flags: the
// sources that include this keep to plain functions over pointers, so that no shared inline function (of the standard
// library, say) is compiled for AVX-512 and then used by the linker for all callers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(__clang__)
#define AVX512_BEGIN \
  _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512vl,avx512dq\"))), apply_to=function)")
#define AVX512_END _Pragma("clang attribute pop")
#else
#define AVX512_BEGIN \
  _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,avx512bw,avx512vl,avx512dq\")")
#define AVX512_END _Pragma("GCC pop_options")
#endif

AVX512_BEGIN
namespace grpo {
namespace {

inline __m512 all(float x) { return _mm512_set1_ps(x); }

// exp(x) for x <= 0, to 1 ulp; 0 below -104, NaN for NaN.
inline __m512 exp_nonpositive(__m512 x) {
  x = _mm512_max_ps(all(-110.0f), x);  // returns the second operand if it is NaN
  const __m512 n =
      _mm512_roundscale_ps(_mm512_mul_ps(x, all(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, all(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, all(-2.12194440e-4f), r);
  __m512 y = all(1.9875691500e-4f);
  y = _mm512_fmadd_ps(y, r, all(1.3981999507e-3f));
  y = _mm512_fmadd_ps(y, r, all(8.3334519073e-3f));
  y = _mm512_fmadd_ps(y, r, all(4.1665795894e-2f));
  y = _mm512_fmadd_ps(y, r, all(1.6666665459e-1f));
  y = _mm512_fmadd_ps(y, r, all(5.0000001201e-1f));
  y = _mm512_fmadd_ps(_mm512_mul_ps(r, r), y, _mm512_add_ps(r, all(1.0f)));
  return _mm512_scalef_ps(y, n);
}

// log(x) for normal x > 0, to about 1 ulp.
inline __m512 log_positive(__m512 x) {
  // mantissa in [0.75, 1.5), so that the logarithm of 1 is exactly 0 and nothing cancels near it
  const __m512 mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  const __m512 exponent = _mm512_getexp_ps(_mm512_div_ps(x, mantissa));
  const __m512 r = _mm512_sub_ps(mantissa, all(1.0f));
  const __m512 square = _mm512_mul_ps(r, r);
  __m512 y = all(7.0376836292e-2f);
  y = _mm512_fmadd_ps(y, r, all(-1.1514610310e-1f));
  y = _mm512_fmadd_ps(y, r, all(1.1676998740e-1f));
  y = _mm512_fmadd_ps(y, r, all(-1.2420140846e-1f));
  y = _mm512_fmadd_ps(y, r, all(1.4249322787e-1f));
  y = _mm512_fmadd_ps(y, r, all(-1.6668057665e-1f));
  y = _mm512_fmadd_ps(y, r, all(2.0000714765e-1f));
  y = _mm512_fmadd_ps(y, r, all(-2.4999993993e-1f));
  y = _mm512_fmadd_ps(y, r, all(3.3333331174e-1f));
  y = _mm512_mul_ps(_mm512_mul_ps(y, square), r);
  y = _mm512_fmadd_ps(exponent, all(-2.12194440e-4f), y);
  y = _mm512_fnmadd_ps(all(0.5f), square, y);
  return _mm512_fmadd_ps(exponent, all(0.693359375f), _mm512_add_ps(r, y));
}

// tanh(x), to 1e-7 of absolute error.
inline __m512 tanh_of(__m512 x) {
  const __m512 sign = _mm512_and_ps(x, all(-0.0f));
  const __m512 t = exp_nonpositive(_mm512_mul_ps(_mm512_andnot_ps(all(-0.0f), x), all(-2.0f)));
  return _mm512_or_ps(_mm512_div_ps(_mm512_sub_ps(all(1.0f), t), _mm512_add_ps(all(1.0f), t)), sign);
}

// 16 fp32 numbers rounded to bf16 (nearest even), one in the low half of each word; NaN stays NaN.
inline __m512i bf16_words(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}

inline __m512 widen_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// A 16 x 16 transpose of words.
inline void transpose_words(__m512i row[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    row[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    row[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    row[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    row[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

}  // namespace
}  // namespace grpo
AVX512_END
