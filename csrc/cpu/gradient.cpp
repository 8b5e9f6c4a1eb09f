// dW, dH and db from the kept (or recomputed) exponentials.
//
// A thread takes a group of vocabulary blocks: dz of all tokens, the group's rows of dW, written once, and its product
// for dH, which is added to a sum when those before it are. So no result depends on which thread took what, and a
// thread reads only operands that it has packed.
//
// Scoring may run here, too, while the weight is in the cache: for the sums that dH is made of (HeadSums), derivatives
// are not needed yet.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

#include "head.h"

namespace grpo {
namespace {

// dH is made of some sums, to which groups are added in turns: a thread that the system has put aside holds up the
// others only after as many groups. One, or more within so many bytes.
constexpr int64_t kSumBytes = 8 << 20, kMostSums = 8;

// `bytes`: of one.
int64_t sums_of_dhidden(int64_t bytes) {
  return std::clamp<int64_t>(kSumBytes / std::max<int64_t>(bytes, 1), 1, kMostSums);
}

// Some columns of dH: of the weight, or of the low-rank weight.
struct HiddenPanel {
  bool low;
  int64_t first, count;
};

struct Sizes {
  int64_t padded;         // tokens that have a gradient, in whole panels
  int64_t chunk, chunks;  // of them, whose dz is multiplied at a time
  int64_t pair, pieces;   // numbers in a word, pieces of a number
  int64_t column_panels;  // of dW
  int64_t groups;         // of `plan.group` vocabulary blocks
  int64_t sums;           // of dH; a group is added to the one of its number, modulo `sums`
  int64_t weight_panels;  // of dH: its columns of the weight in panels of 64
  int64_t hidden_panels;  // with those of the low-rank weight
  int64_t strip, strips;  // of a chunk: tokens whose dz stays in the second-level cache while panels of the weight pass
  int64_t workers;
  bool dense;             // every token has a gradient
  bool looks_ahead;       // products fetch what comes after them
  // Words of a row: of dz as a of the dW product and of the dH product; of a piece of the latter. Elements of a row of
  // gathered exponentials.
  int64_t across_stride, along_stride, along_depth, gathered_stride;

  static Sizes of(const Plan& plan, const HeadInputs& inputs, const GradientInputs& g) {
    Sizes sizes{};
    sizes.padded = round_up(g.count, kLanes);
    sizes.chunk = std::min(plan.token_chunk, sizes.padded);
    sizes.chunks = ceil_div(sizes.padded, sizes.chunk);
    sizes.pair = per_word(plan.kind);
    sizes.pieces = plan.pieces();
    sizes.column_panels = ceil_div(inputs.gradient_weight().columns, kLanes);
    sizes.groups = ceil_div(plan.blocks, plan.group);
    sizes.workers = worker_count(sizes.groups);
    sizes.dense = g.count == inputs.tokens;
    // Measured (AMX, N = 1024): 0.97 x the time. With N = 128, where products are short, 1.08 x.
    sizes.looks_ahead = sizes.padded >= 8 * kLanes;
    // with a cache line more than is used, rows do not lie in few sets of the first-level cache
    sizes.across_stride = sizes.pieces * sizes.chunk / sizes.pair + 16;
    sizes.along_depth = plan.group * plan.block_rows / sizes.pair;
    sizes.along_stride = sizes.pieces * sizes.along_depth + 16;
    if (shares_cache_sets(sizes.along_stride)) sizes.along_stride += 16;
    sizes.gathered_stride = sizes.chunk + kLanes;  // what compress_tile may write beyond
    const int64_t held = plan.held_words / (sizes.pieces * sizes.along_depth) / kLanes * kLanes;
    sizes.strip = std::clamp(held, kLanes, sizes.chunk);
    sizes.strips = ceil_div(sizes.chunk, sizes.strip);
    sizes.weight_panels = ceil_div(plan.hidden, kLanes);
    sizes.hidden_panels = sizes.weight_panels + ceil_div(plan.rank, kLanes);
    sizes.sums = std::min(sums_of_dhidden(4 * sizes.padded * sizes.hidden_panels * kLanes), sizes.groups);
    return sizes;
  }

  HiddenPanel hidden_panel(const Plan& plan, int64_t p) const {
    const bool low = p >= weight_panels;
    const int64_t first = (low ? p - weight_panels : p) * kLanes;
    return {low, first, std::min(kLanes, (low ? plan.rank : plan.hidden) - first)};
  }

  // Panels of dW whose sums wait for the next chunk of tokens.
  int64_t waiting_panels() const { return padded > chunk ? column_panels : 1; }
};

// Whether the targets are left out of the products, and added in fp32.
bool targets_apart(const HeadInputs& inputs, const GradientInputs& g) {
  return g.sums.values != nullptr || inputs.has_low_rank();
}

// Inputs of the tiles for each token, in the order of `rows`, padded to whole panels by tokens without a gradient.
class Lanes {
 public:
  // `with_targets`: else dz is 0 there.
  Lanes(const HeadInputs& inputs, const GradientInputs& g, int64_t padded, bool with_targets)
      : values_(7 * padded), targets_(padded), padded_(padded), softcap_(inputs.softcap),
        entropy_(g.dentropy != nullptr) {
    const bool scored = g.statistics.max != nullptr;  // else sums are made while the tokens are scored
    for (int64_t i = 0; i < padded; i++) scored ? fill(inputs, g, i) : fill_for_sums(inputs, g, i);
    if (!with_targets) std::fill(of(6), of(6) + padded, 0.0f);
  }

  int64_t target(int64_t i) const { return targets_.get()[i]; }
  float target_value(int64_t i) const { return of(6)[i]; }

  GradientLanes at(int64_t lane, const float* offset, const int32_t* target, const float* row_scale) const {
    return {offset,   of(0) + lane, of(1) + lane, of(2) + lane, of(3) + lane, entropy_ ? of(4) + lane : nullptr,
            of(5) + lane, of(6) + lane, target, softcap_, row_scale};
  }

 private:
  float* of(int64_t which) const { return values_.get() + which * padded_; }

  // So that what stands for dz is exp(z - offset) dz/d(product), and 0 at the target.
  void fill_for_sums(const HeadInputs& inputs, const GradientInputs& g, int64_t i) {
    const bool token = i < g.count;
    const float values[] = {token ? g.sums.offset[i] : 0.0f, token ? 0.0f : 1e30f,
                            token ? inputs.temperature[i] : 1.0f, 1, 0, 0, 0};
    for (int64_t k = 0; k < 7; k++) of(k)[i] = values[k];
    targets_.get()[i] = token ? inputs.targets[i] : -1;
  }

  void fill(const HeadInputs& inputs, const GradientInputs& g, int64_t i) {
    // a padding lane: probability 0, coefficients 0, no target
    float max = 0, log_sum = 1e30f, temperature = 1, dlogp = 0, dentropy = 0, entropy = 0, at_target = 0;
    targets_.get()[i] = -1;
    if (i < g.count) {
      const int64_t t = g.rows[i];
      max = g.statistics.max[t], log_sum = g.statistics.log_sum[t], temperature = inputs.temperature[t];
      const float logp = g.statistics.logp[t], factor = inputs.scale / temperature;
      targets_.get()[i] = inputs.targets[t];
      dlogp = g.dlogp[t] * factor;
      // 1 - p of the target from expm1: a confident token's gradient keeps its digits
      at_target = -std::expm1(logp) * dlogp;
      if (entropy_) {
        entropy = g.statistics.entropy[t], dentropy = g.dentropy[t] * factor;
        const float log_p = logp < kLowestLogp ? kLowestLogp : logp;  // p log p of an impossible token is 0
        at_target -= std::exp(log_p) * dentropy * (log_p + entropy);
      }
      if (softcap_ != 0.0f) {
        const float capped = ((logp + log_sum) + max) * temperature / softcap_;
        at_target *= 1.0f - capped * capped;
      }
    }
    const float values[] = {max, log_sum, temperature, -dlogp, -dentropy, entropy, at_target};
    for (int64_t k = 0; k < 7; k++) of(k)[i] = values[k];
  }

  Buffer<float> values_;
  Buffer<int64_t> targets_;
  int64_t padded_;
  float softcap_;
  bool entropy_;
};

// Inf and NaN become 0 in words of the weight. With candidate sets: a row of the weight outside of a token's set has
// dz = 0 there, and 0 * NaN would be NaN. A token that keeps such a row has NaN scores, which make its dz NaN.
void drop_nonfinite(uint32_t* words, int64_t count, Operand kind) {
  for (int64_t k = 0; k < count; k++) {
    const bool low = (words[k] & 0x7f80u) == 0x7f80u, high = (words[k] & 0x7f800000u) == 0x7f800000u;
    if (per_word(kind) == 2) {
      words[k] &= (low ? 0xffff0000u : 0xffffffffu) & (high ? 0x0000ffffu : 0xffffffffu);
    } else if (high) {
      words[k] = 0;
    }
  }
}

// Hidden states as b of dW = dz^T h: for each chunk of tokens, 64 columns, and piece, [tokens in words][64].
Buffer<uint32_t> packed_columns(const Plan& plan, const HeadInputs& inputs, const GradientInputs& g,
                                const Sizes& sizes) {
  const int64_t padded = g.dweight == nullptr ? 0 : sizes.padded, width = sizes.column_panels * kLanes;
  const int64_t chunks = ceil_div(padded, sizes.chunk), workers = worker_count(chunks), words = width / sizes.pair;
  const int64_t row = sizes.pieces * words;
  const WeightRows states = inputs.gradient_states();
  Buffer<uint32_t> columns(sizes.pieces * (padded / sizes.pair) * width);
  const WorkerBuffers<uint32_t> packed(workers, sizes.chunk * row);
  parallel_tasks(chunks, workers, [&](int64_t task, int64_t worker) {
    uint32_t* rows = packed.of(worker);
    const int64_t first = task * sizes.chunk, count = std::min(sizes.chunk, padded - first);
    for (int64_t i = 0; i < count; i++) {
      uint32_t* to = rows + i * row;
      if (first + i >= g.count) {
        std::fill(to, to + row, 0u);
        continue;
      }
      plan.kernels->pack_rows(states.from(g.rows[first + i]), 1, states.dtype, plan.kind, {to, row, words}, words);
    }
    uint32_t* out = columns.get() + sizes.pieces * (first / sizes.pair) * width;
    for (int64_t p = 0; p < sizes.column_panels; p++) {
      for (int64_t piece = 0; piece < sizes.pieces; piece++, out += count / sizes.pair * kLanes) {
        plan.kernels->interleave_panel(rows + piece * words, count, row, p * kLanes, words, plan.kind, out);
      }
    }
  });
  return columns;
}

struct Scratch {
  // of a group: its weight; dz of a chunk as a of the dH product, [chunk][along_stride]; a panel of the weight as b of
  // it, [pieces][along_depth][64]; panels of dW of each block
  WorkerBuffers<uint32_t> weight, along, panel;
  WorkerBuffers<float> sums;
  Buffer<float> dhidden;  // [sums][hidden_panels][padded][64]
  // of a block: dz of a chunk as a of the dW product, [block_rows][across_stride]; dz of a panel before it is transposed
  WorkerBuffers<uint32_t> across;
  WorkerBuffers<float> before;
  // of a tile that is computed again: z, the maxima, the exponentials
  WorkerBuffers<float> tile, tile_offsets;
  WorkerBuffers<char> tile_exponentials;
  // of a chunk of tokens that are not neighbours: exponentials, [block_rows][gathered_stride], and their maxima
  WorkerBuffers<char> gathered;
  WorkerBuffers<float> gathered_offsets;

  static Scratch of(const Plan& plan, const HeadInputs& inputs, const GradientInputs& g, const Sizes& sizes) {
    const int64_t rows = plan.block_rows, workers = sizes.workers, size = plan.kept_size();
    const int64_t for_dhidden = g.dhidden != nullptr, for_dweight = g.dweight != nullptr;
    return {
        .weight = WorkerBuffers<uint32_t>(workers, plan.group * WeightBlock::buffer_words(plan)),
        .along = WorkerBuffers<uint32_t>(workers, for_dhidden * sizes.chunk * sizes.along_stride),
        .panel = WorkerBuffers<uint32_t>(workers, for_dhidden * sizes.pieces * sizes.along_depth * kLanes),
        .sums = WorkerBuffers<float>(workers, for_dweight * plan.group * sizes.waiting_panels() * rows * kLanes),
        .dhidden = Buffer<float>(for_dhidden * sizes.sums * sizes.hidden_panels * sizes.padded * kLanes),
        .across = WorkerBuffers<uint32_t>(workers, for_dweight * rows * sizes.across_stride),
        .before = WorkerBuffers<float>(workers, for_dhidden * sizes.pieces * (rows / sizes.pair) * kLanes),
        .tile = WorkerBuffers<float>(workers, tile_size(plan, inputs)),
        .tile_offsets = WorkerBuffers<float>(workers, kLanes),
        .tile_exponentials = WorkerBuffers<char>(workers, rows * kLanes * size),
        .gathered = WorkerBuffers<char>(workers, sizes.dense ? 0 : rows * sizes.gathered_stride * size),
        .gathered_offsets = WorkerBuffers<float>(workers, sizes.dense ? 0 : sizes.chunk),
    };
  }
};

// Scoring beside the sums of dH. Blocks are merged in the order of `score_head`, to the same bits. The thread that has
// scored the next block of this order merges it, and those after it that are scored already.
class Scoring {
 public:
  Scoring(const Plan& plan, const HeadInputs& inputs, bool with_entropy, float* offsets, int64_t workers)
      : plan_(plan), splits_(split_count(plan)), panels_(ceil_div(inputs.tokens, kLanes)),
        ahead_(plan.group * (workers + kMostSums)), offsets_(offsets),
        partials_(splits_ + ahead_, inputs, with_entropy), scored_(ahead_) {}

  // Waits while too many blocks before it are not merged.
  void wait_for_room(int64_t block) const { wait_until_at_least(merged_, block - ahead_ + 1); }

  // Where a block's statistics are put: the first one of a split begins its sums.
  TileStatistics at(int64_t block, int64_t panel) const {
    const int64_t split = split_of(plan_, block);
    return partials_.at(begins(block, split) ? split : splits_ + block % ahead_, panel);
  }

  // z of the targets in a tile, and its maxima if its exponentials are kept.
  void take(const HeadInputs& inputs, int64_t block, int64_t panel, const float* z, bool keeps) const {
    partials_.take_targets(plan_, inputs, block, panel, z);
    const float* const max = at(block, panel).max;
    if (keeps) std::copy(max, max + kLanes, offsets_ + inputs.offset_at(block, panel));
  }

  void merge(int64_t block) {
    const std::lock_guard<std::mutex> lock(merging_);
    scored_[block % ahead_] = true;
    for (int64_t next = merged_; next < plan_.blocks && scored_[next % ahead_]; merged_ = ++next) {
      scored_[next % ahead_] = false;
      const int64_t split = split_of(plan_, next);
      if (begins(next, split)) continue;
      for (int64_t panel = 0; panel < panels_; panel++) {
        plan_.kernels->merge_tile(partials_.at(split, panel), at(next, panel));
      }
    }
  }

  void finish(const HeadInputs& inputs, const Statistics& out) const { partials_.finish(plan_, inputs, out); }

 private:
  bool begins(int64_t block, int64_t split) const { return block == split_begin(plan_, split); }

  const Plan& plan_;
  int64_t splits_, panels_, ahead_;
  float* offsets_;     // of kept exponentials: see `GradientInputs`
  Partials partials_;  // of splits, then of blocks that are not merged yet
  std::vector<char> scored_;
  std::mutex merging_;
  std::atomic<int64_t> merged_{0};
};

// What a group reads, and where it is worked on.
struct Call {
  const Plan& plan;
  const HeadInputs& inputs;
  const GradientInputs& gradient;
  Scoring* scoring;  // or nullptr
  Sizes sizes;
  Lanes lanes;
  TokenPanels recomputed;
  Buffer<uint32_t> columns;
  Scratch scratch;

  static Call of(const Plan& plan, const HeadInputs& inputs, const GradientInputs& g, Scoring* scoring) {
    const Sizes sizes = Sizes::of(plan, inputs, g);
    const int64_t panels = ceil_div(inputs.tokens, kLanes);
    return {plan, inputs, g, scoring, sizes, Lanes(inputs, g, sizes.padded, !targets_apart(inputs, g)),
            TokenPanels(plan, inputs, scoring != nullptr ? 0 : std::min(inputs.kept_panels(), panels), panels),
            packed_columns(plan, inputs, g, sizes), Scratch::of(plan, inputs, g, sizes)};
  }

  // Works on all groups.
  void run() const;
};

// Exponentials [rows, 64 lanes with `stride` elements a row], and the maxima that were subtracted, [64].
struct Exponentials {
  char* values;
  int64_t stride;
  const float* offsets;
};

// Those of a panel of all tokens: stored, or computed again; or for the first time.
Exponentials exponentials_of_panel(const Call& call, const WeightBlock& weight, int64_t block, int64_t panel,
                                   int64_t worker) {
  const HeadInputs& inputs = call.inputs;
  char* const kept = inputs.kept_tile(call.plan, block, panel);
  if (kept != nullptr && call.scoring == nullptr) {
    return {kept, kLanes, call.gradient.offsets + inputs.offset_at(block, panel)};
  }
  float rest[kLanes];
  TileStatistics tile{call.scratch.tile_offsets.of(worker), rest, nullptr};
  if (call.scoring != nullptr) tile = call.scoring->at(block, panel);
  float* const z = call.scratch.tile.of(worker);
  char* values = kept != nullptr ? kept : call.scratch.tile_exponentials.of(worker);
  exponentials_of_tile(call.plan, inputs, weight, call.recomputed, block, panel, z, tile, values, {});
  if (call.scoring != nullptr) call.scoring->take(inputs, block, panel, z, kept != nullptr);
  return {values, kLanes, tile.max};
}

// Those of tokens [begin, end) with a gradient, from the panels that hold them.
Exponentials gather(const Call& call, const WeightBlock& weight, int64_t block, int64_t begin, int64_t end,
                    int64_t worker) {
  const Plan& plan = call.plan;
  const int64_t rows = plan.rows_of(block), size = plan.kept_size(), stride = call.sizes.gathered_stride;
  const int64_t* tokens = call.gradient.rows;
  char* values = call.scratch.gathered.of(worker);
  float* offsets = call.scratch.gathered_offsets.of(worker);
  for (int64_t i = begin; i < end;) {
    const int64_t panel = tokens[i] / kLanes, start = i;
    const Exponentials tile = exponentials_of_panel(call, weight, block, panel, worker);
    uint64_t mask = 0;
    for (; i < end && tokens[i] / kLanes == panel; i++) {
      const int64_t lane = tokens[i] % kLanes;
      mask |= uint64_t{1} << lane;
      offsets[i - begin] = tile.offsets[lane];
    }
    plan.kernels->compress_tile(tile.values, rows, plan.kept, mask, values + (start - begin) * size, stride);
  }
  const int64_t used = end - begin, padding = round_up(used, kLanes) - used;
  std::fill(offsets + used, offsets + used + padding, 0.0f);
  for (int64_t r = 0; r < rows; r++) std::memset(values + (r * stride + used) * size, 0, padding * size);
  return {values, stride, offsets};
}

// Some neighbours among the entries of a call.
struct EntryRange {
  int64_t begin, end;
};

EntryRange entries_of_block(const Call& call, int64_t block) {
  const Entries& entries = call.gradient.entries;
  const int64_t rows = call.plan.block_rows;
  const auto at = [&](int64_t k) {
    return std::lower_bound(entries.ids, entries.ids + entries.count, k,
                            [&](int64_t id, int64_t which) { return id / rows < which; }) - entries.ids;
  };
  return entries.count == 0 ? EntryRange{0, 0} : EntryRange{at(block), at(block + 1)};
}

// Those of a panel of tokens, from `first` on.
EntryRange entries_of_panel(const Call& call, EntryRange block, int64_t first) {
  const int32_t* tokens = call.gradient.entries.tokens;
  const auto at = [&](int64_t token) {
    return std::lower_bound(tokens + block.begin, tokens + block.end, token) - tokens;
  };
  return block.begin == block.end ? block : EntryRange{at(first), at(first + kLanes)};
}

// With an exponential of 0 an entry's derivative by the formula is 0.
void clear_exponentials(const Call& call, EntryRange range, int64_t first_token, int64_t first_row,
                        const Exponentials& tile) {
  const Entries& entries = call.gradient.entries;
  const int64_t size = call.plan.kept_size();
  for (int64_t k = range.begin; k < range.end; k++) {
    const int64_t row = entries.ids[k] - first_row, lane = entries.tokens[k] - first_token;
    std::memset(tile.values + (row * tile.stride + lane) * size, 0, size);
  }
}

// Write the entries into the results of `gradient_tile`, which are described there.
void put_entries(const Call& call, EntryRange range, int64_t first_token, int64_t first_row, Packed across,
                 Packed along, float* row_sums) {
  const Entries& entries = call.gradient.entries;
  const int64_t pair = call.sizes.pair, size = 4 / pair;
  for (int64_t k = range.begin; k < range.end; k++) {
    const int64_t row = entries.ids[k] - first_row, lane = entries.tokens[k] - first_token;
    const float* const scale = call.inputs.row_scale;
    const float sum = entries.values[k];
    float rest = scale == nullptr ? sum : sum * scale[first_row + row];
    for (int64_t piece = 0; piece < call.sizes.pieces; piece++) {
      const uint16_t narrow = bf16_of(rest);
      const void* const word = pair == 2 ? static_cast<const void*>(&narrow) : &rest;
      if (across.words != nullptr) {
        uint32_t* const to = across.words + row * across.stride + piece * across.piece;
        std::memcpy(reinterpret_cast<char*>(to) + lane * size, word, size);
      }
      if (along.words != nullptr) {
        uint32_t* const to = along.words + row / pair * along.stride + piece * along.piece + lane;
        std::memcpy(reinterpret_cast<char*>(to) + row % pair * size, word, size);
      }
      rest -= from_bf16(narrow);
    }
    if (row_sums != nullptr) row_sums[row] += sum;
  }
}

// Columns of the low-rank weight's gradient, as many as `lanes` from `column` on, += a block's sums [block_rows, 64], in
// which dz was multiplied by row_scale.
void add_to_low_rank(const Call& call, int64_t block, int64_t column, int64_t lanes, const float* sums) {
  const int64_t first = block * call.plan.block_rows, rank = call.plan.rank;
  const float* const row_scale = call.inputs.row_scale;
  for (int64_t r = 0; r < call.plan.rows_of(block); r++, sums += kLanes) {
    const float inverse = row_scale == nullptr ? 1.0f : 1.0f / row_scale[first + r];
    float* const out = static_cast<float*>(call.gradient.dweight) + (first + r) * rank + column;
    for (int64_t j = 0; j < lanes; j++) out[j] += sums[j] * inverse;
  }
}

// A block's rows of dW from dz of `length` tokens: the products of all tokens are summed in fp32 and rounded once.
void add_to_dweight(const Call& call, int64_t block, int64_t begin, int64_t length, int64_t worker, Ahead ahead) {
  const Plan& plan = call.plan;
  const Sizes& sizes = call.sizes;
  const GradientInputs& g = call.gradient;
  const int64_t rows = plan.rows_of(block), item = item_bytes(g.dweight_dtype), depth = length / sizes.pair;
  const Left dz{call.scratch.across.of(worker), sizes.across_stride, sizes.chunk / sizes.pair};
  const uint32_t* columns = call.columns.get() + sizes.pieces * (begin / sizes.pair) * sizes.column_panels * kLanes;
  const int64_t width = call.inputs.gradient_weight().columns;
  char* out = static_cast<char*>(g.dweight) + block * plan.block_rows * width * item;
  float* const sums = call.scratch.sums.of(worker) +
                      block % plan.group * sizes.waiting_panels() * plan.block_rows * kLanes;
  for (int64_t p = 0; p < sizes.column_panels; p++) {
    float* sum = sums + p % sizes.waiting_panels() * plan.block_rows * kLanes;
    const int64_t lanes = std::min(kLanes, width - p * kLanes);
    const Right hidden{columns + p * sizes.pieces * depth * kLanes, depth * kLanes, lanes};
    plan.multiply(rows, depth, dz, hidden, sum, begin > 0, ahead.part(p, sizes.column_panels));
    if (begin + length < sizes.padded) continue;
    if (call.inputs.has_low_rank()) {
      add_to_low_rank(call, block, p * kLanes, lanes, sum);
    } else {
      plan.kernels->store_gradient(sum, rows, lanes, g.dweight_dtype, out + p * kLanes * item, width);
    }
  }
}

// dz of a chunk of tokens, from `begin` on, for a block; its rows of dW and db.
void work_on_block(const Call& call, const WeightBlock& weight, int64_t block, int64_t begin, int64_t worker) {
  const Plan& plan = call.plan;
  const Sizes& sizes = call.sizes;
  const Scratch& scratch = call.scratch;
  const GradientInputs& g = call.gradient;
  const bool need_hidden = g.dhidden != nullptr, need_weight = g.dweight != nullptr;
  const int64_t rows = plan.rows_of(block), first = block * plan.block_rows;
  const int64_t length = std::min(sizes.chunk, sizes.padded - begin);
  uint32_t* const along = scratch.along.of(worker) + block % plan.group * plan.block_rows / sizes.pair;
  float* const before = scratch.before.of(worker);
  const float* const row_scale = call.inputs.row_scale == nullptr ? nullptr : call.inputs.row_scale + first;
  float* row_sums = g.dbias == nullptr ? nullptr : g.dbias + first;
  if (row_sums != nullptr && begin == 0) std::fill(row_sums, row_sums + rows, 0.0f);
  const EntryRange entries = entries_of_block(call, block);
  Exponentials gathered{};
  if (!sizes.dense) gathered = gather(call, weight, block, begin, std::min(begin + length, g.count), worker);
  for (int64_t lane = 0; lane < length; lane += kLanes) {
    const Exponentials tile =
        sizes.dense ? exponentials_of_panel(call, weight, block, (begin + lane) / kLanes, worker)
                    : Exponentials{gathered.values + lane * plan.kept_size(), gathered.stride,
                                   gathered.offsets + lane};
    int32_t targets[kLanes];
    for (int64_t j = 0; j < kLanes; j++) {
      const int64_t row = call.lanes.target(begin + lane + j) - first;
      targets[j] = row >= 0 && row < rows ? static_cast<int32_t>(row) : -1;
    }
    const Packed dz{need_weight ? scratch.across.of(worker) + lane / sizes.pair : nullptr, sizes.across_stride,
                    sizes.chunk / sizes.pair};
    const int64_t depth = ceil_div(rows, sizes.pair);
    const Packed dz_along{need_hidden ? reinterpret_cast<uint32_t*>(before) : nullptr, kLanes, depth * kLanes};
    const EntryRange here = entries_of_panel(call, entries, begin + lane);
    clear_exponentials(call, here, begin + lane, first, tile);
    plan.kernels->gradient_tile(tile.values, plan.kept, tile.stride, rows, plan.kind,
                                call.lanes.at(begin + lane, tile.offsets, targets, row_scale), dz,
                                dz_along, row_sums);
    put_entries(call, here, begin + lane, first, dz, dz_along, row_sums);
    for (int64_t piece = 0; need_hidden && piece < sizes.pieces; piece++) {
      plan.kernels->transpose_tile(before + piece * depth * kLanes, depth, kLanes,
                                   reinterpret_cast<float*>(along + lane * sizes.along_stride) +
                                       piece * sizes.along_depth, sizes.along_stride);
    }
  }
  if (!need_weight) return;
  // the block that this worker probably takes next, while the last tokens are multiplied
  const bool fetches = sizes.looks_ahead && need_hidden && begin + length == sizes.padded;
  const bool ends_group = (block + 1) % plan.group == 0;
  const int64_t next = block + 1 + (ends_group ? (sizes.workers - 1) * plan.group : 0);
  add_to_dweight(call, block, begin, length, worker, fetches ? weight_ahead(plan, call.inputs, next) : Ahead{});
}

// dH += dz [chunk, group] W [group, columns]. `weights`: of each of its blocks. `added`: how many groups were added to
// each panel of the strips of a sum.
void add_to_dhidden(const Call& call, int64_t group, const WeightBlock* weights, int64_t begin,
                    std::atomic<int64_t>* added, int64_t worker) {
  const Plan& plan = call.plan;
  const Sizes& sizes = call.sizes;
  const int64_t first = group * plan.group, last = std::min(first + plan.group, plan.blocks) - 1;
  const int64_t words = plan.block_rows / sizes.pair, sum = group % sizes.sums, before = group / sizes.sums;
  const int64_t depth = (last - first) * words + ceil_div(plan.rows_of(last), sizes.pair);
  const int64_t length = std::min(sizes.chunk, sizes.padded - begin);
  const uint32_t* const along = call.scratch.along.of(worker);
  uint32_t* const panel = call.scratch.panel.of(worker);
  added += (sum * sizes.chunks + begin / sizes.chunk) * sizes.strips * sizes.hidden_panels;
  for (int64_t token = 0; token < length; token += sizes.strip) {
    const int64_t tokens = std::min(sizes.strip, length - token), next = token + sizes.strip;
    Ahead ahead{};
    if (sizes.looks_ahead && next < length) {
      ahead = {along + next * sizes.along_stride, std::min(sizes.strip, length - next) * sizes.along_stride};
    }
    for (int64_t p = 0; p < sizes.hidden_panels; p++, added++) {
      const HiddenPanel columns = sizes.hidden_panel(plan, p);
      for (int64_t block = first; block <= last; block++) {
        const Left& weight = columns.low ? weights[block - first].low_weight : weights[block - first].weight;
        const int64_t whole = round_up(plan.rows_of(block), sizes.pair);
        for (int64_t piece = 0; piece < sizes.pieces; piece++) {
          uint32_t* const to = panel + (piece * sizes.along_depth + (block - first) * words) * kLanes;
          plan.kernels->interleave_panel(weight.words + piece * weight.piece, whole, weight.stride, columns.first,
                                         columns.low ? plan.rank_words : plan.words, plan.kind, to);
          if (call.inputs.set_ranges != nullptr) drop_nonfinite(to, whole / sizes.pair * kLanes, plan.kind);
        }
      }
      const Left dz{along + token * sizes.along_stride, sizes.along_stride, sizes.along_depth};
      const Right right{panel, sizes.along_depth * kLanes, columns.count};
      float* const out =
          call.scratch.dhidden.get() + ((sum * sizes.hidden_panels + p) * sizes.padded + begin + token) * kLanes;
      wait_until_at_least(*added, before);
      plan.multiply(tokens, depth, dz, right, out, before > 0, ahead.part(p, sizes.hidden_panels));
      ++*added;
    }
  }
}

void work_on_group(const Call& call, int64_t group, std::atomic<int64_t>* added, int64_t worker) {
  const Plan& plan = call.plan;
  const HeadInputs& inputs = call.inputs;
  const bool need_hidden = call.gradient.dhidden != nullptr;
  const int64_t first = group * plan.group, end = std::min(first + plan.group, plan.blocks);
  if (call.scoring != nullptr) call.scoring->wait_for_room(end - 1);
  WeightBlock weights[kMostBlocks]{};
  for (int64_t block = first; block < end; block++) {
    if (!need_hidden && inputs.kept_panels() * kLanes >= inputs.tokens) break;
    uint32_t* const buffer = call.scratch.weight.of(worker) + (block - first) * WeightBlock::buffer_words(plan);
    weights[block - first] = WeightBlock::of(plan, inputs, block, buffer);
  }
  for (int64_t begin = 0; begin < call.sizes.padded; begin += call.sizes.chunk) {
    for (int64_t block = first; block < end; block++) work_on_block(call, weights[block - first], block, begin, worker);
    if (need_hidden) add_to_dhidden(call, group, weights, begin, added, worker);
  }
  for (int64_t block = first; call.scoring != nullptr && block < end; block++) call.scoring->merge(block);
}

void store_dhidden(const Call& call) {
  const Sizes& sizes = call.sizes;
  const int64_t padded = sizes.padded;
  parallel_tasks(padded / kLanes, worker_count(padded / kLanes), [&](int64_t panel, int64_t) {
    for (int64_t token = panel * kLanes; token < std::min((panel + 1) * kLanes, call.gradient.count); token++) {
      float* out = call.gradient.dhidden + token * call.plan.dhidden_columns();
      for (int64_t p = 0, count; p < sizes.hidden_panels; p++, out += count) {
        const float* from = call.scratch.dhidden.get() + (p * padded + token) * kLanes;
        count = sizes.hidden_panel(call.plan, p).count;
        std::copy(from, from + count, out);
        for (int64_t sum = 1; sum < sizes.sums; sum++) {
          from += sizes.hidden_panels * padded * kLanes;
          for (int64_t j = 0; j < count; j++) out[j] += from[j];
        }
      }
    }
  });
}

// dH [count, hidden + rank] from the sums of tokens, without their targets.
void dhidden_of_sums(const Plan& plan, const GradientInputs& g, const Lanes& lanes) {
  const int64_t panels = ceil_div(g.count, kLanes), columns = plan.dhidden_columns();
  parallel_tasks(panels, worker_count(panels), [&](int64_t panel, int64_t) {
    for (int64_t i = panel * kLanes; i < std::min((panel + 1) * kLanes, g.count); i++) {
      const GradientLanes lane = lanes.at(i, nullptr, nullptr, nullptr);
      const float* const sums = g.sums.values + g.rows[i] * columns;
      const float factor = std::exp((g.sums.offset[g.rows[i]] - *lane.max) - *lane.log_sum);
      // in this order: the factor may be e48, and its product with the coefficient too large
      for (int64_t k = 0; k < columns; k++) g.dhidden[i * columns + k] = factor * sums[k] * *lane.minus_dlogp;
    }
  });
}

// The part of the targets, to the digits of fp32: of a low-rank gradient it is most.
void add_targets(const Plan& plan, const HeadInputs& inputs, const GradientInputs& g, const Lanes& lanes) {
  const int64_t panels = ceil_div(g.count, kLanes), workers = worker_count(panels);
  const int64_t words = round_up(plan.hidden, 16), rank = plan.rank;
  const WorkerBuffers<uint32_t> rows(workers, std::max(words, round_up(rank, 16)));
  parallel_tasks(g.dhidden == nullptr ? 0 : panels, workers, [&](int64_t panel, int64_t worker) {
    for (int64_t i = panel * kLanes; i < std::min((panel + 1) * kLanes, g.count); i++) {
      const int64_t target = lanes.target(i);
      if (target < 0) continue;
      uint32_t* const row = rows.of(worker);
      float* const out = g.dhidden + i * plan.dhidden_columns();
      const float factor = lanes.target_value(i) * (inputs.row_scale == nullptr ? 1.0f : inputs.row_scale[target]);
      plan.kernels->pack_rows(inputs.weight.from(target), 1, inputs.hidden.dtype, Operand::fp32, {row, 0, 0}, words);
      plan.kernels->add_row(Dtype::fp32, out, row, factor, plan.hidden);
      if (!inputs.has_low_rank()) continue;
      pack_low_weight(plan, inputs, target, 1, Operand::fp32, {row, 0, 0}, round_up(rank, 16));
      plan.kernels->add_row(Dtype::fp32, out + plan.hidden, row, factor, rank);
    }
  });
  for (int64_t i = 0; i < g.count; i++) {  // tokens may share a target
    const int64_t target = lanes.target(i);
    if (target < 0) continue;
    const float dz = lanes.target_value(i);
    if (g.dbias != nullptr) g.dbias[target] += dz;
    if (g.dweight == nullptr) continue;
    float* const row = static_cast<float*>(g.dweight) + target * rank;
    const float* const low_hidden = inputs.low_hidden + g.rows[i] * rank;
    for (int64_t j = 0; j < rank; j++) row[j] += dz * low_hidden[j];
  }
}

void Call::run() const {
  std::vector<std::atomic<int64_t>> added(sizes.sums * sizes.chunks * sizes.strips * sizes.hidden_panels);
  parallel_tasks(sizes.groups, sizes.workers,
                 [&](int64_t group, int64_t worker) { work_on_group(*this, group, added.data(), worker); });
  if (gradient.dhidden != nullptr) store_dhidden(*this);
}

}  // namespace

ScratchPlan ScratchPlan::of(const Plan& plan, int64_t tokens, int64_t row_bytes, int64_t budget) {
  const int64_t item = 4 / per_word(plan.kind) * plan.pieces(), kept = plan.kept_size(), threads = thread_count();
  const int64_t panels = ceil_div(tokens, kLanes), padded = panels * kLanes;
  const int64_t columns = round_up(plan.hidden, kLanes) + round_up(plan.rank, kLanes);
  ScratchPlan scratch{};
  // of a thread: weight, dz in both orders and a panel; tiles and exponentials; dW; the low-rank weight in fp32
  const int64_t chunk = std::min(padded, plan.token_chunk), rows = plan.group * plan.block_rows;
  int64_t per_thread = rows * (columns + chunk + kLanes) * item;
  per_thread += plan.block_rows * (chunk * (item + kept) + (3 * 4 + item) * kLanes);
  if (padded > chunk) per_thread += rows * columns * 4;
  per_thread += rows * round_up(plan.rank, 16) * 4;
  scratch.fixed_bytes = threads * per_thread;
  const int64_t sum_bytes = padded * columns * 4;  // of dH, as many as there may be, so that more tokens never need less
  scratch.fixed_bytes += std::min(kMostSums * sum_bytes, std::max(kSumBytes, sum_bytes));
  // hidden states as gathered and as packed, fp32 dH as returned; partial statistics; the low-rank hidden states twice
  const int64_t ranges = split_count(plan) + plan.group * (threads + kMostSums);
  scratch.fixed_bytes += padded * (columns * (2 * item + 4) + 12 * ranges + 8 * round_up(plan.rank, 16));
  const int64_t fits = row_bytes / (kLanes * kept);
  scratch.fixed_bytes += std::min(fits, panels) * kLanes * plan.blocks * 4;
  const int64_t panel_bytes = kLanes * (plan.vocab * kept + plan.blocks * 4);
  const int64_t left = std::max<int64_t>(budget - scratch.fixed_bytes, 0) / panel_bytes;
  const int64_t spill = std::min(left, std::max<int64_t>(panels - fits, 0));
  scratch.spill_bytes = spill * kLanes * plan.vocab * kept;
  scratch.kept_tokens = std::min((fits + spill) * kLanes, tokens);
  return scratch;
}

void score_and_sum_head(const Plan& plan, const HeadInputs& inputs, const Statistics& out, float* offsets,
                        const HeadSums& sums) {
  std::vector<int64_t> rows(inputs.tokens);
  std::iota(rows.begin(), rows.end(), 0);
  GradientInputs g{};
  g.rows = rows.data(), g.count = inputs.tokens, g.sums = sums, g.dhidden = sums.values;
  Scoring scoring(plan, inputs, out.with_entropy, offsets, worker_count(plan.blocks));
  Call::of(plan, inputs, g, &scoring).run();
  scoring.finish(inputs, out);
}

void gradient_of_head(const Plan& plan, const HeadInputs& inputs, const GradientInputs& gradient) {
  const bool sums = gradient.sums.values != nullptr;
  GradientInputs by_products = gradient;
  if (sums) by_products.dhidden = nullptr;
  const bool any = by_products.dhidden != nullptr || gradient.dweight != nullptr || gradient.dbias != nullptr;
  if (any) Call::of(plan, inputs, by_products, nullptr).run();
  if (!targets_apart(inputs, gradient)) return;
  const Lanes lanes(inputs, gradient, round_up(gradient.count, kLanes), true);
  if (sums && gradient.dhidden != nullptr) dhidden_of_sums(plan, gradient, lanes);
  add_targets(plan, inputs, gradient, lanes);
}

}  // namespace grpo
