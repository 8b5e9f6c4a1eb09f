// AMX's tiles in plain memory, of each thread.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

// What LDTILECFG reads.
struct Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

inline thread_local Shapes shapes;  // all 0: released
inline thread_local uint32_t tiles[8][16][16];

// Ends the process at an instruction that a processor would refuse.
inline void expect(bool allowed) {
  if (allowed) return;
  std::fprintf(stderr, "AMX would refuse this instruction\n");
  std::abort();
}
inline bool usable(int tile) { return shapes.rows[tile] > 0 && shapes.row_bytes[tile] > 0; }

inline void release() {
  std::memset(&shapes, 0, sizeof shapes);
  std::memset(tiles, 0, sizeof tiles);
}

inline void load_config(const void* from) {
  release();
  std::memcpy(&shapes, from, sizeof shapes);
  expect(shapes.palette == 1 && shapes.start_row == 0);
  for (int i = 0; i < 8; i++) expect(shapes.rows[i] <= 16 && shapes.row_bytes[i] <= 64 && shapes.row_bytes[i] % 4 == 0);
}

inline void zero(int tile) {
  expect(usable(tile));
  std::memset(tiles[tile], 0, sizeof tiles[tile]);
}

inline void load(int tile, const void* from, int64_t stride) {
  zero(tile);
  for (int r = 0; r < shapes.rows[tile]; r++) {
    std::memcpy(tiles[tile][r], static_cast<const char*>(from) + r * stride, shapes.row_bytes[tile]);
  }
}

inline void store(int tile, void* to, int64_t stride) {
  expect(usable(tile));
  for (int r = 0; r < shapes.rows[tile]; r++) {
    std::memcpy(static_cast<char*>(to) + r * stride, tiles[tile][r], shapes.row_bytes[tile]);
  }
}

// Below the smallest normal number: 0, of operands and results of bf16 products.
inline float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? 0.0f : x; }

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return flushed(x);
}

// sum + the products of two bf16 numbers in a word each.
inline float add_pair(float sum, uint32_t a, uint32_t b) {
  sum = flushed(sum + as_float(a << 16) * as_float(b << 16));
  return flushed(sum + as_float(a & 0xffff0000) * as_float(b & 0xffff0000));
}

// c += a b, with neighbours along the depth in a word.
inline void multiply_bf16(int c, int a, int b) {
  expect(usable(a) && usable(b) && usable(c) && c != a && c != b && a != b);
  expect(shapes.rows[c] == shapes.rows[a] && shapes.row_bytes[c] == shapes.row_bytes[b]);
  expect(shapes.row_bytes[a] == 4 * shapes.rows[b]);
  for (int m = 0; m < shapes.rows[c]; m++) {
    for (int n = 0; n < shapes.row_bytes[c] / 4; n++) {
      float sum = as_float(tiles[c][m][n]);
      for (int k = 0; k < shapes.rows[b]; k++) sum = add_pair(sum, tiles[a][m][k], tiles[b][k][n]);
      std::memcpy(&tiles[c][m][n], &sum, 4);
    }
  }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply_bf16
