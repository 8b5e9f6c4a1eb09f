// AVX2 with FMA and F16C: 8 lanes a vector. simd_avx512.h has the same names for AVX-512, with what they mean.
#pragma once

namespace grpo {
namespace {

constexpr int kWidth = 8, kVectors = kLanes / kWidth;  // of a panel

// 12 accumulators, 2 vectors of b and a broadcast operand of a in 16 registers.
constexpr int kProductRows = 6, kProductVectors = 2;

using Floats = __m256;
using Halves = __m128i;
struct Bytes {
  __m128i low;  // 8 of them
};
using Mask = __m256;
typedef uint32_t Words __attribute__((vector_size(32)));

constexpr bool kHasPairs = false;

inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Words all_words(uint32_t x) { return (Words)_mm256_set1_epi32(static_cast<int>(x)); }

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline Words load(const uint32_t* from) { return (Words)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Halves load(const uint16_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline Bytes load(const uint8_t* from) { return {_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))}; }
inline void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline void store(uint32_t* to, Words x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)x); }
inline void store(uint16_t* to, Halves x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }

inline __m256i first_lanes(int64_t count) {
  const int some = static_cast<int>(count < 0 ? 0 : count > kWidth ? kWidth : count);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(some), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Floats load_first(const float* from, int64_t count) {
  return count >= kWidth ? load(from) : _mm256_maskload_ps(from, first_lanes(count));
}
inline Halves load_first(const uint16_t* from, int64_t count) {
  if (count >= kWidth) return load(from);
  uint16_t lanes[kWidth] = {};
  for (int64_t i = 0; i < count; i++) lanes[i] = from[i];
  return load(lanes);
}
inline Bytes load_first(const uint8_t* from, int64_t count) {
  if (count >= kWidth) return load(from);
  uint8_t lanes[kWidth] = {};
  for (int64_t i = 0; i < count; i++) lanes[i] = from[i];
  return load(lanes);
}
// What the first `count` half bytes stand for, the upper half of each byte first.
inline Floats from_half_bytes(const uint8_t* from, const float* codes, int64_t count) {
  uint8_t some[kWidth / 2] = {};
  for (int64_t i = 0; i < kWidth / 2 && 2 * i < count; i++) some[i] = from[i];
  int32_t packed;
  __builtin_memcpy(&packed, some, 4);
  const __m128i bytes = _mm_cvtsi32_si128(packed);
  const __m256i twice = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
  const __m256i index = _mm256_and_si256(_mm256_srlv_epi32(twice, _mm256_set1_epi64x(4)), _mm256_set1_epi32(15));
  const Floats low = _mm256_permutevar8x32_ps(load(codes), index), high = _mm256_permutevar8x32_ps(load(codes + 8), index);
  const Floats found = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  return _mm256_and_ps(found, _mm256_castsi256_ps(first_lanes(count)));
}
inline void store_first(float* to, int64_t count, Floats x) {
  count >= kWidth ? store(to, x) : _mm256_maskstore_ps(to, first_lanes(count), x);
}
inline void store_first(uint16_t* to, int64_t count, Halves x) {
  if (count >= kWidth) return store(to, x);
  uint16_t lanes[kWidth];
  store(lanes, x);
  for (int64_t i = 0; i < count; i++) to[i] = lanes[i];
}

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats minus_multiply_add(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }

inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }

inline Floats rounded(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats from_int(Words x) { return _mm256_cvtepi32_ps((__m256i)x); }

// By two factors, since 2^-160 is no number of fp32; the first product is exact.
inline Floats times_power_of_2(Floats y, Floats n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), one = _mm256_set1_epi32(127);
  const __m256i first = _mm256_add_epi32(half, one), second = _mm256_add_epi32(_mm256_sub_epi32(whole, half), one);
  return y * _mm256_castsi256_ps(_mm256_slli_epi32(first, 23)) * _mm256_castsi256_ps(_mm256_slli_epi32(second, 23));
}

inline Mask equal(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline Mask equal(Words a, Words b) { return _mm256_castsi256_ps(_mm256_cmpeq_epi32((__m256i)a, (__m256i)b)); }
inline Mask unordered(Floats x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
inline bool all_of(Mask mask) { return _mm256_movemask_ps(mask) == 0xff; }

inline Floats select(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, mask); }
inline Words select(Mask mask, Words yes, Words no) { return (Words)select(mask, (Floats)yes, (Floats)no); }
inline Floats add_where(Mask mask, Floats x, Floats y) { return x + _mm256_and_ps(mask, y); }
inline Floats add_where_not(Mask mask, Floats x, Floats y) { return x + _mm256_andnot_ps(mask, y); }

inline float sum_of(Floats x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

inline Words widen(Halves x) { return (Words)_mm256_cvtepu16_epi32(x); }
inline Floats from_int8(Bytes x) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x.low)); }
inline Words widen(Bytes x) { return (Words)_mm256_cvtepu8_epi32(x.low); }
inline Halves narrow(Words x) {
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xffff));
  return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}

inline Floats from_fp16(Halves x) { return _mm256_cvtph_ps(x); }
inline Halves to_fp16(Floats x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// For every mask of 8 bits the positions of those that are set.
struct SetBits {
  uint8_t positions[256][8] = {};
  constexpr SetBits() {
    for (int bits = 0; bits < 256; bits++) {
      for (int i = 0, n = 0; i < 8; i++) {
        if (bits >> i & 1) positions[bits][n++] = static_cast<uint8_t>(i);
      }
    }
  }
};
constexpr SetBits kSetBits;

inline Words compressed(uint32_t bits, Words x) {
  const __m128i from = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSetBits.positions[bits & 0xff]));
  return (Words)_mm256_permutevar8x32_epi32((__m256i)x, _mm256_cvtepu8_epi32(from));
}

inline Words joined(Halves a, Halves b) { return (Words)_mm256_set_m128i(b, a); }
inline Words in_pairs(Halves a, Halves b) { return widen(a) | widen(b) << 16; }

inline void interleave(Words a, Words b, Words* low, Words* high) {
  const __m256i even = _mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
  const __m256i odd = _mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
  *low = (Words)_mm256_permute2x128_si256(even, odd, 0x20);
  *high = (Words)_mm256_permute2x128_si256(even, odd, 0x31);
}

// An 8 x 8 transposition.
inline void transpose(Words words[8]) {
  __m256i t[8], row[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32((__m256i)words[i], (__m256i)words[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32((__m256i)words[i], (__m256i)words[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    row[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    row[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    row[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    row[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    words[i] = (Words)_mm256_permute2x128_si256(row[i], row[i + 4], 0x20);
    words[i + 4] = (Words)_mm256_permute2x128_si256(row[i], row[i + 4], 0x31);
  }
}

}  // namespace
}  // namespace grpo
