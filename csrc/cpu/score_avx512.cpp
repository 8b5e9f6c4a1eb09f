// Statistics and exponentials of a tile of logits: a token is a vector lane, so no sum is taken across lanes.
#include "avx512.h"
#include "rows.h"

AVX512_BEGIN
namespace grpo {
namespace {

constexpr int kVectors = kLanes / 16;
constexpr float kLowest = -3.4028234e38f;

void to_logits(float* z, int64_t rows, const Transform& t, const __m512* factor) {
  for (int64_t r = 0; r < rows; r++) {
    const __m512 bias = all(t.bias == nullptr ? 0.0f : t.bias[r]);
    for (int j = 0; j < kVectors; j++) {
      float* at = z + r * kLanes + 16 * j;
      __m512 x = _mm512_add_ps(_mm512_loadu_ps(at), bias);
      if (t.softcap != 0.0f) {
        x = _mm512_mul_ps(tanh_of(_mm512_mul_ps(x, all(t.scale / t.softcap))), all(t.softcap));
      }
      _mm512_storeu_ps(at, _mm512_mul_ps(x, factor[j]));
    }
  }
}

template <bool Entropy, bool Keep, Operand Kind>
void exponentials(const float* z, int64_t rows, const __m512* max, const TileStatistics& out, void* kept) {
  // the maximum's own 1 is left out of the sum, whose digits a confident token needs; it can occur more than once
  __m512 rest[kVectors], ties[kVectors], weighted[kVectors];
  for (int j = 0; j < kVectors; j++) {
    rest[j] = weighted[j] = _mm512_setzero_ps();
    ties[j] = all(-1.0f);
  }
  for (int64_t r = 0; r < rows; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) {
      const int64_t at = r * kLanes + 16 * j;
      const __m512 shifted = _mm512_sub_ps(_mm512_loadu_ps(z + at), max[j]);
      const __m512 e = exp_nonpositive(shifted);
      const __mmask16 at_max = _mm512_cmp_ps_mask(shifted, _mm512_setzero_ps(), _CMP_EQ_OQ);
      rest[j] = _mm512_mask_add_ps(rest[j], _knot_mask16(at_max), rest[j], e);
      ties[j] = _mm512_mask_add_ps(ties[j], at_max, ties[j], all(1.0f));
      if constexpr (Entropy) weighted[j] = _mm512_fmadd_ps(e, _mm512_max_ps(all(kLowestLog), shifted), weighted[j]);
      if constexpr (Keep && Kind == Operand::bf16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(kept) + at),
                            _mm512_cvtepi32_epi16(bf16_words(e)));
      } else if constexpr (Keep) {
        _mm512_storeu_ps(static_cast<float*>(kept) + at, e);
      }
    }
  }
  for (int j = 0; j < kVectors; j++) {
    _mm512_storeu_ps(out.rest + 16 * j, _mm512_add_ps(rest[j], ties[j]));
    if constexpr (Entropy) _mm512_storeu_ps(out.weighted + 16 * j, weighted[j]);
  }
}

template <bool Entropy>
void dispatch(const float* z, int64_t rows, const __m512* max, const TileStatistics& out, Operand kind, void* kept) {
  if (kept == nullptr) {
    exponentials<Entropy, false, Operand::fp32>(z, rows, max, out, kept);
  } else if (kind == Operand::bf16) {
    exponentials<Entropy, true, Operand::bf16>(z, rows, max, out, kept);
  } else {
    exponentials<Entropy, true, Operand::fp32>(z, rows, max, out, kept);
  }
}

}  // namespace

void score_tile(float* z, int64_t rows, const Transform& t, const TileStatistics& out, Operand kind, void* kept) {
  __m512 factor[kVectors], max[kVectors];
  bool identity = t.bias == nullptr && t.softcap == 0.0f;
  for (int j = 0; j < kVectors; j++) {
    factor[j] = _mm512_loadu_ps(t.inverse_temperature + 16 * j);
    if (t.softcap == 0.0f) factor[j] = _mm512_mul_ps(factor[j], all(t.scale));
    identity = identity && _mm512_cmp_ps_mask(factor[j], all(1.0f), _CMP_NEQ_UQ) == 0;
    max[j] = all(kLowest);  // finite, so that a tile of -inf gives exponentials of 0
  }
  if (!identity) to_logits(z, rows, t, factor);
  for (int64_t r = 0; r < rows; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) max[j] = _mm512_max_ps(max[j], _mm512_loadu_ps(z + r * kLanes + 16 * j));
  }
  for (int j = 0; j < kVectors; j++) _mm512_storeu_ps(out.max + 16 * j, max[j]);
  if (out.weighted == nullptr) {
    dispatch<false>(z, rows, max, out, kind, kept);
  } else {
    dispatch<true>(z, rows, max, out, kind, kept);
  }
}

void merge_tile(const TileStatistics& total, const TileStatistics& tile) {
  for (int64_t at = 0; at < kLanes; at += 16) {
    const __m512 a = _mm512_loadu_ps(total.max + at), b = _mm512_loadu_ps(tile.max + at);
    const __m512 max = _mm512_max_ps(a, b);
    const __m512 down_a = _mm512_sub_ps(a, max), down_b = _mm512_sub_ps(b, max);
    const __m512 factor_a = exp_nonpositive(down_a), factor_b = exp_nonpositive(down_b);
    const __m512 rest_a = _mm512_loadu_ps(total.rest + at), rest_b = _mm512_loadu_ps(tile.rest + at);
    if (total.weighted != nullptr) {
      // sum of e (z - max) = factor * (sum of e (z - own max) + (own max - max) * sum of e)
      const __m512 shift_a = _mm512_max_ps(all(kLowestLog), down_a), shift_b = _mm512_max_ps(all(kLowestLog), down_b);
      const __m512 sum_a = _mm512_add_ps(all(1.0f), rest_a), sum_b = _mm512_add_ps(all(1.0f), rest_b);
      const __m512 weighted_a = _mm512_fmadd_ps(shift_a, sum_a, _mm512_loadu_ps(total.weighted + at));
      const __m512 weighted_b = _mm512_fmadd_ps(shift_b, sum_b, _mm512_loadu_ps(tile.weighted + at));
      _mm512_storeu_ps(total.weighted + at,
                       _mm512_fmadd_ps(factor_a, weighted_a, _mm512_mul_ps(factor_b, weighted_b)));
    }
    // one factor is 1: that of the part whose maximum is left out of the sum; the other's maximum is now in it
    const __m512 merged = _mm512_fmadd_ps(factor_a, rest_a, _mm512_mul_ps(factor_b, rest_b));
    _mm512_storeu_ps(total.rest + at, _mm512_add_ps(merged, _mm512_min_ps(factor_a, factor_b)));
    _mm512_storeu_ps(total.max + at, max);
  }
}

}  // namespace grpo
AVX512_END
