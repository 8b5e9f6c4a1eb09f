// Operands in the order that the products read them, packed outside of their inner loops.
#pragma once

namespace grpo {
namespace {

inline Floats rounded_to(Floats x, Dtype compute) {
  switch (compute) {
    case Dtype::fp32: return x;
    case Dtype::bf16: return from_bf16(to_bf16(x));
    default: return from_fp16(to_fp16(x));
  }
}

// Transpose kWidth x kWidth words.
inline void transpose_words(const uint32_t* from, int64_t stride, uint32_t* to, int64_t out_stride) {
  Words block[kWidth];
  for (int i = 0; i < kWidth; i++) block[i] = load(from + i * stride);
  transpose(block);
  for (int i = 0; i < kWidth; i++) store(to + i * out_stride, block[i]);
}

// A page: the processor's own fetching ends at each. Without it packing takes 2.7 x the time (a weight in fp32, AMX).
constexpr int64_t kAheadBytes = 4096;

// `pack_rows` for one type of source and one kind of operand: with these choices inside the loop it takes 3 x the time
// (int8 to bf16).
template <Dtype From, Operand Kind>
void pack(const WeightRows& source, int64_t rows, Dtype compute, Packed out, int64_t words) {
  const Dtype between = source.rounded == compute ? Dtype::fp32 : source.rounded;  // rounded at the end
  const int64_t depth = source.columns, group = depth / source.groups, item = item_bytes(From);
  constexpr int64_t kNumbers = kWidth * (Kind == Operand::fp32 ? 1 : 2);
  for (int64_t r = 0; r < rows; r++) {
    uint32_t* to = out.words + r * out.stride;
    const void* from = source.row(r);
    Floats scale = all(1.0f);
    const auto numbers = [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      Floats x;
      if constexpr (From == Dtype::half_bytes) {
        x = from_half_bytes(static_cast<const uint8_t*>(from) + k / 2, source.codes, count);
      } else {
        x = load_as(from, From, k, count);
      }
      if (source.scale != nullptr) x = x * scale;
      if (between != Dtype::fp32) x = rounded_to(x, between);
      return Kind == Operand::bf16 || compute == Dtype::fp32 ? x : rounded_to(x, compute);
    };
    // as many numbers as a vector of words holds
    const auto pack = [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      for (int64_t line = 0; line < kNumbers * item; line += 64) {
        __builtin_prefetch(static_cast<const char*>(from) + k * item + kAheadBytes + line);
      }
      Floats x = numbers(k, count);
      if constexpr (Kind == Operand::fp32) {
        store(to + k, (Words)x);
      } else {
        Floats y = numbers(k + kWidth, count - kWidth);
        for (int64_t p = 0; p < pieces_of(Kind); p++) {
          const Halves low = take_piece(x), high = take_piece(y);
          store(to + p * out.piece + k / 2, joined(low, high));
        }
      }
    };
    int64_t k = 0;
    for (int64_t g = 0; g < source.groups; g++) {
      if (source.scale != nullptr) scale = all(source.scale[r * source.groups + g]);
      for (; k + kNumbers <= (g + 1) * group; k += kNumbers) pack(k, kNumbers);
    }
    for (; k < words * per_word(Kind); k += kNumbers) pack(k, depth - k);  // the source may end here
  }
}

template <Operand Kind>
constexpr auto pack_of(Dtype from) {
  switch (from) {
    case Dtype::fp32: return pack<Dtype::fp32, Kind>;
    case Dtype::bf16: return pack<Dtype::bf16, Kind>;
    case Dtype::fp16: return pack<Dtype::fp16, Kind>;
    case Dtype::int8: return pack<Dtype::int8, Kind>;
    case Dtype::fp8: return pack<Dtype::fp8, Kind>;
    default: return pack<Dtype::half_bytes, Kind>;
  }
}

void pack_rows(const WeightRows& source, int64_t rows, Dtype compute, Operand kind, Packed out, int64_t words) {
  const int64_t bytes = source.columns * item_bytes(source.dtype);
  const bool same_words = source.holds(compute) && kind != Operand::pieces &&
                          item_bytes(compute) * per_word(kind) == 4;
  if (same_words) {
    for (int64_t r = 0; r < rows; r++) {
      char* to = reinterpret_cast<char*>(out.words + r * out.stride);
      __builtin_memcpy(to, source.row(r), bytes);
      __builtin_memset(to + bytes, 0, 4 * words - bytes);
    }
    return;
  }
  auto work = pack_of<Operand::fp32>(source.dtype);
  if constexpr (kHasPairs) {
    if (kind == Operand::bf16) work = pack_of<Operand::bf16>(source.dtype);
    if (kind == Operand::pieces) work = pack_of<Operand::pieces>(source.dtype);
  }
  work(source, rows, compute, out, words);
}

void transpose_panel(const uint32_t* rows, int64_t stride, int64_t depth, uint32_t* out) {
  for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
    for (int64_t k = 0; k < depth; k += kWidth) {
      transpose_words(rows + lane * stride + k, stride, out + k * kLanes + lane, kLanes);
    }
  }
}

void interleave_panel(const uint32_t* rows, int64_t count, int64_t stride, int64_t first, int64_t words, Operand kind,
                      uint32_t* out) {
  const int64_t left = words * per_word(kind) - first, columns = left < kLanes ? left : kLanes;
  if (!kHasPairs || kind == Operand::fp32) {
    for (int64_t r = 0; r < count; r++, out += kLanes) {
      int64_t j = 0;
      for (; j < columns; j += kWidth) store(out + j, load(rows + r * stride + first + j));
      for (; j < kLanes; j += kWidth) store(out + j, all_words(0));
    }
    return;
  }
  for (int64_t r = 0; r < count; r += 2, out += kLanes) {
    const uint32_t* const upper = rows + r * stride + first / 2;
    int64_t j = 0;
    for (; j < columns; j += 2 * kWidth) {
      const Words a = load(upper + j / 2), b = load(upper + stride + j / 2);
      Words low, high;
      interleave(a, b, &low, &high);
      store(out + j, low);
      store(out + j + kWidth, high);
    }
    for (; j < kLanes; j += kWidth) store(out + j, all_words(0));
  }
}

void store_gradient(const float* panel, int64_t rows, int64_t columns, Dtype dtype, void* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; r++) {
    const auto convert = [&](int64_t j, int64_t count) __attribute__((always_inline)) {
      const Floats x = load(panel + r * kLanes + j);
      const int64_t at = r * out_stride + j;
      if (dtype == Dtype::fp32) {
        store_first(static_cast<float*>(out) + at, count, x);
      } else {
        store_first(static_cast<uint16_t*>(out) + at, count, dtype == Dtype::bf16 ? to_bf16(x) : to_fp16(x));
      }
    };
    int64_t j = 0;
    for (; j + kWidth <= columns; j += kWidth) convert(j, kWidth);
    if (j < columns) convert(j, columns - j);
  }
}

void transpose_tile(const float* tile, int64_t rows, int64_t tokens, float* out, int64_t out_stride) {
  const auto words = reinterpret_cast<const uint32_t*>(tile);
  const auto to = reinterpret_cast<uint32_t*>(out);
  int64_t r = 0;
  for (; r + kWidth <= rows; r += kWidth) {
    int64_t t = 0;
    for (; t + kWidth <= tokens; t += kWidth) {
      transpose_words(words + r * kLanes + t, kLanes, to + t * out_stride + r, out_stride);
    }
    for (; t < tokens; t++) {
      for (int64_t i = r; i < r + kWidth; i++) out[t * out_stride + i] = tile[i * kLanes + t];
    }
  }
  for (; r < rows; r++) {
    for (int64_t t = 0; t < tokens; t++) out[t * out_stride + r] = tile[r * kLanes + t];
  }
}

}  // namespace
}  // namespace grpo
