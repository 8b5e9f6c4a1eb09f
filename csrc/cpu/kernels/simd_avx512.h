// AVX-512: 16 lanes a vector. simd_avx2.h has the same names for AVX2.
#pragma once

namespace grpo {
namespace {

constexpr int kWidth = 16, kVectors = kLanes / kWidth;  // of a panel

// 24 accumulators and 4 vectors of b in 32 registers, operands of a broadcast from memory. Measured (AVX512-BF16 at one
// vdpbf16ps a cycle, 2 cores): 6 x 64 446 GFLOP/s, 12 x 32 423, 8 x 48 437, 14 x 32 434; the library's GEMMs of an lm
// head 316-382.
constexpr int kProductRows = 6, kProductVectors = 4;

using Floats = __m512;
using Halves = __m256i;  // fp16 or bf16
using Bytes = __m128i;
using Mask = __mmask16;
typedef uint32_t Words __attribute__((vector_size(64)));

#ifdef GRPO_AVX512_BF16
constexpr bool kHasPairs = true;
// Numbers below the smallest normal one become 0, as in the products.
inline Halves to_bf16(Floats x) { return (Halves)_mm512_cvtneps_pbh(x); }
#else
constexpr bool kHasPairs = false;
#endif

inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Words all_words(uint32_t x) { return (Words)_mm512_set1_epi32(static_cast<int>(x)); }

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Words load(const uint32_t* from) { return (Words)_mm512_loadu_si512(from); }
inline Halves load(const uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Bytes load(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline void store(uint32_t* to, Words x) { _mm512_storeu_si512(to, (__m512i)x); }
inline void store(uint16_t* to, Halves x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }

inline Mask first_lanes(int64_t count) {
  return static_cast<Mask>(count >= kWidth ? 0xffff : count <= 0 ? 0 : (1u << count) - 1);
}

// The first `count` lanes, from none to more than all; the others are 0, and not accessed.
inline Floats load_first(const float* from, int64_t count) {
  return count >= kWidth ? load(from) : _mm512_maskz_loadu_ps(first_lanes(count), from);
}
inline Halves load_first(const uint16_t* from, int64_t count) {
  return count >= kWidth ? load(from) : _mm256_maskz_loadu_epi16(first_lanes(count), from);
}
inline Bytes load_first(const uint8_t* from, int64_t count) {
  return count >= kWidth ? load(from) : _mm_maskz_loadu_epi8(first_lanes(count), from);
}
// What the first `count` half bytes stand for, the upper half of each byte first.
inline Floats from_half_bytes(const uint8_t* from, const float* codes, int64_t count) {
  const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes((count + 1) / 2), from);
  const __m512i twice = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
  const __m512i index = _mm512_and_si512(_mm512_srlv_epi32(twice, _mm512_set1_epi64(4)), _mm512_set1_epi32(15));
  return _mm512_maskz_permutexvar_ps(first_lanes(count), index, load(codes));
}
inline void store_first(float* to, int64_t count, Floats x) {
  count >= kWidth ? store(to, x) : _mm512_mask_storeu_ps(to, first_lanes(count), x);
}
inline void store_first(uint16_t* to, int64_t count, Halves x) {
  count >= kWidth ? store(to, x) : _mm256_mask_storeu_epi16(to, first_lanes(count), x);
}

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }       // a b + c
inline Floats minus_multiply_add(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b

// b comes through where either is NaN.
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }

inline Floats rounded(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats from_int(Words x) { return _mm512_cvtepi32_ps((__m512i)x); }

// y 2^n for a whole n from -160 to 0, rounded once.
inline Floats times_power_of_2(Floats y, Floats n) { return _mm512_scalef_ps(y, n); }

inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask equal(Words a, Words b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
inline Mask unordered(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline bool all_of(Mask mask) { return mask == 0xffff; }

// `yes` where the mask is set.
inline Floats select(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
inline Words select(Mask mask, Words yes, Words no) {
  return (Words)_mm512_mask_mov_epi32((__m512i)no, mask, (__m512i)yes);
}
inline Floats add_where(Mask mask, Floats x, Floats y) { return _mm512_mask_add_ps(x, mask, x, y); }
inline Floats add_where_not(Mask mask, Floats x, Floats y) { return _mm512_mask_add_ps(x, _knot_mask16(mask), x, y); }

inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }

// Between words and their low halves.
inline Words widen(Halves x) { return (Words)_mm512_cvtepu16_epi32(x); }
inline Floats from_int8(Bytes x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
inline Words widen(Bytes x) { return (Words)_mm512_cvtepu8_epi32(x); }
inline Halves narrow(Words x) { return _mm512_cvtepi32_epi16((__m512i)x); }

inline Floats from_fp16(Halves x) { return _mm512_cvtph_ps(x); }
inline Halves to_fp16(Floats x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// The lanes of the mask's bits, moved together; what is beyond them has no meaning.
inline Words compressed(uint32_t bits, Words x) {
  return (Words)_mm512_maskz_compress_epi32(static_cast<Mask>(bits), (__m512i)x);
}

// Those of a, then those of b.
inline Words joined(Halves a, Halves b) { return (Words)_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }

// One of a and one of b in each word.
inline Words in_pairs(Halves a, Halves b) {
  alignas(64) static constexpr uint16_t kFrom[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (Words)_mm512_permutexvar_epi16(_mm512_load_si512(kFrom), (__m512i)joined(a, b));
}

// Halves of a and b in turns: a0 b0 a1 b1 ...
inline void interleave(Words a, Words b, Words* low, Words* high) {
  alignas(64) static constexpr uint16_t kFrom[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(kFrom), last = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  *low = (Words)_mm512_permutex2var_epi16((__m512i)a, first, (__m512i)b);
  *high = (Words)_mm512_permutex2var_epi16((__m512i)a, last, (__m512i)b);
}

// A 16 x 16 transposition.
inline void transpose(Words words[16]) {
  __m512i row[16], t[16];
  for (int i = 0; i < 16; i++) row[i] = (__m512i)words[i];
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
    words[i] = (Words)_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    words[i + 8] = (Words)_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    words[i + 4] = (Words)_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    words[i + 12] = (Words)_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

}  // namespace
}  // namespace grpo
