// Products by AMX: tiles of 16 rows x 16 words.
#include "gemm.h"

#include <algorithm>

#if defined(__x86_64__) && (__has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>))
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(EMULATED_TILES)  // tests/native: these instructions are functions
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("amx-tile,amx-bf16,avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f")
#endif

namespace grpo {
namespace {

constexpr int64_t kTile = 16;

// The argument of LDTILECFG: bytes of a row and rows of each tile.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums, 4 and 5 of a, 6 and 7 of b.
void configure(int64_t rows, int64_t depth) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) {
    const bool of_a = tile == 4 || tile == 5;
    shapes.row_bytes[tile] = static_cast<uint16_t>(4 * (of_a ? depth : kTile));
    shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : depth);
  }
  // GCC before 14 believes that the instruction reads 8 bytes: all 64 must be in memory
  __asm__ volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
}

// Steps of the depth, a tile each, that are multiplied for all rows before the next ones: a strip of b, [16 * steps, 64],
// has 28 KiB and stays in the first-level cache (48 KiB) while rows of a, 14 KiB at a time, pass through it.
constexpr int64_t kStripSteps = 7;

constexpr int64_t kLine = 16;  // words of a cache line

// Lines that each step fetches to the second-level cache: of the next panel, which follows b in memory (four are all of
// it in a product of 256 rows), and of `ahead`.
constexpr int64_t kPanelLines = 4;
struct Stream {
  const uint32_t *panel, *ahead;
  int64_t ahead_lines;

  void step() {
    for (int64_t line = 0; line < kPanelLines; line++, panel += kLine) __builtin_prefetch(panel, 0, 2);
    for (int64_t line = 0; line < ahead_lines; line++, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
  }
};

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// The sums, [Tiles * rows, 32], += a [Tiles * rows, depth] @ b [depth, 32]: with two tiles of rows, each that is loaded
// is multiplied twice.
template <int Tiles>
inline void add_steps(int64_t depth, const uint32_t* a, int64_t lda, const uint32_t* b, Stream& stream) {
  const int64_t a_bytes = 4 * lda, b_bytes = 4 * kLanes;
  for (int64_t k = 0; k < depth; k += kTile, a += kTile, b += kTile * kLanes) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    stream.step();
    _tile_loadd(7, b + kTile, b_bytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Tiles == 2) {
      _tile_loadd(5, a + kTile * lda, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

template <int Tiles>
inline void store_sums(float* c, int64_t stride) {
  _tile_stored(0, c, 4 * stride);
  _tile_stored(1, c + kTile, 4 * stride);
  if constexpr (Tiles == 2) {
    _tile_stored(2, c + kTile * stride, 4 * stride);
    _tile_stored(3, c + kTile * stride + kTile, 4 * stride);
  }
}

// c = or += a @ b, as above.
template <int Tiles>
inline void block(int64_t depth, const uint32_t* a, int64_t lda, const uint32_t* b, Stream& stream, float* c,
                  bool add) {
  if (add) {
    _tile_loadd(0, c, 4 * kLanes);
    _tile_loadd(1, c + kTile, 4 * kLanes);
    if constexpr (Tiles == 2) {
      _tile_loadd(2, c + kTile * kLanes, 4 * kLanes);
      _tile_loadd(3, c + kTile * kLanes + kTile, 4 * kLanes);
    }
  } else {
    clear_sums();
  }
  add_steps<Tiles>(depth, a, lda, b, stream);
  store_sums<Tiles>(c, kLanes);
}

// A depth that is a multiple of `step`, which is at most 16. Every second strip goes from the last rows to the first,
// whose sums the strip before has left in the cache. docs/findings.md has the other orders that were measured.
void multiply(int64_t rows, int64_t depth, int64_t step, const uint32_t* a, int64_t lda, const uint32_t* b,
              int64_t lanes, float* c, bool add, Ahead ahead) {
  configure(kTile, step);
  const int64_t pairs = rows / (2 * kTile), steps = depth / step, strips = (steps + kStripSteps - 1) / kStripSteps;
  const int64_t words_a_step = ahead.count / (std::max<int64_t>(pairs, 1) * kLanes / (2 * kTile) * steps);
  Stream stream{b + depth * kLanes, ahead.words, (words_a_step + kLine - 1) / kLine};
  for (int64_t strip = 0; strip < strips; strip++) {
    const int64_t k = strip * steps / strips * step, length = (strip + 1) * steps / strips * step - k;
    for (int64_t n = 0; n < pairs; n++) {
      const int64_t i = 2 * kTile * (strip % 2 == 0 ? n : pairs - 1 - n);
      for (int64_t lane = 0; lane < lanes; lane += 2 * kTile) {
        block<2>(length, a + i * lda + k, lda, b + k * kLanes + lane, stream, c + i * kLanes + lane, add || k > 0);
      }
    }
  }
  for (int64_t i = 2 * kTile * pairs; i < rows; i += kTile) {
    if (rows - i < kTile) configure(rows - i, step);
    for (int64_t lane = 0; lane < lanes; lane += 2 * kTile) {
      block<1>(depth, a + i * lda, lda, b + lane, stream, c + i * kLanes + lane, add);
    }
  }
}

// The tiles are configured and released in each call, which takes about 1 % of its time: whatever else uses AMX on this
// thread configures them too.
void multiply_amx(int64_t rows, int64_t depth, Left a, Right b, float* c, bool add, Ahead ahead) {
  const int64_t whole = depth / kTile * kTile;
  if (whole > 0) multiply(rows, whole, kTile, a.words, a.stride, b.words, b.lanes, c, add, ahead);
  if (whole < depth) {
    multiply(rows, depth - whole, depth - whole, a.words + whole, a.stride, b.words + whole * kLanes, b.lanes,
             c, add || whole > 0, {});
  }
  _tile_release();
}

// Steps of the depth that are summed before they are added to what is there: short chains of roundings, and three pieces
// of b, 24 KiB, stay in the first-level cache.
constexpr int64_t kPieceSteps = 2;

// Tiles of the sums += the loaded tiles of a and b.
template <int Tiles>
inline void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (Tiles == 2) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The sums += a @ b in pieces, numbered from the largest. Of nine products the three below 2^-26 of the result are left
// out. The order needs one new operand for each: 14 tiles are loaded for 24 products.
template <int Tiles>
inline void add_pieces(int64_t depth, Left a, Right b, Stream& stream) {
  for (int64_t k = 0; k < depth; k += kTile) {
    const auto load_a = [&](int64_t piece) __attribute__((always_inline)) {
      const uint32_t* const from = a.words + piece * a.piece + k;
      _tile_loadd(4, from, 4 * a.stride);
      if constexpr (Tiles == 2) _tile_loadd(5, from + kTile * a.stride, 4 * a.stride);
    };
    const auto load_b = [&](int64_t piece) __attribute__((always_inline)) {
      const uint32_t* const from = b.words + piece * b.piece + k * kLanes;
      _tile_loadd(6, from, 4 * kLanes);
      _tile_loadd(7, from + kTile, 4 * kLanes);
    };
    load_a(2);
    load_b(0);
    multiply_tiles<Tiles>();
    stream.step();
    load_a(1);
    multiply_tiles<Tiles>();
    stream.step();
    load_b(1);
    multiply_tiles<Tiles>();
    stream.step();
    load_a(0);
    multiply_tiles<Tiles>();
    load_b(2);
    multiply_tiles<Tiles>();
    load_b(0);
    multiply_tiles<Tiles>();
  }
}

using Line = float __attribute__((vector_size(64), aligned(4), may_alias));

// c [Tiles * rows, 32] = or += a @ b in pieces.
template <int Tiles>
inline void piece_block(int64_t rows, int64_t depth, Left a, Right b, Stream& stream, float* c, bool add) {
  alignas(64) float sums[2 * kTile * 2 * kTile];
  clear_sums();
  add_pieces<Tiles>(depth, a, b, stream);
  if (!add) return store_sums<Tiles>(c, kLanes);
  store_sums<Tiles>(sums, 2 * kTile);
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t j = 0; j < 2 * kTile; j += kTile) {
      *reinterpret_cast<Line*>(c + r * kLanes + j) += *reinterpret_cast<const Line*>(sums + r * 2 * kTile + j);
    }
  }
}

// As `multiply`.
void multiply_slice(int64_t rows, int64_t depth, int64_t step, Left a, Right b, Stream& stream, float* c, bool add) {
  configure(kTile, step);
  for (int64_t i = 0; i + 2 * kTile <= rows; i += 2 * kTile) {
    for (int64_t lane = 0; lane < b.lanes; lane += 2 * kTile) {
      piece_block<2>(2 * kTile, depth, {a.words + i * a.stride, a.stride, a.piece}, {b.words + lane, b.piece}, stream,
                     c + i * kLanes + lane, add);
    }
  }
  for (int64_t i = rows / (2 * kTile) * 2 * kTile; i < rows; i += kTile) {
    const int64_t count = std::min(rows - i, kTile);
    if (count < kTile) configure(count, step);
    for (int64_t lane = 0; lane < b.lanes; lane += 2 * kTile) {
      piece_block<1>(count, depth, {a.words + i * a.stride, a.stride, a.piece}, {b.words + lane, b.piece}, stream,
                     c + i * kLanes + lane, add);
    }
  }
}

void multiply_pieces(int64_t rows, int64_t depth, Left a, Right b, float* c, bool add, Ahead) {
  Stream stream{b.words + 2 * b.piece + depth * kLanes, nullptr, 0};  // the next panel follows the last piece
  const int64_t whole = depth / kTile * kTile;
  for (int64_t k = 0; k < depth;) {
    const int64_t step = k < whole ? kTile : depth - whole;
    const int64_t length = k < whole ? std::min(kPieceSteps * kTile, whole - k) : step;
    multiply_slice(rows, length, step, {a.words + k, a.stride, a.piece}, {b.words + k * kLanes, b.piece, b.lanes},
                   stream, c, add || k > 0);
    k += length;
  }
  _tile_release();
}

}  // namespace

AmxProducts amx_products() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return {};
  return {multiply_amx, multiply_pieces};
}

}  // namespace grpo

#if defined(EMULATED_TILES)
#elif defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace grpo {

AmxProducts amx_products() { return {}; }

}  // namespace grpo

#endif
