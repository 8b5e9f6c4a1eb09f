// Statistics and exponentials of a tile of logits: tokens lie along the vector lanes, so nothing is summed across.
#pragma once

namespace grpo {
namespace {

constexpr float kLowest = -3.4028234e38f;

// z of raw products, where they stand, if they are to be changed at all; and the maxima.
template <bool Changed>
void to_logits(float* z, int64_t rows, const Transform& t, const Floats* factor, Floats* max) {
  for (int64_t r = 0; r < rows; r++) {
    const Floats bias = all(t.bias == nullptr ? 0.0f : t.bias[r]);
    const Floats row_scale = all(t.row_scale == nullptr ? 1.0f : t.row_scale[r]);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; j++) {
      const int64_t at = r * kLanes + kWidth * j;
      Floats x = load(z + at);
      if constexpr (Changed) {
        x = multiply_add(x, row_scale, bias);
        if (t.softcap != 0.0f) x = tanh_of(x * all(t.scale / t.softcap)) * all(t.softcap);
        x = x * factor[j];
        if (t.most != nullptr) x = smaller(x, load(t.most + at));
        store(z + at, x);
      }
      max[j] = larger(max[j], x);
    }
  }
}

template <bool Entropy, bool Keep, Dtype Kept>
void exponentials(const float* z, int64_t rows, const Floats* max, const TileStatistics& out, void* kept) {
  // the maximum's own 1 stays out of the sum, whose digits a confident token needs; it can occur more than once
  Floats rest[kVectors], ties[kVectors], weighted[kVectors];
  for (int j = 0; j < kVectors; j++) {
    rest[j] = weighted[j] = all(0.0f);
    ties[j] = all(-1.0f);
  }
  for (int64_t r = 0; r < rows; r++) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; j++) {
      const int64_t at = r * kLanes + kWidth * j;
      const Floats shifted = load(z + at) - max[j];
      const Floats e = exp_nonpositive(shifted);
      const Mask at_max = equal(shifted, all(0.0f));
      rest[j] = add_where_not(at_max, rest[j], e);
      ties[j] = add_where(at_max, ties[j], all(1.0f));
      if constexpr (Entropy) weighted[j] = multiply_add(e, larger(all(kLowestLogp), shifted), weighted[j]);
      if constexpr (Keep && Kept == Dtype::bf16) {
        store(static_cast<uint16_t*>(kept) + at, to_bf16(e));
      } else if constexpr (Keep) {
        store(static_cast<float*>(kept) + at, e);
      }
    }
  }
  for (int j = 0; j < kVectors; j++) {
    store(out.rest + kWidth * j, rest[j] + ties[j]);
    if constexpr (Entropy) store(out.weighted + kWidth * j, weighted[j]);
  }
}

template <bool Entropy>
void dispatch(const float* z, int64_t rows, const Floats* max, const TileStatistics& out, Dtype dtype, void* kept) {
  if (kept == nullptr) {
    exponentials<Entropy, false, Dtype::fp32>(z, rows, max, out, kept);
  } else if (dtype == Dtype::bf16) {
    exponentials<Entropy, true, Dtype::bf16>(z, rows, max, out, kept);
  } else {
    exponentials<Entropy, true, Dtype::fp32>(z, rows, max, out, kept);
  }
}

void score_tile(float* z, int64_t rows, const Transform& t, const TileStatistics& out, Dtype dtype, void* kept) {
  Floats factor[kVectors], max[kVectors];
  bool changed = t.row_scale != nullptr || t.bias != nullptr || t.softcap != 0.0f || t.most != nullptr;
  for (int j = 0; j < kVectors; j++) {
    factor[j] = load(t.inverse_temperature + kWidth * j);
    if (t.softcap == 0.0f) factor[j] = factor[j] * all(t.scale);
    changed = changed || !all_of(equal(factor[j], all(1.0f)));
    max[j] = all(kLowest);  // finite, so that a tile of -inf gives exponentials of 0
  }
  changed ? to_logits<true>(z, rows, t, factor, max) : to_logits<false>(z, rows, t, factor, max);
  for (int j = 0; j < kVectors; j++) store(out.max + kWidth * j, max[j]);
  if (out.weighted == nullptr) {
    dispatch<false>(z, rows, max, out, dtype, kept);
  } else {
    dispatch<true>(z, rows, max, out, dtype, kept);
  }
}

void merge_tile(const TileStatistics& total, const TileStatistics& tile) {
  for (int64_t at = 0; at < kLanes; at += kWidth) {
    const Floats a = load(total.max + at), b = load(tile.max + at);
    const Floats max = larger(a, b);
    const Floats down_a = a - max, down_b = b - max;
    const Floats factor_a = exp_nonpositive(down_a), factor_b = exp_nonpositive(down_b);
    const Floats rest_a = load(total.rest + at), rest_b = load(tile.rest + at);
    if (total.weighted != nullptr) {
      // sum of e (z - max) = factor * (sum of e (z - own max) + (own max - max) * sum of e)
      const Floats shift_a = larger(all(kLowestLogp), down_a), shift_b = larger(all(kLowestLogp), down_b);
      const Floats sum_a = all(1.0f) + rest_a, sum_b = all(1.0f) + rest_b;
      const Floats weighted_a = multiply_add(shift_a, sum_a, load(total.weighted + at));
      const Floats weighted_b = multiply_add(shift_b, sum_b, load(tile.weighted + at));
      store(total.weighted + at, multiply_add(factor_a, weighted_a, factor_b * weighted_b));
    }
    // one factor is 1: of the part that keeps its maximum out of the sum; the other's maximum is now in it
    const Floats merged = multiply_add(factor_a, rest_a, factor_b * rest_b);
    store(total.rest + at, merged + smaller(factor_a, factor_b));
    store(total.max + at, max);
  }
}

}  // namespace
}  // namespace grpo
