// Operands in the order in which the products read them. Each is packed once, outside of a product's inner loop.
#include "avx512.h"
#include "rows.h"

AVX512_BEGIN
namespace grpo {
namespace {

inline __m512 load_as(const void* source, Dtype dtype, int64_t at, __mmask16 mask) {
  switch (dtype) {
    case Dtype::fp32: return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(source) + at);
    case Dtype::bf16: return widen_bf16(_mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(source) + at));
    default: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(source) + at));
  }
}

inline __m512 rounded_to(__m512 x, Dtype compute) {
  switch (compute) {
    case Dtype::fp32: return x;
    case Dtype::bf16: return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_words(x), 16));
    default: return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}

inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : static_cast<__mmask16>(count <= 0 ? 0 : (1u << count) - 1);
}

// Words (low halves a, high halves b) of two rows of bf16 pairs: neighbours of the even columns, then of the odd ones.
inline __m512i even_columns(__m512i a, __m512i b) {
  return _mm512_or_si512(_mm512_and_si512(a, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(b, 16));
}
inline __m512i odd_columns(__m512i a, __m512i b) {
  return _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_andnot_si512(_mm512_set1_epi32(0xffff), b));
}

}  // namespace

void pack_rows(const void* source, Dtype dtype, int64_t source_stride, int64_t rows, int64_t depth, Dtype compute,
               Operand kind, uint32_t* out, int64_t words) {
  for (int64_t r = 0; r < rows; r++) {
    uint32_t* to = out + r * words;
    const int64_t columns = words * per_word(kind);
    for (int64_t k = 0; k < columns; k += 16) {
      const __mmask16 mask = first_lanes(depth - k);
      // a masked lane is not accessed: the source may end here
      const __m512 given = mask == 0 ? _mm512_setzero_ps() : load_as(source, dtype, r * source_stride + k, mask);
      const __m512 x = rounded_to(given, compute);
      if (kind == Operand::bf16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + k / 2), _mm512_cvtepi32_epi16(bf16_words(x)));
      } else {
        _mm512_storeu_si512(to + k, _mm512_castps_si512(x));
      }
    }
  }
}

void transpose_panel(const uint32_t* rows, int64_t stride, int64_t depth, uint32_t* out) {
  for (int64_t lane = 0; lane < kLanes; lane += 16) {
    for (int64_t k = 0; k < depth; k += 16) {
      __m512i block[16];
      for (int i = 0; i < 16; i++) block[i] = _mm512_loadu_si512(rows + (lane + i) * stride + k);
      transpose_words(block);
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (k + i) * kLanes + lane, block[i]);
    }
  }
}

void transpose_block(const uint32_t* rows, int64_t count, int64_t stride, int64_t depth, Operand kind, uint32_t* out,
                     int64_t out_stride) {
  for (int64_t k = 0; k < depth; k += 16) {
    if (kind == Operand::fp32) {
      for (int64_t r = 0; r < count; r += 16) {
        __m512i block[16];
        for (int i = 0; i < 16; i++) block[i] = _mm512_loadu_si512(rows + (r + i) * stride + k);
        transpose_words(block);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (k + i) * out_stride + r, block[i]);
      }
      continue;
    }
    for (int64_t r = 0; r < count; r += 32) {
      __m512i even[16], odd[16];
      for (int i = 0; i < 16; i++) {
        const __m512i a = _mm512_loadu_si512(rows + (r + 2 * i) * stride + k);
        const __m512i b = _mm512_loadu_si512(rows + (r + 2 * i + 1) * stride + k);
        even[i] = even_columns(a, b);
        odd[i] = odd_columns(a, b);
      }
      transpose_words(even);
      transpose_words(odd);
      for (int i = 0; i < 16; i++) {
        _mm512_storeu_si512(out + 2 * (k + i) * out_stride + r / 2, even[i]);
        _mm512_storeu_si512(out + (2 * (k + i) + 1) * out_stride + r / 2, odd[i]);
      }
    }
  }
}

void interleave_panel(const uint32_t* rows, int64_t count, int64_t stride, int64_t first, Operand kind, uint32_t* out) {
  if (kind == Operand::fp32) {
    for (int64_t r = 0; r < count; r++) {
      for (int64_t j = 0; j < kLanes; j += 16) {
        _mm512_storeu_si512(out + r * kLanes + j, _mm512_loadu_si512(rows + r * stride + first + j));
      }
    }
    return;
  }
  for (int64_t r = 0; r < count; r += 2) {
    for (int64_t j = 0; j < kLanes; j += 32) {
      const __m512i a = _mm512_loadu_si512(rows + r * stride + (first + j) / 2);
      const __m512i b = _mm512_loadu_si512(rows + (r + 1) * stride + (first + j) / 2);
      const __m512i even = even_columns(a, b), odd = odd_columns(a, b);
      const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      uint32_t* to = out + r / 2 * kLanes + j;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi32(even, low, odd));
      _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi32(even, high, odd));
    }
  }
}

void store_gradient(const float* panel, int64_t rows, int64_t columns, Dtype dtype, void* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t j = 0; j < columns; j += 16) {
      const __mmask16 mask = first_lanes(columns - j);
      const __m512 x = _mm512_loadu_ps(panel + r * kLanes + j);
      const int64_t at = r * out_stride + j;
      if (dtype == Dtype::fp32) {
        _mm512_mask_storeu_ps(static_cast<float*>(out) + at, mask, x);
      } else {
        const __m256i halves = dtype == Dtype::bf16
                                   ? _mm512_cvtepi32_epi16(bf16_words(x))
                                   : _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(out) + at, mask, halves);
      }
    }
  }
}

void transpose_gradient(const float* panel, int64_t columns, int64_t tokens, float* out, int64_t out_stride) {
  for (int64_t h = 0; h < columns; h++) {
    for (int64_t t = 0; t < tokens; t++) out[t * out_stride + h] = panel[h * kLanes + t];
  }
}

}  // namespace grpo
AVX512_END
