// Products of pairs of rows, and weighted sums of rows, for tokens that have a candidate set.
#pragma once

namespace grpo {
namespace {

// Four sums side by side, since a sum waits for the one before; always added up in the same order.
template <Dtype Kind>
float dot(const void* a, const void* b, int64_t columns) {
  Floats sums[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
  const auto add = [&](int j, int64_t at, int64_t count) __attribute__((always_inline)) {
    sums[j] = multiply_add(load_as(a, Kind, at, count), load_as(b, Kind, at, count), sums[j]);
  };
  int64_t at = 0;
  for (; at + 4 * kWidth <= columns; at += 4 * kWidth) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) add(j, at + kWidth * j, kWidth);
  }
  if (at < columns) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) add(j, at + kWidth * j, columns - at - kWidth * j);
  }
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <Dtype Kind>
void add(float* out, const void* x, float factor, int64_t columns) {
  const auto add_at = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
    store_first(out + at, count, multiply_add(all(factor), load_as(x, Kind, at, count), load_first(out + at, count)));
  };
  int64_t at = 0;
  for (; at + kWidth <= columns; at += kWidth) add_at(at, kWidth);
  if (at < columns) add_at(at, columns - at);
}

float row_product(Dtype dtype, const void* a, const void* b, int64_t columns) {
  switch (dtype) {
    case Dtype::fp32: return dot<Dtype::fp32>(a, b, columns);
    case Dtype::bf16: return dot<Dtype::bf16>(a, b, columns);
    default: return dot<Dtype::fp16>(a, b, columns);
  }
}

void add_row(Dtype dtype, float* out, const void* x, float factor, int64_t columns) {
  switch (dtype) {
    case Dtype::fp32: return add<Dtype::fp32>(out, x, factor, columns);
    case Dtype::bf16: return add<Dtype::bf16>(out, x, factor, columns);
    default: return add<Dtype::fp16>(out, x, factor, columns);
  }
}

}  // namespace
}  // namespace grpo
