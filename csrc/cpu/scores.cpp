// Log-probs and entropies: one product, its row work done while a tile is in cache.
#include <limits>

#include "head.h"

namespace grpo {

Plan Plan::of(int64_t vocab, int64_t hidden, Dtype compute) {
  const Machine& here = machine();
  Plan plan{};
  plan.kernels = here.kernels;
  const Gemm narrow = compute == Dtype::bf16 ? here.bf16 : here.pieces;
  plan.kind = narrow == nullptr ? Operand::fp32 : compute == Dtype::bf16 ? Operand::bf16 : Operand::pieces;
  plan.kept = compute == Dtype::bf16 ? Dtype::bf16 : Dtype::fp32;
  plan.multiply = narrow == nullptr ? here.kernels->multiply : narrow;
  plan.vocab = vocab;
  plan.hidden = hidden;
  plan.depth = round_up(ceil_div(hidden, per_word(plan.kind)), plan.kind == Operand::fp32 ? 1 : here.narrow_step);
  plan.words = round_up(plan.depth, 16);
  const int64_t row = plan.words * plan.pieces();
  plan.stride = shares_cache_sets(row) ? row + 16 : row;
  // 448 KiB of packed weight, 256 KiB of a token panel and a tile of 64 KiB, in 1 MiB of second-level cache; fp32
  // products take 1.03 x the time if they are cut for 2 MiB
  plan.held_words = (plan.kind == Operand::fp32 ? 1 << 20 : here.bf16_cache_bytes) * 7 / 16 / 4;
  plan.block_rows = std::clamp<int64_t>(plan.held_words / row / 32 * 32, 64, kMostBlockRows);
  plan.blocks = ceil_div(vocab, plan.block_rows);
  plan.group = here.group;
  plan.token_chunk = plan.kind == Operand::bf16 ? 1024 : 512;
  return plan;
}

TokenPanels::TokenPanels(const Plan& plan, const HeadInputs& inputs, int64_t first_panel, int64_t last_panel)
    : first_(first_panel), piece_(plan.words * kLanes), size_(plan.pieces() * piece_),
      words_((last_panel - first_panel) * size_) {
  const WeightRows hidden{inputs.hidden, inputs.compute, plan.hidden, plan.hidden};
  const int64_t workers = worker_count(last_panel - first_panel), row = plan.words * plan.pieces();
  const WorkerBuffers<uint32_t> rows(workers, kLanes * row);
  parallel_tasks(last_panel - first_panel, workers, [&](int64_t task, int64_t worker) {
    const int64_t token = (first_panel + task) * kLanes, count = std::min(kLanes, inputs.tokens - token);
    uint32_t* packed = rows.of(worker);
    plan.kernels->pack_rows(hidden.from(token), count, inputs.compute, plan.kind, plan.packed(packed, row), plan.words);
    std::fill(packed + count * row, packed + kLanes * row, 0u);
    plan.kernels->transpose_panel(packed, row, row, words_.get() + task * size_);
  });
}

namespace {

// A block of the weight that has the layout of an operand; else words of nullptr.
Left weight_in_place(const Plan& plan, const HeadInputs& inputs, int64_t block) {
  const WeightRows& weight = inputs.weight;
  const int64_t item = item_bytes(weight.dtype), pairs = per_word(plan.kind), stride = weight.stride / pairs;
  const void* source = weight.row(block * plan.block_rows);
  const bool same_words = weight.columns == plan.hidden && weight.dtype == inputs.compute && item * pairs == 4 &&
                          plan.kind != Operand::pieces;
  const bool whole_lines = plan.hidden % (16 * pairs) == 0 && weight.stride % (16 * pairs) == 0 &&
                           reinterpret_cast<uintptr_t>(source) % 64 == 0;
  // as b of a product, rows are taken in pairs
  const bool fits = same_words && whole_lines && !shares_cache_sets(stride) && plan.rows_of(block) % pairs == 0;
  return {fits ? static_cast<const uint32_t*>(source) : nullptr, stride, 0};
}

}  // namespace

Ahead weight_ahead(const Plan& plan, const HeadInputs& inputs, int64_t block) {
  if (block >= plan.blocks) return {};
  const Left found = weight_in_place(plan, inputs, block);
  return found.words == nullptr ? Ahead{} : Ahead{found.words, plan.rows_of(block) * found.stride};
}

namespace {

// [B'', B', B'] of rows of `weight` for three terms: B' is B / row_scale, rounded as narrow words are, B'' the rest. In
// tiles of some rows and columns, which are packed on the stack.
void pack_terms(const Plan& plan, const HeadInputs& inputs, int64_t first, int64_t rows, Operand kind, Packed out,
                int64_t words) {
  constexpr int64_t kRows = 16, kColumns = 64;
  const int64_t columns = inputs.weight.columns, item = 4 / per_word(kind);
  const bool narrow = kind == Operand::bf16;
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t count = std::min(kRows, rows - r);
    float inverse[kRows];
    for (int64_t i = 0; i < count; i++) {
      inverse[i] = inputs.row_scale == nullptr ? 1.0f : 1.0f / inputs.row_scale[first + r + i];
      for (int64_t piece = 0; piece < pieces_of(kind); piece++) {
        uint32_t* const row = out.words + (r + i) * out.stride + piece * out.piece;
        std::fill(row, row + words, 0u);
      }
    }
    for (int64_t j = 0; j < columns; j += kColumns) {
      const int64_t width = std::min(kColumns, columns - j);
      WeightRows source = inputs.weight.from(first + r);
      source.data = static_cast<const char*>(source.data) + j * item_bytes(source.dtype);
      source.columns = width;
      source.scale = inverse;
      alignas(64) uint32_t tile[kRows][3][kColumns];
      plan.kernels->pack_rows(source, count, Dtype::fp32, narrow ? Operand::pieces : kind,
                              {tile[0][0], 3 * kColumns, kColumns}, round_up(width, 32) / per_word(kind));
      for (int64_t i = 0; i < count; i++) {
        for (int64_t piece = 0; piece < pieces_of(kind); piece++) {
          uint32_t* const row = out.words + (r + i) * out.stride + piece * out.piece;
          char* const to = reinterpret_cast<char*>(row) + j * item;
          if (narrow) std::memcpy(to, tile[i][1], width * item);
          std::memcpy(to + columns * item, tile[i][piece], width * item);
          std::memcpy(to + 2 * columns * item, tile[i][piece], width * item);
        }
      }
    }
  }
}

}  // namespace

void pack_weight(const Plan& plan, const HeadInputs& inputs, int64_t first, int64_t rows, Operand kind, Packed out,
                 int64_t words) {
  if (inputs.has_base()) {
    plan.kernels->pack_rows(inputs.base.from(first), rows, inputs.compute, kind, out, words);
    out.words += inputs.base.columns / per_word(kind);
    words -= inputs.base.columns / per_word(kind);
  }
  if (inputs.terms == 3) return pack_terms(plan, inputs, first, rows, kind, out, words);
  if (inputs.weight.columns == 0) return;
  WeightRows weight = inputs.weight.from(first);
  float inverse[kMostBlockRows];
  if (inputs.has_base() && inputs.row_scale != nullptr) {
    for (int64_t r = 0; r < rows; r++) inverse[r] = 1.0f / inputs.row_scale[first + r];
    weight.scale = inverse;
  }
  plan.kernels->pack_rows(weight, rows, inputs.compute, kind, out, words);
}

Left weight_block(const Plan& plan, const HeadInputs& inputs, int64_t block, uint32_t* buffer) {
  const Left found = weight_in_place(plan, inputs, block);
  if (found.words != nullptr) return found;
  const int64_t rows = plan.rows_of(block);
  pack_weight(plan, inputs, block * plan.block_rows, rows, plan.kind, plan.packed(buffer, plan.stride), plan.words);
  std::fill(buffer + rows * plan.stride, buffer + round_up(rows, per_word(plan.kind)) * plan.stride, 0u);
  return {buffer, plan.stride, plan.words};
}

namespace {

// +inf where a token keeps a row, -inf elsewhere: [rows, 64]; nullptr if no token of the panel has a candidate set.
const float* limits_of_tile(const Plan& plan, const HeadInputs& inputs, int64_t block, int64_t panel, float* out) {
  if (inputs.set_ranges == nullptr) return nullptr;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const int64_t rows = plan.rows_of(block), first = block * plan.block_rows;
  const int64_t count = std::min(kLanes, inputs.tokens - panel * kLanes);
  const int64_t* ranges = inputs.set_ranges + 2 * panel * kLanes;
  float outside[kLanes];
  bool any = false;
  for (int64_t j = 0; j < kLanes; j++) {
    const bool has_set = j < count && ranges[2 * j] >= 0;
    // nor does a padding lane keep a row: with a NaN in the weight its product would be NaN, and so would dW
    outside[j] = has_set || j >= count ? -kInfinity : kInfinity;
    any = any || has_set;
  }
  if (!any) return nullptr;
  for (int64_t r = 0; r < rows; r++) std::copy(outside, outside + kLanes, out + r * kLanes);
  for (int64_t j = 0; j < count; j++) {
    if (ranges[2 * j] < 0) continue;
    const int64_t* end = inputs.set_ids + ranges[2 * j + 1];
    const int64_t* id = std::lower_bound(inputs.set_ids + ranges[2 * j], end, first);
    for (; id != end && *id < first + rows; ++id) out[(*id - first) * kLanes + j] = kInfinity;
  }
  return out;
}

}  // namespace

void exponentials_of_tile(const Plan& plan, const HeadInputs& inputs, Left weight, Right token_panel, int64_t block,
                          int64_t panel, float* z, const TileStatistics& out, void* kept, Ahead ahead) {
  const int64_t rows = plan.rows_of(block), token = panel * kLanes;
  float inverse_temperature[kLanes];
  for (int64_t j = 0; j < kLanes; j++) {
    inverse_temperature[j] = token + j < inputs.tokens ? 1.0f / inputs.temperature[token + j] : 1.0f;
  }
  plan.multiply(rows, plan.depth, weight, token_panel, z, false, ahead);
  const int64_t first = block * plan.block_rows;
  const Transform transform{inputs.row_scale == nullptr ? nullptr : inputs.row_scale + first,
                            inputs.bias == nullptr ? nullptr : inputs.bias + first, inputs.scale, inputs.softcap,
                            inverse_temperature,
                            limits_of_tile(plan, inputs, block, panel, z + plan.block_rows * kLanes)};
  plan.kernels->score_tile(z, rows, transform, out, plan.kept, kept);
}

void Partials::take_targets(const Plan& plan, const HeadInputs& inputs, int64_t block, int64_t panel,
                            const float* z) const {
  const int64_t first = block * plan.block_rows, rows = plan.rows_of(block);
  for (int64_t t = panel * kLanes; t < std::min((panel + 1) * kLanes, inputs.tokens); t++) {
    const int64_t row = inputs.targets[t] - first;
    if (row >= 0 && row < rows) target_logit_.get()[t] = z[row * kLanes + t % kLanes];
  }
}

void Partials::finish(const Plan& plan, const HeadInputs& inputs, const Statistics& out) const {
  for (int64_t split = 1; split < split_count(plan); split++) {
    for (int64_t panel = 0; panel < padded_ / kLanes; panel++) plan.kernels->merge_tile(at(0, panel), at(split, panel));
  }
  const TileStatistics total = at(0, 0);
  for (int64_t t = 0; t < inputs.tokens; t++) {
    const float max = total.max[t];
    out.set(t, max, total.rest[t], with_entropy_ ? total.weighted[t] : 0.0f, target_logit_.get()[t] - max);
  }
}

void score_head(const Plan& plan, const HeadInputs& inputs, const Statistics& out, float* offsets) {
  const int64_t panels = ceil_div(inputs.tokens, kLanes);
  const int64_t splits = split_count(plan), workers = worker_count(splits);
  const TokenPanels tokens(plan, inputs, 0, panels);
  const Partials partials(splits + workers, inputs, out.with_entropy);
  const WorkerBuffers<uint32_t> weights(workers, plan.block_rows * plan.stride);
  const WorkerBuffers<float> tiles(workers, tile_size(plan, inputs));

  parallel_tasks(splits, workers, [&](int64_t split, int64_t worker) {
    float* z = tiles.of(worker);
    const int64_t begin = split_begin(plan, split), end = split_begin(plan, split + 1);
    for (int64_t block = begin; block < end; block++) {
      const Left weight = weight_block(plan, inputs, block, weights.of(worker));
      const Ahead next = weight_ahead(plan, inputs, block + 1 < end ? block + 1 : plan.blocks);
      for (int64_t panel = 0; panel < panels; panel++) {
        const TileStatistics tile = partials.at(block == begin ? split : splits + worker, panel);
        void* kept = inputs.kept_tile(plan, block, panel);
        exponentials_of_tile(plan, inputs, weight, tokens.panel(panel), block, panel, z, tile, kept,
                             next.part(panel, panels));
        if (kept != nullptr) std::copy(tile.max, tile.max + kLanes, offsets + inputs.offset_at(block, panel));
        if (block != begin) plan.kernels->merge_tile(partials.at(split, panel), tile);
        partials.take_targets(plan, inputs, block, panel, z);
      }
    }
  });
  partials.finish(plan, inputs, out);
}

void multiply_head(const Plan& plan, const HeadInputs& inputs, float* out, int64_t out_stride) {
  const int64_t panels = ceil_div(inputs.tokens, kLanes), workers = worker_count(plan.blocks);
  const TokenPanels tokens(plan, inputs, 0, panels);
  const WorkerBuffers<uint32_t> weights(workers, plan.block_rows * plan.stride);
  const WorkerBuffers<float> tiles(workers, plan.block_rows * kLanes);
  parallel_tasks(plan.blocks, workers, [&](int64_t block, int64_t worker) {
    float* tile = tiles.of(worker);
    const int64_t first = block * plan.block_rows, rows = plan.rows_of(block);
    const Left weight = weight_block(plan, inputs, block, weights.of(worker));
    for (int64_t panel = 0; panel < panels; panel++) {
      const int64_t token = panel * kLanes, count = std::min(kLanes, inputs.tokens - token);
      plan.multiply(rows, plan.depth, weight, tokens.panel(panel), tile, false, {});
      for (int64_t r = 0; inputs.row_scale != nullptr && r < rows; r++) {
        for (int64_t j = 0; j < kLanes; j++) tile[r * kLanes + j] *= inputs.row_scale[first + r];
      }
      plan.kernels->transpose_tile(tile, rows, count, out + token * out_stride + first, out_stride);
    }
  });
}

}  // namespace grpo
