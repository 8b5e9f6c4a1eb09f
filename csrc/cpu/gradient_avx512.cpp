// dL/d(product) of a tile from the exponentials that scoring kept, in the two orders that the gradient products read.
#include "avx512.h"
#include "rows.h"

AVX512_BEGIN
namespace grpo {
namespace {

constexpr int kVectors = kLanes / 16;
constexpr float kTiny = 1.17549435e-38f;

// One vector of tokens: a probability is exponential * factor.
struct Vector {
  __m512 factor, log_factor, minus_dlogp, minus_dentropy, entropy, target_value, offset, per_cap;
  __m512i target;
};

// Dense: neither entropy gradient nor softcap, so that a gradient is one multiplication.
template <bool Dense>
inline __m512 gradient_of(__m512 e, const Vector& v, bool with_entropy, bool with_softcap, int64_t row) {
  __m512 dz;
  if constexpr (Dense) {
    dz = _mm512_mul_ps(e, v.factor);
  } else {
    const __m512 log_e = log_positive(_mm512_max_ps(all(kTiny), e));
    __m512 slope = v.minus_dlogp;
    if (with_entropy) {
      const __m512 information = _mm512_add_ps(_mm512_add_ps(log_e, v.log_factor), v.entropy);
      slope = _mm512_fmadd_ps(v.minus_dentropy, information, slope);
    }
    dz = _mm512_mul_ps(_mm512_mul_ps(e, v.factor), slope);
    if (with_softcap) {
      const __m512 capped = _mm512_mul_ps(_mm512_add_ps(log_e, v.offset), v.per_cap);
      dz = _mm512_mul_ps(dz, _mm512_fnmadd_ps(capped, capped, all(1.0f)));
    }
  }
  const __mmask16 here = _mm512_cmpeq_epi32_mask(v.target, _mm512_set1_epi32(static_cast<int>(row)));
  return _mm512_mask_mov_ps(dz, here, v.target_value);
}

template <Operand Kind>
inline __m512 load(const void* kept, int64_t at) {
  if constexpr (Kind == Operand::bf16) {
    return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(kept) + at)));
  } else {
    return _mm512_loadu_ps(static_cast<const float*>(kept) + at);
  }
}

// The constants of 16 tokens.
Vector vector_of(const GradientLanes& lanes, int64_t lane, bool dense) {
  const bool with_entropy = lanes.minus_dentropy != nullptr, with_softcap = lanes.softcap != 0.0f;
  Vector v;
  v.offset = _mm512_loadu_ps(lanes.offset + lane);
  v.log_factor = _mm512_sub_ps(_mm512_sub_ps(v.offset, _mm512_loadu_ps(lanes.max + lane)),
                               _mm512_loadu_ps(lanes.log_sum + lane));
  v.minus_dlogp = _mm512_loadu_ps(lanes.minus_dlogp + lane);
  v.factor = exp_nonpositive(v.log_factor);
  if (dense) v.factor = _mm512_mul_ps(v.factor, v.minus_dlogp);
  v.minus_dentropy = with_entropy ? _mm512_loadu_ps(lanes.minus_dentropy + lane) : _mm512_setzero_ps();
  v.entropy = with_entropy ? _mm512_loadu_ps(lanes.entropy + lane) : _mm512_setzero_ps();
  v.per_cap = with_softcap ? _mm512_div_ps(_mm512_loadu_ps(lanes.temperature + lane), all(lanes.softcap))
                           : _mm512_setzero_ps();
  v.target_value = _mm512_loadu_ps(lanes.target_value + lane);
  v.target = _mm512_loadu_si512(lanes.target + lane);
  return v;
}

template <bool Dense, Operand Kind>
void tile(const void* kept, int64_t stride, int64_t rows, const GradientLanes& lanes, uint32_t* across,
          int64_t across_stride, uint32_t* along, float* row_sums) {
  const bool with_entropy = lanes.minus_dentropy != nullptr, with_softcap = lanes.softcap != 0.0f;
  Vector vectors[kVectors];
  for (int j = 0; j < kVectors; j++) vectors[j] = vector_of(lanes, 16 * j, Dense);
  const auto at = [&](int64_t row, int j) __attribute__((always_inline)) {
    return gradient_of<Dense>(load<Kind>(kept, row * stride + 16 * j), vectors[j], with_entropy, with_softcap, row);
  };
  for (int64_t r = 0; r < rows; r += per_word(Kind)) {
    const bool paired = Kind == Operand::bf16 && r + 1 < rows;
    __m512 sum = _mm512_setzero_ps(), next_sum = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) {
      const int64_t lane = 16 * j;
      const __m512 first = at(r, j);
      sum = _mm512_add_ps(sum, first);
      if constexpr (Kind == Operand::fp32) {
        if (across != nullptr) _mm512_storeu_ps(reinterpret_cast<float*>(across + r * across_stride + lane), first);
        if (along != nullptr) _mm512_storeu_ps(reinterpret_cast<float*>(along + r * kLanes + lane), first);
      } else {
        const __m512 second = paired ? at(r + 1, j) : _mm512_setzero_ps();
        next_sum = _mm512_add_ps(next_sum, second);
        const __m512i low = bf16_words(first), high = bf16_words(second);
        if (along != nullptr) {
          _mm512_storeu_si512(along + r / 2 * kLanes + lane, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
        if (across != nullptr) {
          uint32_t* to = across + r * across_stride + lane / 2;
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(low));
          if (paired) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + across_stride), _mm512_cvtepi32_epi16(high));
          }
        }
      }
    }
    if (row_sums != nullptr) {
      row_sums[r] += _mm512_reduce_add_ps(sum);
      if (paired) row_sums[r + 1] += _mm512_reduce_add_ps(next_sum);
    }
  }
}

}  // namespace

void gradient_tile(const void* kept, int64_t stride, int64_t rows, Operand kind, const GradientLanes& lanes,
                   uint32_t* across, int64_t across_stride, uint32_t* along, float* row_sums) {
  const bool dense = lanes.minus_dentropy == nullptr && lanes.softcap == 0.0f;
  const auto work = kind == Operand::bf16 ? (dense ? tile<true, Operand::bf16> : tile<false, Operand::bf16>)
                                          : (dense ? tile<true, Operand::fp32> : tile<false, Operand::fp32>);
  work(kept, stride, rows, lanes, across, across_stride, along, row_sums);
}

void compress_tile(const void* tile, int64_t rows, Operand kind, uint64_t mask, void* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t to = r * out_stride;
    for (int j = 0; j < kVectors; j++) {
      const __mmask16 taken = static_cast<__mmask16>(mask >> (16 * j));
      const int64_t from = r * kLanes + 16 * j;
      if (kind == Operand::bf16) {
        const uint16_t* source = static_cast<const uint16_t*>(tile) + from;
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
        const __m512i packed = _mm512_maskz_compress_epi32(taken, _mm512_cvtepu16_epi32(x));
        uint16_t* target = static_cast<uint16_t*>(out) + to;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(packed));
      } else {
        const __m512 x = _mm512_loadu_ps(static_cast<const float*>(tile) + from);
        _mm512_storeu_ps(static_cast<float*>(out) + to, _mm512_maskz_compress_ps(taken, x));
      }
      to += __builtin_popcount(taken);
    }
  }
}

}  // namespace grpo
AVX512_END
