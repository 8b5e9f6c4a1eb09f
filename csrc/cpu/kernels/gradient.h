// dL/d(product) of a tile from the exponentials that scoring kept, in the two orders that the gradient products read.
#pragma once

namespace grpo {
namespace {

constexpr float kTiny = 1.17549435e-38f;

// One vector of tokens: a probability is exponential * factor.
struct Vector {
  Floats factor, log_factor, minus_dlogp, minus_dentropy, entropy, target_value, offset, per_cap;
  Words target;
};

// Dense: neither entropy gradient nor softcap, so that a gradient is one multiplication.
template <bool Dense>
inline Floats gradient_of(Floats e, const Vector& v, bool with_entropy, bool with_softcap, int64_t row) {
  Floats dz;
  if constexpr (Dense) {
    dz = e * v.factor;
  } else {
    const Floats log_e = log_positive(larger(all(kTiny), e));
    Floats slope = v.minus_dlogp;
    if (with_entropy) {
      const Floats information = (log_e + v.log_factor) + v.entropy;
      slope = multiply_add(v.minus_dentropy, information, slope);
    }
    dz = (e * v.factor) * slope;
    if (with_softcap) {
      const Floats capped = larger(all(-1.0f), (log_e + v.offset) * v.per_cap);
      dz = dz * minus_multiply_add(capped, capped, all(1.0f));
    }
  }
  return select(equal(v.target, all_words(static_cast<uint32_t>(row))), v.target_value, dz);
}

template <Dtype Kept>
inline Floats load_kept(const void* kept, int64_t at) {
  if constexpr (Kept == Dtype::bf16) {
    return from_bf16(load(static_cast<const uint16_t*>(kept) + at));
  } else {
    return load(static_cast<const float*>(kept) + at);
  }
}

// The constants of a vector of tokens.
Vector vector_of(const GradientLanes& lanes, int64_t lane, bool dense) {
  const bool with_entropy = lanes.minus_dentropy != nullptr, with_softcap = lanes.softcap != 0.0f;
  Vector v;
  v.offset = load(lanes.offset + lane);
  // bounded, as in exp: a tile without a finite logit has the lowest offset, whose products would overflow
  v.log_factor = larger(all(kLowestExponent), (v.offset - load(lanes.max + lane)) - load(lanes.log_sum + lane));
  v.minus_dlogp = load(lanes.minus_dlogp + lane);
  v.factor = exp_nonpositive(v.log_factor);
  if (dense) v.factor = v.factor * v.minus_dlogp;
  v.minus_dentropy = with_entropy ? load(lanes.minus_dentropy + lane) : all(0.0f);
  v.entropy = with_entropy ? load(lanes.entropy + lane) : all(0.0f);
  v.per_cap = with_softcap ? load(lanes.temperature + lane) / all(lanes.softcap) : all(0.0f);
  v.target_value = load(lanes.target_value + lane);
  v.target = load(reinterpret_cast<const uint32_t*>(lanes.target + lane));
  return v;
}

template <bool Dense, Operand Kind, Dtype Kept>
void tile(const void* kept, int64_t stride, int64_t rows, const GradientLanes& lanes, Packed across, Packed along,
          float* row_sums) {
  const bool with_entropy = lanes.minus_dentropy != nullptr, with_softcap = lanes.softcap != 0.0f;
  Vector vectors[kVectors];
  for (int j = 0; j < kVectors; j++) vectors[j] = vector_of(lanes, kWidth * j, Dense);
  const auto at = [&](int64_t row, int j) __attribute__((always_inline)) {
    const Floats e = load_kept<Kept>(kept, row * stride + kWidth * j);
    return gradient_of<Dense>(e, vectors[j], with_entropy, with_softcap, row);
  };
  for (int64_t r = 0; r < rows; r += per_word(Kind)) {
    // as in packing; where exponentials are not in the cache, this work takes 0.75 x the time
    for (int64_t line = 0; line < kLanes * item_bytes(Kept) * per_word(Kind); line += 64) {
      __builtin_prefetch(static_cast<const char*>(kept) + r * stride * item_bytes(Kept) + kAheadBytes + line);
    }
    const bool paired = Kind != Operand::fp32 && r + 1 < rows;
    const Floats scale = all(lanes.row_scale == nullptr ? 1.0f : lanes.row_scale[r]);
    const Floats next_scale = all(lanes.row_scale == nullptr || !paired ? 1.0f : lanes.row_scale[r + 1]);
    Floats sum = all(0.0f), next_sum = all(0.0f);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; j++) {
      const int64_t lane = kWidth * j;
      Floats first = at(r, j);
      sum = sum + first;
      first = first * scale;
      if constexpr (Kind == Operand::fp32) {
        if (across.words != nullptr) store(across.words + r * across.stride + lane, (Words)first);
        if (along.words != nullptr) store(along.words + r * along.stride + lane, (Words)first);
      } else {
        Floats second = paired ? at(r + 1, j) : all(0.0f);
        next_sum = next_sum + second;
        second = second * next_scale;
        for (int64_t p = 0; p < pieces_of(Kind); p++) {
          const Halves low = take_piece(first), high = take_piece(second);
          if (along.words != nullptr) {
            store(along.words + r / 2 * along.stride + p * along.piece + lane, in_pairs(low, high));
          }
          if (across.words != nullptr) {
            uint32_t* to = across.words + r * across.stride + p * across.piece + lane / 2;
            store(reinterpret_cast<uint16_t*>(to), low);
            if (paired) store(reinterpret_cast<uint16_t*>(to + across.stride), high);
          }
        }
      }
    }
    if (row_sums != nullptr) {
      row_sums[r] += sum_of(sum);
      if (paired) row_sums[r + 1] += sum_of(next_sum);
    }
  }
}

template <Operand Kind, Dtype Kept>
constexpr auto tile_of(bool dense) {
  return dense ? tile<true, Kind, Kept> : tile<false, Kind, Kept>;
}

void gradient_tile(const void* kept, Dtype dtype, int64_t stride, int64_t rows, Operand kind,
                   const GradientLanes& lanes, Packed across, Packed along, float* row_sums) {
  const bool dense = lanes.minus_dentropy == nullptr && lanes.softcap == 0.0f;
  auto work = dtype == Dtype::bf16 ? tile_of<Operand::fp32, Dtype::bf16>(dense)
                                   : tile_of<Operand::fp32, Dtype::fp32>(dense);
  if constexpr (kHasPairs) {
    if (kind == Operand::bf16) work = tile_of<Operand::bf16, Dtype::bf16>(dense);
    if (kind == Operand::pieces) work = tile_of<Operand::pieces, Dtype::fp32>(dense);
  }
  work(kept, stride, rows, lanes, across, along, row_sums);
}

void compress_tile(const void* tile, int64_t rows, Dtype dtype, uint64_t mask, void* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t to = r * out_stride;
    for (int j = 0; j < kVectors; j++) {
      const uint32_t taken = mask >> (kWidth * j) & ((1u << kWidth) - 1);
      const int64_t from = r * kLanes + kWidth * j;
      if (dtype == Dtype::bf16) {
        const Words x = widen(load(static_cast<const uint16_t*>(tile) + from));
        store(static_cast<uint16_t*>(out) + to, narrow(compressed(taken, x)));
      } else {
        store(static_cast<uint32_t*>(out) + to, compressed(taken, load(static_cast<const uint32_t*>(tile) + from)));
      }
      to += __builtin_popcount(taken);
    }
  }
}

}  // namespace
}  // namespace grpo
