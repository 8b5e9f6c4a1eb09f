// Rows of logits of two heads: statistics, a KL divergence, and its derivative.
#pragma once

namespace grpo {
namespace {

constexpr int64_t kSum = 4096;  // columns that are summed in fp32, before they are added in fp64
constexpr float kImpossible = -__builtin_inff();  // beyond a row's end: below the maximum of any row

// f(first column, number of columns) for each vector of a part of a row.
template <class F>
void for_vectors(int64_t begin, int64_t end, F&& f) {
  int64_t at = begin;
  for (; at + kWidth <= end; at += kWidth) f(at, kWidth);
  if (at < end) f(at, end - at);
}

// The first `count` numbers, then `rest`.
inline Floats load_or(const float* from, int64_t count, float rest) {
  if (count >= kWidth) return load(from);
  float lanes[kWidth];
  for (int i = 0; i < kWidth; i++) lanes[i] = i < count ? from[i] : rest;
  return load(lanes);
}

inline Floats absolute(Floats x) { return (Floats)((Words)x & all_words(0x7fffffff)); }
inline Floats with_sign_of(Floats x, Floats sign) { return (Floats)((Words)x | ((Words)sign & all_words(0x80000000))); }

// 1 - exp(-x) for x >= 0, relative to itself.
inline Floats one_minus_exp(Floats x) {
  Floats y = all(-1.0f / 40320);
  y = multiply_add(y, x, all(1.0f / 5040));
  y = multiply_add(y, x, all(-1.0f / 720));
  y = multiply_add(y, x, all(1.0f / 120));
  y = multiply_add(y, x, all(-1.0f / 24));
  y = multiply_add(y, x, all(1.0f / 6));
  y = multiply_add(y, x, all(-0.5f));
  y = multiply_add(y * x, x, x);
  return select(equal(smaller(x, all(0.5f)), x), y, all(1.0f) - exp_nonpositive(all(0.0f) - x));
}

void row_sums(const float* z, int64_t columns, bool with_entropy, RowSums* out) {
  Floats best = all(kLowest);
  for_vectors(0, columns, [&](int64_t at, int64_t count) { best = larger(best, load_or(z + at, count, kImpossible)); });
  float lanes[kWidth], max = kLowest;
  store(lanes, best);
  for (const float x : lanes) max = x > max ? x : max;
  double rest = -1.0, weighted = 0.0;  // the maximum's own 1 stays out of the sum
  for (int64_t first = 0; first < columns; first += kSum) {
    Floats sum = all(0.0f), ties = all(0.0f), moment = all(0.0f);
    for_vectors(first, first + kSum < columns ? first + kSum : columns, [&](int64_t at, int64_t count) {
      const Floats shifted = load_or(z + at, count, kImpossible) - all(max);
      const Floats e = exp_nonpositive(shifted);
      const Mask at_max = equal(shifted, all(0.0f));
      sum = add_where_not(at_max, sum, e);
      ties = add_where(at_max, ties, all(1.0f));
      if (with_entropy) moment = multiply_add(e, larger(all(kLowestLogp), shifted), moment);
    });
    rest += sum_of(sum);
    rest += sum_of(ties);
    weighted += sum_of(moment);
  }
  *out = {max, rest, weighted};
}

double row_divergence(const float* z, float* w, int64_t columns, bool forward, const LogNormalizer& own,
                      const LogNormalizer& other, double* derivatives) {
  const float offset = (own.max - other.max) + (own.log_sum - other.log_sum);
  double value = 0.0, total = 0.0;
  for (int64_t first = 0; first < columns; first += kSum) {
    Floats values = all(0.0f), sum = all(0.0f);
    for_vectors(first, first + kSum < columns ? first + kSum : columns, [&](int64_t at, int64_t count) {
      const Floats a = load_or(z + at, count, kImpossible), b = load_or(w + at, count, kImpossible);
      Floats r = forward ? (b - a) + all(offset) : (a - b) - all(offset);
      r = select(unordered(r), all(0.0f), r);  // 0 in both
      r = larger(all(kLowestLogp), r);
      const Floats p = exp_nonpositive((a - all(own.max)) - all(own.log_sum));
      const Floats q = exp_nonpositive((b - all(other.max)) - all(other.log_sum));
      const Floats top = select(unordered(p), p, larger(p, q));  // NaN in either comes through
      const Floats v = with_sign_of(one_minus_exp(absolute(r)), r);
      values = multiply_add(multiply_add(smaller(all(0.0f), r), v, r - v), top, values);
      const Floats x = forward ? all(0.0f) - v * top : r * p;
      sum = sum + x;
      store_first(w + at, count, x);
    });
    value += sum_of(values);
    total += sum_of(sum);
  }
  *derivatives = total;
  return value;
}

void row_derivative(const float* z, float* x, int64_t columns, const LogNormalizer& own, float total, float factor,
                    float dlogp, int64_t target, float at_target) {
  int64_t largest = 0;
  while (largest + 1 < columns && z[largest] != own.max) largest++;
  // derivatives of a row sum to 0: the largest one is computed from the others, so that a confident token is accurate
  double others = 0.0;
  float own_p = 0.0f, of_target = 0.0f;
  for (int64_t first = 0; first < columns; first += kSum) {
    Floats sum = all(0.0f);
    for_vectors(first, first + kSum < columns ? first + kSum : columns, [&](int64_t at, int64_t count) {
      const Floats p = exp_nonpositive((load_or(z + at, count, kImpossible) - all(own.max)) - all(own.log_sum));
      Floats d = minus_multiply_add(p, all(total), load_or(x + at, count, 0.0f));
      const bool has_largest = at <= largest && largest < at + count, has_target = at <= target && target < at + count;
      if (has_largest || has_target) {
        float lanes[kWidth], ps[kWidth];
        store(lanes, d);
        store(ps, p);
        if (has_target) of_target = lanes[target - at];
        if (has_largest) {
          own_p = ps[largest - at];
          lanes[largest - at] = 0.0f;
        }
        d = load(lanes);
      }
      sum = sum + d;
      store_first(x + at, count, minus_multiply_add(p, all(dlogp), d * all(factor)));
    });
    others += sum_of(sum);
  }
  const float of_largest = static_cast<float>(-others);
  x[largest] = factor * of_largest - dlogp * own_p;
  if (target >= 0) x[target] = factor * (target == largest ? of_largest : of_target) + at_target;
}

}  // namespace
}  // namespace grpo
