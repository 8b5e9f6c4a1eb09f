// Row work on a tile of [rows of the vocabulary, 64 tokens] while it is in cache, and the packing of operands.
#pragma once

#include <cstdint>

#include "gemm.h"
#include "numbers.h"

namespace grpo {

// The content of an operand's words. `pieces`: three bf16 numbers that sum to an fp32 one, to its last bit if it is above
// 1e-33, so that products of bf16 can take its place.
enum class Operand { fp32, bf16, pieces };

inline int64_t per_word(Operand kind) { return kind == Operand::fp32 ? 1 : 2; }
inline int64_t pieces_of(Operand kind) { return kind == Operand::pieces ? 3 : 1; }

// Rows of a matrix; each is contiguous, and they are `stride` items apart.
struct WeightRows {
  const void* data;
  Dtype dtype;
  int64_t columns, stride;
  const float* scale = nullptr;  // [rows, groups] of `columns / groups` neighbours each; or nullptr
  int64_t groups = 1;
  const float* codes = nullptr;  // [16]: what half a byte stands for, the upper half first
  Dtype rounded = Dtype::fp32;   // what numbers, or their products with scales, are rounded to first

  // Whether the numbers are in memory as the products take them.
  bool holds(Dtype compute) const {
    return dtype == compute && scale == nullptr && (rounded == compute || rounded == Dtype::fp32);
  }
  const void* row(int64_t index) const { return static_cast<const char*>(data) + index * stride * item_bytes(dtype); }
  WeightRows from(int64_t index) const {
    return {row(index), dtype, columns, stride, scale == nullptr ? nullptr : scale + index * groups, groups, codes,
            rounded};
  }
};

// z = softcap(scale * (row_scale * product + bias)) / temperature
struct Transform {
  const float* row_scale;  // [rows] of the tile, or nullptr
  const float* bias;  // [rows] of the tile, or nullptr
  float scale;
  float softcap;                     // 0: none
  const float* inverse_temperature;  // [64]
  const float* most;                 // [rows, 64]: z is at most this; or nullptr
};

// Statistics of one tile, or of the tiles merged so far, [64] each.
struct TileStatistics {
  float* max;
  float* rest;      // sum of exp(z - max) without the 1 of the maximum itself; -1 where all is -inf
  float* weighted;  // of exp(z - max) * (z - max), or nullptr
};

// Inputs of the gradient for 64 tokens, [64] each. `scale`: logit scale / temperature.
struct GradientLanes {
  const float* offset;       // the maximum that the kept exponentials were taken against
  const float* max;
  const float* log_sum;
  const float* temperature;
  const float* minus_dlogp;     // -dL/dlogp * scale
  const float* minus_dentropy;  // -dL/dH * scale, or nullptr
  const float* entropy;
  const float* target_value;    // dL/d(product) at the target
  const int32_t* target;        // row of the tile that is the target; out of range for most tokens
  float softcap;                // 0: none
  const float* row_scale;       // [rows] of the tile, or nullptr: see Transform
};

// A row of logits: its maximum, the sum of exp(z - max) without the maximum's own 1, and that of exp(z - max) (z - max).
struct RowSums {
  float max;
  double rest, weighted;
};

// log p = (z - max) - log_sum
struct LogNormalizer {
  float max, log_sum;
};

// Where an operand is written: words from row to row, and from piece to piece.
struct Packed {
  uint32_t* words;
  int64_t stride, piece;
};

// Row work, packing and products: written once, in kernels/, and compiled for each instruction set.
struct Kernels {
  // The product of fp32 words.
  Gemm multiply;

  // Turn raw products [rows, 64] into z where they stand, with their statistics; `kept` (nullptr: not wanted) receives
  // exp(z - max) [rows, 64] in fp32 or bf16.
  void (*score_tile)(float* z, int64_t rows, const Transform& transform, const TileStatistics& out, Dtype kept_dtype,
                     void* kept);

  // total = total and tile together, in this order.
  void (*merge_tile)(const TileStatistics& total, const TileStatistics& tile);

  // dL/d(row_scale * product) of a tile from its kept exponentials [rows, 64 lanes with `stride` elements a row].
  // `across` (words of nullptr: not wanted): times row_scale, row-major over tokens: a of the dW product.
  // `along` (the same): times row_scale, [rows in words, 64]; its transpose is a of the dH product.
  // `row_sums` (nullptr: not wanted): sums over the tokens are added, [rows].
  void (*gradient_tile)(const void* kept, Dtype kept_dtype, int64_t stride, int64_t rows, Operand kind,
                        const GradientLanes& lanes, Packed across, Packed along, float* row_sums);

  // Append the lanes of `mask` of each row [rows, 64] to rows of `out`; each row may be written up to 64 elements
  // beyond.
  void (*compress_tile)(const void* tile, int64_t rows, Dtype dtype, uint64_t mask, void* out, int64_t out_stride);

  // The first rows, rounded to `compute` and written as words; zeros up to `words` a row, and a piece. The columns may
  // be odd.
  void (*pack_rows)(const WeightRows& source, int64_t rows, Dtype compute, Operand kind, Packed out, int64_t words);

  // out [depth words][64] = the transpose of 64 packed rows [64][stride]; depth and stride are multiples of 16 words.
  void (*transpose_panel)(const uint32_t* rows, int64_t stride, int64_t depth, uint32_t* out);

  // out [rows in words][64] = columns [first, first + 64) of packed rows of so many words, neighbouring rows in a word;
  // zeros after the last column. words: a multiple of 16.
  void (*interleave_panel)(const uint32_t* rows, int64_t count, int64_t stride, int64_t first, int64_t words,
                           Operand kind, uint32_t* out);

  // A panel of dW [rows, 64] (stride 64) rounded into `columns` columns of the result.
  void (*store_gradient)(const float* panel, int64_t rows, int64_t columns, Dtype dtype, void* out,
                         int64_t out_stride);

  // out [tokens][rows] = the transpose of a tile [rows, 64], of which the first `tokens` lanes are taken, bit by bit.
  void (*transpose_tile)(const float* tile, int64_t rows, int64_t tokens, float* out, int64_t out_stride);

  // The product of two rows, and out += factor * x.
  float (*row_product)(Dtype dtype, const void* a, const void* b, int64_t columns);
  void (*add_row)(Dtype dtype, float* out, const void* x, float factor, int64_t columns);

  // All logits of a row, one after the other.
  void (*row_sums)(const float* z, int64_t columns, bool with_entropy, RowSums* out);

  // KL of the first distribution from the second: forward (w's from z's), or reverse. `w` becomes x, where
  // dKL/dz = x - softmax(z) * sum of x.
  double (*row_divergence)(const float* z, float* w, int64_t columns, bool forward, const LogNormalizer& own,
                           const LogNormalizer& other, double* sum_of_x);

  // x = factor * dKL/dz + dlogp * d(log-prob of the target)/dz; at the target the latter is `at_target`; -1: none.
  void (*row_derivative)(const float* z, float* x, int64_t columns, const LogNormalizer& own, float sum_of_x,
                         float factor, float dlogp, int64_t target, float at_target);
};

extern const Kernels kernels_bf16, kernels_avx512, kernels_avx2;

}  // namespace grpo
