// Log-probs and entropies: one product, its row work done while a tile is in cache.
#include <limits>

#include "head.h"

namespace grpo {

Plan Plan::of(int64_t vocab, int64_t hidden, int64_t rank, Dtype compute) {
  const Machine& here = machine();
  Plan plan{};
  plan.kernels = here.kernels;
  const Gemm narrow = compute == Dtype::bf16 ? here.bf16 : here.pieces;
  plan.kind = narrow == nullptr ? Operand::fp32 : compute == Dtype::bf16 ? Operand::bf16 : Operand::pieces;
  plan.kept = compute == Dtype::bf16 ? Dtype::bf16 : Dtype::fp32;
  plan.multiply = narrow == nullptr ? here.kernels->multiply : narrow;
  plan.vocab = vocab;
  plan.hidden = hidden;
  plan.rank = rank;
  plan.depth = round_up(ceil_div(hidden, per_word(plan.kind)), plan.kind == Operand::fp32 ? 1 : here.narrow_step);
  plan.words = round_up(plan.depth, 16);
  plan.rank_words = round_up(ceil_div(rank, per_word(plan.kind)), 16);
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
      low_size_(round_up(plan.rank, 16) * kLanes), hidden_((last_panel - first_panel) * size_),
      low_hidden_((last_panel - first_panel) * low_size_) {
  const WeightRows low_hidden{inputs.low_hidden, Dtype::fp32, plan.rank, plan.rank};
  const int64_t workers = worker_count(last_panel - first_panel);
  const WorkerBuffers<uint32_t> rows(workers, std::max(size_, low_size_));
  parallel_tasks(last_panel - first_panel, workers, [&](int64_t task, int64_t worker) {
    const int64_t token = (first_panel + task) * kLanes, count = std::min(kLanes, inputs.tokens - token);
    uint32_t* const packed = rows.of(worker);
    const auto pack = [&](const WeightRows& from, Operand kind, int64_t words, uint32_t* to) {
      const int64_t row = words * pieces_of(kind);
      plan.kernels->pack_rows(from.from(token), count, from.dtype, kind, {packed, row, words}, words);
      std::fill(packed + count * row, packed + kLanes * row, 0u);
      plan.kernels->transpose_panel(packed, row, row, to);
    };
    pack(inputs.hidden, plan.kind, plan.words, hidden_.get() + task * size_);
    if (!inputs.has_low_rank()) return;
    pack(low_hidden, Operand::fp32, low_size_ / kLanes, low_hidden_.get() + task * low_size_);
  });
}

namespace {

// A block of the weight that has the layout of an operand; else words of nullptr.
Left weight_in_place(const Plan& plan, const HeadInputs& inputs, int64_t block) {
  const WeightRows& weight = inputs.weight;
  const int64_t item = item_bytes(weight.dtype), pairs = per_word(plan.kind), stride = weight.stride / pairs;
  const void* source = weight.row(block * plan.block_rows);
  const bool same_words = weight.holds(inputs.hidden.dtype) && item * pairs == 4 &&
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

void pack_low_weight(const Plan& plan, const HeadInputs& inputs, int64_t first, int64_t rows, Operand kind, Packed out,
                     int64_t words) {
  WeightRows weight = inputs.low_weight.from(first);
  float inverse[kMostBlockRows];
  if (inputs.row_scale != nullptr) {
    for (int64_t r = 0; r < rows; r++) inverse[r] = 1.0f / inputs.row_scale[first + r];
    weight.scale = inverse;
  }
  plan.kernels->pack_rows(weight, rows, Dtype::fp32, kind, out, words);
}

int64_t WeightBlock::buffer_words(const Plan& plan) {
  return plan.block_rows * (plan.stride + plan.rank_words * plan.pieces() + round_up(plan.rank, 16));
}

WeightBlock WeightBlock::of(const Plan& plan, const HeadInputs& inputs, int64_t block, uint32_t* buffer) {
  const int64_t first = block * plan.block_rows, rows = plan.rows_of(block);
  const int64_t whole = round_up(rows, per_word(plan.kind));
  WeightBlock out{weight_in_place(plan, inputs, block), {}, {}};
  if (out.weight.words == nullptr) {
    out.weight = {buffer, plan.stride, plan.words};
    plan.kernels->pack_rows(inputs.weight.from(first), rows, inputs.hidden.dtype, plan.kind,
                            {buffer, plan.stride, plan.words}, plan.words);
    std::fill(buffer + rows * plan.stride, buffer + whole * plan.stride, 0u);
  }
  if (!inputs.has_low_rank()) return out;
  buffer += plan.block_rows * plan.stride;
  const int64_t stride = plan.rank_words * plan.pieces(), stride_fp32 = round_up(plan.rank, 16);
  out.low_weight = {buffer, stride, plan.rank_words};
  pack_low_weight(plan, inputs, first, rows, plan.kind, {buffer, stride, plan.rank_words}, plan.rank_words);
  std::fill(buffer + rows * stride, buffer + whole * stride, 0u);
  buffer += plan.block_rows * stride;
  out.low_weight_fp32 = {buffer, stride_fp32, 0};
  pack_low_weight(plan, inputs, first, rows, Operand::fp32, {buffer, stride_fp32, 0}, stride_fp32);
  return out;
}

void multiply_tile(const Plan& plan, const WeightBlock& weight, const TokenPanels& tokens, int64_t block, int64_t panel,
                   float* out, Ahead ahead) {
  const int64_t rows = plan.rows_of(block);
  plan.multiply(rows, plan.depth, weight.weight, tokens.hidden(panel), out, false, ahead);
  if (plan.rank == 0) return;
  plan.kernels->multiply(rows, plan.rank, weight.low_weight_fp32, tokens.low_hidden(panel), out, true, {});
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

void exponentials_of_tile(const Plan& plan, const HeadInputs& inputs, const WeightBlock& weight,
                          const TokenPanels& tokens, int64_t block, int64_t panel, float* z, const TileStatistics& out,
                          void* kept, Ahead ahead) {
  const int64_t rows = plan.rows_of(block), token = panel * kLanes;
  float inverse_temperature[kLanes];
  for (int64_t j = 0; j < kLanes; j++) {
    inverse_temperature[j] = token + j < inputs.tokens ? 1.0f / inputs.temperature[token + j] : 1.0f;
  }
  multiply_tile(plan, weight, tokens, block, panel, z, ahead);
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
  const WorkerBuffers<uint32_t> weights(workers, WeightBlock::buffer_words(plan));
  const WorkerBuffers<float> tiles(workers, tile_size(plan, inputs));

  parallel_tasks(splits, workers, [&](int64_t split, int64_t worker) {
    float* z = tiles.of(worker);
    const int64_t begin = split_begin(plan, split), end = split_begin(plan, split + 1);
    for (int64_t block = begin; block < end; block++) {
      const WeightBlock weight = WeightBlock::of(plan, inputs, block, weights.of(worker));
      const Ahead next = weight_ahead(plan, inputs, block + 1 < end ? block + 1 : plan.blocks);
      for (int64_t panel = 0; panel < panels; panel++) {
        const TileStatistics tile = partials.at(block == begin ? split : splits + worker, panel);
        void* kept = inputs.kept_tile(plan, block, panel);
        exponentials_of_tile(plan, inputs, weight, tokens, block, panel, z, tile, kept, next.part(panel, panels));
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
  const WorkerBuffers<uint32_t> weights(workers, WeightBlock::buffer_words(plan));
  const WorkerBuffers<float> tiles(workers, plan.block_rows * kLanes);
  parallel_tasks(plan.blocks, workers, [&](int64_t block, int64_t worker) {
    float* tile = tiles.of(worker);
    const int64_t first = block * plan.block_rows, rows = plan.rows_of(block);
    const WeightBlock weight = WeightBlock::of(plan, inputs, block, weights.of(worker));
    for (int64_t panel = 0; panel < panels; panel++) {
      const int64_t token = panel * kLanes, count = std::min(kLanes, inputs.tokens - token);
      multiply_tile(plan, weight, tokens, block, panel, tile, {});
      for (int64_t r = 0; inputs.row_scale != nullptr && r < rows; r++) {
        for (int64_t j = 0; j < kLanes; j++) tile[r * kLanes + j] *= inputs.row_scale[first + r];
      }
      plan.kernels->transpose_tile(tile, rows, count, out + token * out_stride + first, out_stride);
    }
  });
}

}  // namespace grpo
