// Functions of vectors, of either width.
#pragma once

namespace grpo {
namespace {

// exp is 0 in fp32 from here on.
constexpr float kLowestExponent = -110.0f;

// exp(x) for x <= 0, to 1 ulp; 0 below -104, NaN for NaN.
inline Floats exp_nonpositive(Floats x) {
  x = larger(all(kLowestExponent), x);
  const Floats n = rounded(x * all(1.44269504f));
  Floats r = minus_multiply_add(n, all(0.693359375f), x);
  r = minus_multiply_add(n, all(-2.12194440e-4f), r);
  Floats y = all(1.9875691500e-4f);
  y = multiply_add(y, r, all(1.3981999507e-3f));
  y = multiply_add(y, r, all(8.3334519073e-3f));
  y = multiply_add(y, r, all(4.1665795894e-2f));
  y = multiply_add(y, r, all(1.6666665459e-1f));
  y = multiply_add(y, r, all(5.0000001201e-1f));
  y = multiply_add(r * r, y, r + all(1.0f));
  return times_power_of_2(y, n);
}

// log(x) for normal x > 0, to about 1 ulp.
inline Floats log_positive(Floats x) {
  // mantissa in [0.75, 1.5), so that the logarithm of 1 is exactly 0 and nothing cancels near it
  const Words above = ((Words)x - all_words(0x3f400000)) & all_words(0xff800000);
  const Floats mantissa = (Floats)((Words)x - above);
  const Floats exponent = from_int(above) * all(1.0f / (1 << 23));
  const Floats r = mantissa - all(1.0f);
  const Floats square = r * r;
  Floats y = all(7.0376836292e-2f);
  y = multiply_add(y, r, all(-1.1514610310e-1f));
  y = multiply_add(y, r, all(1.1676998740e-1f));
  y = multiply_add(y, r, all(-1.2420140846e-1f));
  y = multiply_add(y, r, all(1.4249322787e-1f));
  y = multiply_add(y, r, all(-1.6668057665e-1f));
  y = multiply_add(y, r, all(2.0000714765e-1f));
  y = multiply_add(y, r, all(-2.4999993993e-1f));
  y = multiply_add(y, r, all(3.3333331174e-1f));
  y = (y * square) * r;
  y = multiply_add(exponent, all(-2.12194440e-4f), y);
  y = minus_multiply_add(all(0.5f), square, y);
  return multiply_add(exponent, all(0.693359375f), r + y);
}

// tanh(x), to 2e-7 of itself: near 0 by a polynomial (of Cephes), since 1 - t would lose its digits.
inline Floats tanh_of(Floats x) {
  const Words sign = (Words)x & all_words(0x80000000);
  const Floats magnitude = (Floats)((Words)x ^ sign), square = x * x;
  const Floats t = exp_nonpositive(magnitude * all(-2.0f));
  const Floats far = (Floats)((Words)((all(1.0f) - t) / (all(1.0f) + t)) | sign);
  Floats y = all(-5.70498872745e-3f);
  y = multiply_add(y, square, all(2.06390887954e-2f));
  y = multiply_add(y, square, all(-5.37397155531e-2f));
  y = multiply_add(y, square, all(1.33314422036e-1f));
  y = multiply_add(y, square, all(-3.33332819422e-1f));
  const Mask is_near = equal(smaller(all(0.625f), magnitude), magnitude);
  return select(is_near, multiply_add(y * square, x, x), far);
}

inline Floats from_bf16(Halves x) { return (Floats)(widen(x) << 16); }

#ifndef GRPO_AVX512_BF16
// fp32 numbers rounded to bf16 (nearest even); NaN stays NaN.
inline Halves to_bf16(Floats x) {
  const Words bits = (Words)x;
  const Words rounded = (bits + ((bits >> 16 & all_words(1)) + all_words(0x7fff))) >> 16;
  return narrow(select(unordered(x), all_words(0x7fc0), rounded));
}
#endif

// Takes the next bf16 piece from x, of which the rest stays: NaN, if the piece is not finite.
inline Halves take_piece(Floats& x) {
  const Halves piece = to_bf16(x);
  x = x - from_bf16(piece);
  return piece;
}

// fp8 with 4 bits of exponent (e4m3fn: no infinity; all other bits set is NaN), by way of fp16, whose exponents are 8 larger.
inline Floats from_fp8(Bytes x) {
  const Words bits = widen(x), magnitude = bits & all_words(0x7f);
  const Floats number = from_fp16(narrow((bits & all_words(0x80)) << 8 | magnitude << 7)) * all(256.0f);
  return select(equal(magnitude, all_words(0x7f)), (Floats)all_words(0x7fc00000), number);
}

// A vector of numbers of any type, of which `count` are there: see `load_first`.
inline __attribute__((always_inline)) Floats load_as(const void* from, Dtype dtype, int64_t at, int64_t count) {
  switch (dtype) {
    case Dtype::fp32: return load_first(static_cast<const float*>(from) + at, count);
    case Dtype::bf16: return from_bf16(load_first(static_cast<const uint16_t*>(from) + at, count));
    case Dtype::int8: return from_int8(load_first(static_cast<const uint8_t*>(from) + at, count));
    case Dtype::fp8: return from_fp8(load_first(static_cast<const uint8_t*>(from) + at, count));
    default: return from_fp16(load_first(static_cast<const uint16_t*>(from) + at, count));
  }
}

}  // namespace
}  // namespace grpo
