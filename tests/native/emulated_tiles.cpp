// The unchanged csrc/cpu/kernels_amx.cpp on emulated tiles: its product runs on any processor.
#include "emulated_tiles.h"

#define EMULATED_TILES
#include "cpu/kernels_amx.cpp"

// `pieces`: whether operands have three, which are so many words apart. Returns whether the tiles are released.
extern "C" bool multiply(bool pieces, int64_t rows, int64_t depth, const uint32_t* a, int64_t lda, int64_t a_piece,
                         const uint32_t* b, int64_t b_piece, int64_t lanes, float* c, bool add) {
  const grpo::Gemm product = pieces ? grpo::multiply_pieces : grpo::multiply_amx;
  product(rows, depth, {a, lda, a_piece}, {b, b_piece, lanes}, c, add, {a, rows * lda});
  return emulated::shapes.palette == 0;
}
