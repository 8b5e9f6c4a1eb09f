// Products of a few rows x some vectors of lanes in registers.
#pragma once

namespace grpo {
namespace {

// Depth summed in one go, then added to what is there: a chain of roundings is as long as a slice and as the number of
// slices, not as the vocabulary. Measured (fp32, H = 896, V = 32000; the library's products make 3.1e-6 and 7e-7):
// |dlogp| 6.9e-6 in one chain, 5.0e-6 with 512, 2.0e-6 with 256, 1.9e-6 with 128; dH 3.4e-6, 1.0e-6, 0.8e-6, 0.7e-6 off.
// Time (shortest calls): as one chain within 2 %; with 128, 2 to 6 % more.
constexpr int64_t kDepth = 256;

constexpr int64_t kLine = 16;  // words of a cache line

struct Fp32 {
  static inline __attribute__((always_inline)) Floats step(Words a, Words b, Floats sum) {
    return multiply_add((Floats)a, (Floats)b, sum);
  }
};

// At each step a line of `later` is fetched to the second-level cache.
template <int Rows, int Vectors, class Element>
inline __attribute__((always_inline)) void rows_of(int64_t depth, const uint32_t* a, int64_t lda, const uint32_t* b,
                                                   const uint32_t* later, float* c, bool add) {
  Floats sum[Rows][Vectors];
#pragma GCC unroll 6
  for (int i = 0; i < Rows; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; j++) sum[i][j] = all(0.0f);
  }
  if (add) {
#pragma GCC unroll 6
    for (int i = 0; i < Rows; i++) {
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; j++) __builtin_prefetch(c + i * kLanes + kWidth * j, 1);
    }
  }
  for (int64_t k = 0; k < depth; k++) {
    __builtin_prefetch(later + k * kLine, 0, 2);
    Words right[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; j++) right[j] = load(b + k * kLanes + kWidth * j);
#pragma GCC unroll 6
    for (int i = 0; i < Rows; i++) {
      const Words left = all_words(a[i * lda + k]);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; j++) sum[i][j] = Element::step(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Rows; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; j++) {
      float* to = c + i * kLanes + kWidth * j;
      store(to, add ? load(to) + sum[i][j] : sum[i][j]);
    }
  }
}

// The next slice of b, or the next panel of tokens, follows in memory. It is fetched while this slice is multiplied, a
// quarter in each of four groups of rows. Measured (fp32, AVX-512, 2 cores, medians of 6 processes): loss and gradients take
// 0.95 x the time at N = 1024, H = 896, V = 151936, and 0.93 x at 2048, 2048, 32000.
template <int Vectors, class Element>
inline __attribute__((always_inline)) void rows_of_slice(int64_t rows, int64_t length, const uint32_t* left,
                                                         int64_t lda, const uint32_t* slice, const uint32_t* next,
                                                         float* to, bool adds) {
  int64_t i = 0;
  for (; i + kProductRows <= rows; i += kProductRows) {
    const uint32_t* later = next + i / kProductRows % (kLanes / kLine) * length * kLine;
    rows_of<kProductRows, Vectors, Element>(length, left + i * lda, lda, slice, later, to + i * kLanes, adds);
  }
  left += i * lda, to += i * kLanes;
  switch (rows - i) {
    case 5: rows_of<5, Vectors, Element>(length, left, lda, slice, next, to, adds); break;
    case 4: rows_of<4, Vectors, Element>(length, left, lda, slice, next, to, adds); break;
    case 3: rows_of<3, Vectors, Element>(length, left, lda, slice, next, to, adds); break;
    case 2: rows_of<2, Vectors, Element>(length, left, lda, slice, next, to, adds); break;
    case 1: rows_of<1, Vectors, Element>(length, left, lda, slice, next, to, adds); break;
    default: break;
  }
}

template <class Element>
inline __attribute__((always_inline)) void multiply(int64_t rows, int64_t depth, Left a, Right b, float* c,
                                                    bool add) {
  constexpr int64_t kStep = kProductVectors * kWidth;
  int64_t k = 0;
  do {
    const int64_t length = depth - k < kDepth ? depth - k : kDepth;
    const bool adds = add || k > 0;
    const uint32_t* const slice = b.words + k * kLanes;
    const uint32_t *const next = slice + length * kLanes, *const left = a.words + k;
    for (int64_t lane = 0; lane < b.lanes; lane += kStep) {
      const int64_t lanes = b.lanes - lane;
      if (2 * lanes > kStep) {
        rows_of_slice<kProductVectors, Element>(rows, length, left, a.stride, slice + lane, next, c + lane, adds);
      } else if (lanes > kWidth) {
        rows_of_slice<kProductVectors / 2, Element>(rows, length, left, a.stride, slice + lane, next, c + lane, adds);
      } else {
        rows_of_slice<1, Element>(rows, length, left, a.stride, slice + lane, next, c + lane, adds);
      }
    }
    k += kDepth;
  } while (k < depth);
}

void multiply_fp32(int64_t rows, int64_t depth, Left a, Right b, float* c, bool add, Ahead) {
  multiply<Fp32>(rows, depth, a, b, c, add);
}

}  // namespace
}  // namespace grpo
