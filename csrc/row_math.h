// The arithmetic of a row of logits, for host and device: the work of one thread, the merge of partial results, and one
// element of the gradient. All of the row kernels except barriers, copies and launches, so that a CPU can test it.
//
// The same numbers as kernels/rows.py: max and log_sum are kept apart, since their sum would lose log_sum's digits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "objective.h"

#ifdef __CUDACC__
#define GRPO_UNROLL _Pragma("unroll")
#define GRPO_UNROLL_4 _Pragma("unroll 4")
#else
#define GRPO_UNROLL
#define GRPO_UNROLL_4
#endif

namespace grpo {

#ifdef __CUDACC__
using Bf16 = __nv_bfloat16;
using Fp16 = __half;
GRPO_HOST_DEVICE float widen(Bf16 x) { return __bfloat162float(x); }
GRPO_HOST_DEVICE float widen(Fp16 x) { return __half2float(x); }
GRPO_HOST_DEVICE void narrow(float x, Bf16& to) { to = __float2bfloat16_rn(x); }
GRPO_HOST_DEVICE void narrow(float x, Fp16& to) { to = __float2half_rn(x); }
#else
struct Bf16 {
  uint16_t bits;
};
using Fp16 = _Float16;
inline float widen(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float widen(Fp16 x) { return float(x); }
inline void narrow(float x, Bf16& to) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = x != x ? uint16_t(0x7fff) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, Fp16& to) { to = Fp16(x); }
#endif
GRPO_HOST_DEVICE float widen(float x) { return x; }
GRPO_HOST_DEVICE void narrow(float x, float& to) { to = x; }

constexpr float kMinusInfinity = -INFINITY;

// exp for elements, two instructions: below 1e-6 relative where 1 + exp(x) depends on it (|x| < 10), denormals 0.
// Scalars of a row use the exact one.
GRPO_HOST_DEVICE float fast_exp(float x) {
#ifdef __CUDA_ARCH__
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.4426950408889634f));
  return e;
#else
  return std::exp(x);
#endif
}

constexpr int kPacketBytes = 16;  // the widest access of a thread

template <typename T>
constexpr int kPacket = kPacketBytes / int(sizeof(T));

template <typename T>
struct alignas(kPacketBytes) Packet {
  T value[kPacket<T>];
};

// N values from `from`, of which the first `valid` exist; `wide` promises an address that is a multiple of 16 bytes.
template <typename T, int N>
GRPO_HOST_DEVICE void load_values(const T* from, int valid, bool wide, float (&to)[N]) {
  if (wide && valid >= N) {
GRPO_UNROLL
    for (int i = 0; i < N; i += kPacket<T>) {
      const Packet<T> packet = *reinterpret_cast<const Packet<T>*>(from + i);
GRPO_UNROLL
      for (int k = 0; k < kPacket<T>; ++k) to[i + k] = widen(packet.value[k]);
    }
  } else {
GRPO_UNROLL
    for (int i = 0; i < N; ++i) to[i] = i < valid ? widen(from[i]) : 0.0f;
  }
}

template <typename T, int N>
GRPO_HOST_DEVICE void store_values(const float (&from)[N], int valid, bool wide, T* to) {
  if (wide && valid >= N) {
GRPO_UNROLL
    for (int i = 0; i < N; i += kPacket<T>) {
      Packet<T> packet;
GRPO_UNROLL
      for (int k = 0; k < kPacket<T>; ++k) narrow(from[i + k], packet.value[k]);
      *reinterpret_cast<Packet<T>*>(to + i) = packet;
    }
  } else {
GRPO_UNROLL
    for (int i = 0; i < N; ++i) {
      if (i < valid) narrow(from[i], to[i]);
    }
  }
}

// How raw products become z: softcap(logit_scale * (raw + bias)) / temperature.
struct RowTransform {
  const float* bias;  // [V] or null
  float logit_scale;
  float softcap, inv_softcap;  // 0 where there is none
  float inv_temperature;
};

GRPO_HOST_DEVICE bool is_plain(const RowTransform& t) { return t.bias == nullptr && t.softcap == 0.0f; }

// z of N raw values from `column` on, of which the first `valid` exist, and the slopes dz/d(raw); Plain promises
// `is_plain`, which leaves the common case a single multiplication.
template <bool Plain, int N>
GRPO_HOST_DEVICE void to_z(float (&x)[N], float (&slope)[N], int column, int valid, const RowTransform& t) {
  if constexpr (!Plain) {
    if (t.bias != nullptr) {
      GRPO_UNROLL
      for (int i = 0; i < N; ++i) {
        if (i < valid) x[i] += t.bias[column + i];
      }
    }
  }
  const float scale = t.logit_scale * t.inv_temperature;
  if (Plain || t.softcap == 0.0f) {
    GRPO_UNROLL
    for (int i = 0; i < N; ++i) {
      x[i] *= scale;
      slope[i] = scale;
    }
  } else {
    GRPO_UNROLL
    for (int i = 0; i < N; ++i) {
      const float y = x[i] * t.logit_scale * t.inv_softcap, power = std::exp(-2.0f * std::fabs(y));
      x[i] = t.softcap * t.inv_temperature * std::tanh(y);
      slope[i] = scale * (4.0f * power / ((1.0f + power) * (1.0f + power)));  // 1 - tanh^2, without the cancellation
    }
  }
}

// Statistics of some elements of a row: max, sum of exp(z - max) without the 1 of the maximum itself, so that the sum of
// a confident token keeps its digits, and sum of exp(z - max) * (z - max).
struct alignas(16) Partial {
  float max, rest, moment;
};

GRPO_HOST_DEVICE Partial no_elements() { return {kMinusInfinity, 0.0f, 0.0f}; }

// Part `p` as it counts in a row whose maximum is `max`, an element of another part: its own maximum is in the sum.
GRPO_HOST_DEVICE Partial below(const Partial& p, float max) {
  if (!(p.max > kMinusInfinity)) return {max, p.rest, p.moment};  // nothing is in it: 0, or NaN
  const float drop = p.max - max, total = 1.0f + p.rest, shrink = std::exp(drop);
  return {max, total * shrink, (p.moment + total * drop) * shrink};
}

// The part that owns the row's maximum is the first that has it.
GRPO_HOST_DEVICE Partial merge_in_order(const Partial* parts, int count) {
  float max = kMinusInfinity;
  GRPO_UNROLL_4
  for (int i = 0; i < count; ++i) max = std::fmax(max, parts[i].max);
  Partial all = {max, 0.0f, 0.0f};
  bool owned = false;
  GRPO_UNROLL_4
  for (int i = 0; i < count; ++i) {
    const bool owns = !owned && parts[i].max == max;
    const Partial part = owns ? parts[i] : below(parts[i], max);
    owned = owned || owns;
    all.rest += part.rest;
    all.moment += part.moment;
  }
  return all;
}

template <bool WithEntropy, int N>
GRPO_HOST_DEVICE void add_elements(Partial& p, const float (&z)[N]) {
  float top = z[0];
GRPO_UNROLL
  for (int i = 1; i < N; ++i) top = std::fmax(top, z[i]);
  const bool owns = top > p.max;  // rare after the first few
  if (owns) p = below(p, top);
  const float reference = p.max > kMinusInfinity ? p.max : 0.0f;
  float rest = 0.0f, moment = 0.0f, ties = owns ? -1.0f : 0.0f;
GRPO_UNROLL
  for (int i = 0; i < N; ++i) {
    const float shifted = z[i] - reference;
    const float e = fast_exp(shifted);
    const bool at_max = shifted == 0.0f;
    ties += at_max ? 1.0f : 0.0f;
    rest += at_max ? 0.0f : e;
    if constexpr (WithEntropy) moment += e * std::fmax(shifted, kLowestLogp);  // 0 * -inf counts 0
  }
  p.rest += rest + ties;
  p.moment += moment;
}

struct RowStatistics {
  float max, log_sum, logp, entropy;
};

GRPO_HOST_DEVICE RowStatistics finish(const Partial& row, float z_target) {
  const float log_sum = std::log1p(row.rest);
  const float logp = min_or_nan((z_target - row.max) - log_sum, 0.0f);
  return {row.max, log_sum, logp, max_or_nan(log_sum - row.moment / (1.0f + row.rest), 0.0f)};
}

// The terms of the gradient of a row: at columns other than the target (constant - dentropy * log p) * p * slope.
struct RowCoefficients {
  float max, log_sum;
  float constant, dentropy;
  float at_target;  // the target's gradient itself
  int target;
  bool zero;  // no coefficient: the gradient is 0 for any logits
};

// `slope` is dz/d(raw) of the target, whose 1 - p comes from expm1: a confident token keeps its digits.
GRPO_HOST_DEVICE RowCoefficients make_coefficients(const RowStatistics& s, float dlogp, float dentropy, float slope,
                                                   int target) {
  const float entropy = dentropy == 0.0f ? 0.0f : s.entropy;
  const float log_p = max_or_nan(s.logp, kLowestLogp);
  const float at_target = -dlogp * expm1_of(s.logp) - dentropy * std::exp(log_p) * (log_p + entropy);
  return {s.max,    s.log_sum, -dlogp - dentropy * entropy,    dentropy, at_target * slope,
          target,   dlogp == 0.0f && dentropy == 0.0f};
}

// dL/d(raw) of N columns that are not the target, in place of their z.
template <int N>
GRPO_HOST_DEVICE void to_gradient(float (&z)[N], const float (&slope)[N], const RowCoefficients& c) {
  GRPO_UNROLL
  for (int k = 0; k < N; ++k) {
    const float log_p = max_or_nan((z[k] - c.max) - c.log_sum, kLowestLogp);
    z[k] = (c.constant - c.dentropy * log_p) * fast_exp(log_p) * slope[k];
  }
}

// A row of logits.
template <typename T>
struct Row {
  const T* logits;
  int count;
  bool wide;  // it starts at a multiple of 16 bytes
};

struct Thread {
  int index, count;
};

// A thread's share of the statistics of a row, packet by packet.
template <bool Plain, bool WithEntropy, typename T>
GRPO_HOST_DEVICE Partial thread_statistics(const Row<T>& row, Thread thread, const RowTransform& t) {
  constexpr int N = kPacket<T>;
  Partial p = no_elements();
  for (int i = thread.index * N; i < row.count; i += thread.count * N) {
    float z[N], slope[N];
    load_values(row.logits + i, row.count - i, row.wide, z);
    to_z<Plain>(z, slope, i, row.count - i, t);
    if (i + N > row.count) {
      GRPO_UNROLL
      for (int k = 0; k < N; ++k) z[k] = i + k < row.count ? z[k] : kMinusInfinity;
    }
    add_elements<WithEntropy>(p, z);
  }
  return p;
}

// The same with the options as run-time values.
template <typename T>
GRPO_HOST_DEVICE Partial thread_statistics(const Row<T>& row, Thread thread, const RowTransform& t, bool with_entropy) {
  if (is_plain(t)) {
    return with_entropy ? thread_statistics<true, true>(row, thread, t) : thread_statistics<true, false>(row, thread, t);
  }
  return with_entropy ? thread_statistics<false, true>(row, thread, t) : thread_statistics<false, false>(row, thread, t);
}

// A thread's share of the gradient of a row, written to `out`. `loaded()` is called by all threads between the loads and
// the stores of each stride: a barrier if the stores overwrite the logits.
template <bool Plain, typename T, typename Out, typename Loaded>
GRPO_HOST_DEVICE void thread_gradient(const Row<T>& row, Thread thread, const RowTransform& t, const RowCoefficients& c,
                                      Out* out, bool wide_out, Loaded loaded) {
  constexpr int N = kPacket<Out>;
  for (int stride = 0; stride < row.count; stride += thread.count * N) {
    const int i = stride + thread.index * N;
    float d[N] = {}, slope[N];
    if (i < row.count) load_values(row.logits + i, row.count - i, row.wide, d);
    loaded();
    if (i < row.count) {
      to_z<Plain>(d, slope, i, row.count - i, t);
      to_gradient(d, slope, c);
      store_values(d, row.count - i, wide_out, out + i);
    }
  }
  // written again, by the thread that wrote it
  if (c.target >= 0 && c.target / N % thread.count == thread.index) narrow(c.at_target, out[c.target]);
}

template <typename T, typename Out, typename Loaded>
GRPO_HOST_DEVICE void thread_gradient(const Row<T>& row, Thread thread, const RowTransform& t, const RowCoefficients& c,
                                      Out* out, bool wide_out, Loaded loaded) {
  if (is_plain(t)) {
    thread_gradient<true>(row, thread, t, c, out, wide_out, loaded);
  } else {
    thread_gradient<false>(row, thread, t, c, out, wide_out, loaded);
  }
}

// A gradient of zeros: a row without a coefficient is not read.
template <typename Out>
GRPO_HOST_DEVICE void thread_zeros(int count, Thread thread, Out* out, bool wide_out) {
  constexpr int N = kPacket<Out>;
  float zero[N] = {};
  for (int i = thread.index * N; i < count; i += thread.count * N) store_values(zero, count - i, wide_out, out + i);
}

}  // namespace grpo
