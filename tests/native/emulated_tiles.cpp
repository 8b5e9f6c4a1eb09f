// AMX's tiles in plain memory, and the unchanged csrc/cpu/kernels_amx.cpp on them: its product runs on any processor.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

// What LDTILECFG reads.
struct Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

Shapes shapes;  // all 0: released
uint32_t tiles[8][16][16];
int faults;  // instructions that a processor would refuse

void expect(bool allowed) { faults += !allowed; }
bool usable(int tile) { return shapes.rows[tile] > 0 && shapes.row_bytes[tile] > 0; }

void release() {
  std::memset(&shapes, 0, sizeof shapes);
  std::memset(tiles, 0, sizeof tiles);
}

void load_config(const void* from) {
  release();
  std::memcpy(&shapes, from, sizeof shapes);
  expect(shapes.palette == 1 && shapes.start_row == 0);
  for (int i = 0; i < 8; i++) expect(shapes.rows[i] <= 16 && shapes.row_bytes[i] <= 64 && shapes.row_bytes[i] % 4 == 0);
}

void zero(int tile) {
  expect(usable(tile));
  std::memset(tiles[tile], 0, sizeof tiles[tile]);
}

void load(int tile, const void* from, int64_t stride) {
  zero(tile);
  for (int r = 0; r < shapes.rows[tile]; r++) {
    std::memcpy(tiles[tile][r], static_cast<const char*>(from) + r * stride, shapes.row_bytes[tile]);
  }
}

void store(int tile, void* to, int64_t stride) {
  expect(usable(tile));
  for (int r = 0; r < shapes.rows[tile]; r++) {
    std::memcpy(static_cast<char*>(to) + r * stride, tiles[tile][r], shapes.row_bytes[tile]);
  }
}

float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// c += a b, with neighbours along the depth in a word.
void multiply_bf16(int c, int a, int b) {
  expect(usable(a) && usable(b) && usable(c) && c != a && c != b && a != b);
  expect(shapes.rows[c] == shapes.rows[a] && shapes.row_bytes[c] == shapes.row_bytes[b]);
  expect(shapes.row_bytes[a] == 4 * shapes.rows[b]);
  for (int m = 0; m < shapes.rows[c]; m++) {
    for (int n = 0; n < shapes.row_bytes[c] / 4; n++) {
      float sum = as_float(tiles[c][m][n]);
      for (int k = 0; k < shapes.rows[b]; k++) {
        const uint32_t x = tiles[a][m][k], y = tiles[b][k][n];
        sum += as_float(x << 16) * as_float(y << 16);
        sum += as_float(x & 0xffff0000) * as_float(y & 0xffff0000);
      }
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
#define EMULATED_TILES
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply_bf16

#include "cpu/kernels_amx.cpp"

// Returns the number of refused instructions; tiles that are still configured count as one. `pieces`: whether operands
// have three, which are so many words apart.
extern "C" int multiply(bool pieces, int64_t rows, int64_t depth, const uint32_t* a, int64_t lda, int64_t a_piece,
                        const uint32_t* b, int64_t b_piece, int64_t lanes, float* c, bool add) {
  emulated::faults = 0;
  const grpo::Gemm product = pieces ? grpo::multiply_pieces : grpo::multiply_amx;
  product(rows, depth, {a, lda, a_piece}, {b, b_piece, lanes}, c, add, {a, rows * lda});
  return emulated::faults + (emulated::shapes.palette != 0);
}
