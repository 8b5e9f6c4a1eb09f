// Statistics and exponentials of a tile of logits: tokens lie along the vector lanes, so nothing is summed across.
#include "avx512.h"
#include "rows.h"

AVX512_BEGIN
namespace grpo {
namespace {

constexpr int kVectors = kLanes / 16;
constexpr float kLowest = -3.4028234e38f;

// Stands for log 0 where it meets a factor of 0.
constexpr float kLowestLog = -1e4f;

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
  __m512 sum[kVectors], weighted[kVectors];
  for (int j = 0; j < kVectors; j++) sum[j] = weighted[j] = _mm512_setzero_ps();
  for (int64_t r = 0; r < rows; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) {
      const int64_t at = r * kLanes + 16 * j;
      const __m512 shifted = _mm512_sub_ps(_mm512_loadu_ps(z + at), max[j]);
      const __m512 e = exp_nonpositive(shifted);
      sum[j] = _mm512_add_ps(sum[j], e);
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
    _mm512_storeu_ps(out.sum + 16 * j, sum[j]);
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
    const __m512 sum_a = _mm512_loadu_ps(total.sum + at), sum_b = _mm512_loadu_ps(tile.sum + at);
    if (total.weighted != nullptr) {
      // sum of e (z - max) = factor * (sum of e (z - own max) + (own max - max) * sum of e)
      const __m512 shift_a = _mm512_max_ps(all(kLowestLog), down_a), shift_b = _mm512_max_ps(all(kLowestLog), down_b);
      const __m512 weighted_a = _mm512_fmadd_ps(shift_a, sum_a, _mm512_loadu_ps(total.weighted + at));
      const __m512 weighted_b = _mm512_fmadd_ps(shift_b, sum_b, _mm512_loadu_ps(tile.weighted + at));
      _mm512_storeu_ps(total.weighted + at,
                       _mm512_fmadd_ps(factor_a, weighted_a, _mm512_mul_ps(factor_b, weighted_b)));
    }
    _mm512_storeu_ps(total.sum + at, _mm512_fmadd_ps(factor_a, sum_a, _mm512_mul_ps(factor_b, sum_b)));
    _mm512_storeu_ps(total.max + at, max);
  }
}

}  // namespace grpo
AVX512_END
