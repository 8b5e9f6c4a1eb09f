// The AVX-512 and AMX instructions of csrc/cpu as functions for AVX2: SIMDe's, and those that its version 0.7 lacks.
// `make emulate-cpu` compiles the CPU library with them, without its target pragmas.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "emulated_tiles.h"

namespace emulated {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));

template <class Vector, class Element>
Vector load_masked(uint32_t mask, const Element* from) {
  Element lanes[sizeof(Vector) / sizeof(Element)] = {};
  for (unsigned i = 0; i < sizeof(Vector) / sizeof(Element); i++) {
    if (mask >> i & 1) lanes[i] = from[i];
  }
  Vector vector;
  std::memcpy(&vector, lanes, sizeof vector);
  return vector;
}

template <class Element, class Vector>
void store_masked(Element* to, uint32_t mask, Vector vector) {
  Element lanes[sizeof(Vector) / sizeof(Element)];
  std::memcpy(lanes, &vector, sizeof vector);
  for (unsigned i = 0; i < sizeof(Vector) / sizeof(Element); i++) {
    if (mask >> i & 1) to[i] = lanes[i];
  }
}

inline Floats two(__m256 low, __m256 high) {
  Floats both;
  std::memcpy(&both, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&both) + 32, &high, 32);
  return both;
}

inline Floats from_fp16(__m256i x) {
  return two(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}

template <int Mode>
inline __m256i to_fp16(Floats x) {
  __m256 half[2];
  std::memcpy(half, &x, 64);
  return _mm256_set_m128i(_mm256_cvtps_ph(half[1], Mode), _mm256_cvtps_ph(half[0], Mode));
}

// To the nearest even; subnormal numbers become 0, a NaN keeps its upper bits and becomes quiet.
inline __m256i to_bf16(Floats x) {
  uint32_t bits[16];
  std::memcpy(bits, &x, 64);
  uint16_t halves[16];
  for (int i = 0; i < 16; i++) {
    const uint32_t magnitude = bits[i] & 0x7fffffff;
    halves[i] = magnitude > 0x7f800000   ? bits[i] >> 16 | 0x40
                : magnitude < 0x00800000 ? bits[i] >> 16 & 0x8000
                                         : (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
  }
  __m256i result;
  std::memcpy(&result, halves, 32);
  return result;
}

// As VDPBF16PS.
inline Floats multiply_pairs(Floats sum, __m512bh x, __m512bh y) {
  uint32_t a[16], b[16];
  std::memcpy(a, &x, 64);
  std::memcpy(b, &y, 64);
  for (int i = 0; i < 16; i++) sum[i] = add_pair(sum[i], a[i], b[i]);
  return sum;
}

// In the order of GCC's and clang's sequence for the intrinsic: halves, then halves of these.
inline float sum(Floats x) {
  float lanes[16];
  std::memcpy(lanes, &x, 64);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// x 2^n for a whole n, rounded once.
inline Floats scale(Floats x, Floats n) {
  for (int i = 0; i < 16; i++) x[i] = __builtin_ldexpf(x[i], static_cast<int>(n[i]));
  return x;
}

}  // namespace emulated

#undef _knot_mask16
#define _knot_mask16(mask) static_cast<__mmask16>(~(mask))
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps(mask, from) emulated::load_masked<emulated::Floats>(mask, from)
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16(mask, from) emulated::load_masked<__m256i>(mask, from)
#undef _mm_maskz_loadu_epi8
#define _mm_maskz_loadu_epi8(mask, from) emulated::load_masked<__m128i>(mask, from)
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps(to, mask, x) emulated::store_masked(to, mask, x)
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16(to, mask, x) emulated::store_masked(to, mask, x)
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(x) __builtin_convertvector((emulated::Ints)(x), emulated::Floats)
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(x) (__m512i) __builtin_convertvector((emulated::Halves)(x), emulated::Ints)
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32(x) (__m512i) __builtin_convertvector((emulated::Bytes)(x), emulated::Ints)
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(x) (__m512i) __builtin_convertvector((emulated::SignedBytes)(x), emulated::Ints)
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16(x) (__m256i) __builtin_convertvector((emulated::Ints)(x), emulated::Halves)
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(x) emulated::from_fp16(x)
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, mode) emulated::to_fp16<(mode)>(x)
#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh(x) emulated::to_bf16(x)
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sum, a, b) emulated::multiply_pairs(sum, a, b)
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps(x) emulated::sum(x)
#undef _mm512_scalef_ps
#define _mm512_scalef_ps(x, n) emulated::scale(x, n)

// The processor and the system have everything.
#define __builtin_cpu_supports(name) true
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) (*(d) = 0xffffffff, true)
#define syscall(...) 0
