// dW, dH and db from the kept (or recomputed) exponentials.
//
// A superblock of the vocabulary is computed in two rounds. First, a thread takes a block of it: dz of all tokens,
// and the block's rows of dW, written once. Then a thread takes a tile of dH and adds the superblock to it.
// Neither result depends on which thread took what.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "head.h"

namespace grpo {
namespace {

// Vocabulary blocks of one product of the second round. A superblock is a multiple of it, or shorter on every machine.
constexpr int64_t kBlocksOfAProduct = 8;

// Inputs of the tiles for each token, in the order of `rows`, padded to whole panels by tokens without a gradient.
class Lanes {
 public:
  Lanes(const HeadInputs& inputs, const GradientInputs& g, int64_t padded)
      : values_(7 * padded), targets_(padded), padded_(padded), softcap_(inputs.softcap),
        entropy_(g.dentropy != nullptr) {
    for (int64_t i = 0; i < padded; i++) fill(inputs, g, i);
  }

  int64_t target(int64_t i) const { return targets_.get()[i]; }

  GradientLanes at(int64_t lane, const float* offset, const int32_t* target) const {
    return {offset,   of(0) + lane, of(1) + lane, of(2) + lane, of(3) + lane, entropy_ ? of(4) + lane : nullptr,
            of(5) + lane, of(6) + lane, target, softcap_};
  }

 private:
  float* of(int64_t which) const { return values_.get() + which * padded_; }

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

// Hidden states as b of dW = dz^T h: for each chunk of tokens and 64 columns, [tokens in words][64].
class ColumnPanels {
 public:
  ColumnPanels(const Plan& plan, const HeadInputs& inputs, const GradientInputs& g, int64_t padded)
      : chunk_(std::clamp(padded, kLanes, plan.token_chunk)), panels_(ceil_div(plan.hidden, kLanes)),
        pair_(per_word(plan.kind)), words_(padded / pair_ * panels_ * kLanes) {
    const int64_t chunks = ceil_div(padded, chunk_), workers = worker_count(chunks);
    const int64_t width = panels_ * kLanes / pair_;
    const int64_t row_bytes = plan.hidden * (inputs.compute == Dtype::fp32 ? 4 : 2);
    const Buffer<uint32_t> packed(workers * chunk_ * width);
    parallel_tasks(chunks, workers, [&](int64_t task, int64_t worker) {
      uint32_t* rows = packed.get() + worker * chunk_ * width;
      const int64_t first = task * chunk_, count = std::min(chunk_, padded - first);
      for (int64_t i = 0; i < count; i++) {
        uint32_t* to = rows + i * width;
        if (first + i >= g.count) {
          std::fill(to, to + width, 0u);
          continue;
        }
        const char* row = static_cast<const char*>(inputs.hidden) + g.rows[first + i] * row_bytes;
        plan.kernels->pack_rows(row, inputs.compute, plan.hidden, 1, plan.hidden, inputs.compute, plan.kind, to, width);
      }
      uint32_t* out = words_.get() + first / pair_ * panels_ * kLanes;
      for (int64_t p = 0; p < panels_; p++) {
        plan.kernels->interleave_panel(rows, count, width, p * kLanes, plan.kind, out + p * (count / pair_) * kLanes);
      }
    });
  }

  // `tokens` of the chunk that begins at token `first`.
  const uint32_t* at(int64_t first, int64_t tokens, int64_t panel) const {
    return words_.get() + (first / pair_ * panels_ + panel * (tokens / pair_)) * kLanes;
  }

 private:
  int64_t chunk_, panels_, pair_;
  Buffer<uint32_t> words_;
};

// Inf and NaN become 0 in rows [rows][words] of W^T. With candidate sets: a row of the weight outside of a token's set has
// dz = 0 there, and 0 * NaN would be NaN. A token that keeps such a row has NaN scores, which make its dz NaN.
void drop_nonfinite(uint32_t* first, int64_t rows, int64_t words, int64_t stride, Operand kind) {
  for (int64_t r = 0; r < rows; r++) {
    uint32_t* row = first + r * stride;
    if (kind == Operand::bf16) {
      for (int64_t k = 0; k < words; k++) {
        const uint32_t low = (row[k] & 0x7f80u) == 0x7f80u ? 0xffff0000u : 0xffffffffu;
        const uint32_t high = (row[k] & 0x7f800000u) == 0x7f800000u ? 0x0000ffffu : 0xffffffffu;
        row[k] &= low & high;
      }
    } else {
      for (int64_t k = 0; k < words; k++) row[k] = (row[k] & 0x7f800000u) == 0x7f800000u ? 0u : row[k];
    }
  }
}

class Gradient {
 public:
  Gradient(const Plan& plan, const HeadInputs& inputs, const GradientInputs& g)
      : plan_(plan), in_(inputs), g_(g), panels_(ceil_div(inputs.tokens, kLanes)),
        kept_panels_(inputs.in_gradient.panels + inputs.spill.panels), padded_(round_up(g.count, kLanes)),
        chunk_(std::min(plan.token_chunk, padded_)), pair_(per_word(plan.kind)), dense_(g.count == inputs.tokens),
        column_panels_(ceil_div(plan.hidden, kLanes)),
        superblock_(std::clamp<int64_t>(g.superblock, 1, plan.blocks)),
        workers_(worker_count(superblock_)),
        along_depth_(superblock_ * plan.block_rows / pair_),
        transposed_stride_(along_depth_ + 16),
        across_stride_(chunk_ / pair_ + 16),
        stage_stride_(chunk_ + kLanes),
        sums_(padded_ > chunk_ ? column_panels_ : 1),
        lanes_(inputs, g, padded_),
        recomputed_(plan, inputs, std::min(kept_panels_, panels_), panels_),
        columns_(plan, inputs, g, g.dweight == nullptr ? 0 : padded_),
        along_(g.dhidden == nullptr ? 0 : padded_ * along_depth_),
        transposed_(g.dhidden == nullptr ? 0 : plan.words * pair_ * transposed_stride_),
        dhidden_(g.dhidden == nullptr ? 0 : padded_ * plan.hidden),
        weights_(workers_ * plan.block_rows * plan.stride),
        across_(g.dweight == nullptr ? 0 : workers_ * plan.block_rows * across_stride_),
        sum_(g.dweight == nullptr ? 0 : workers_ * sums_ * plan.block_rows * kLanes),
        tiles_(workers_ * tile_size(plan, inputs)),
        exponentials_(workers_ * plan.block_rows * kLanes),
        stage_(dense_ ? 0 : workers_ * plan.block_rows * stage_stride_),
        stage_offsets_(workers_ * (chunk_ + kLanes)) {}

  void run() {
    for (int64_t block = 0; block < plan_.blocks; block += superblock_) {
      const int64_t count = std::min(superblock_, plan_.blocks - block);
      parallel_tasks(count, workers_, [&](int64_t task, int64_t worker) { first_round(block, block + task, worker); });
      if (g_.dhidden != nullptr) second_round(block, count);
    }
    if (g_.dhidden == nullptr) return;
    const int64_t out_panels = padded_ / kLanes;
    parallel_tasks(out_panels, worker_count(out_panels), [&](int64_t panel, int64_t) {
      const int64_t token = panel * kLanes;
      plan_.kernels->transpose_tile(dhidden_.get() + token * plan_.hidden, plan_.hidden,
                                        std::min(kLanes, g_.count - token), g_.dhidden + token * plan_.hidden,
                                        plan_.hidden);
    });
  }

 private:
  void first_round(int64_t superblock, int64_t block, int64_t worker) {
    const int64_t rows = plan_.rows_of(block), first = block * plan_.block_rows;
    const int64_t column = (block - superblock) * plan_.block_rows / pair_;
    WeightBlock weight{};
    if (g_.dhidden != nullptr || kept_panels_ < panels_) {
      weight = weight_block(plan_, in_, block, weights_.get() + worker * plan_.block_rows * plan_.stride);
    }
    if (g_.dhidden != nullptr) {
      plan_.kernels->transpose_block(weight.words, round_up(rows, 32), weight.stride, plan_.words, plan_.kind,
                                     transposed_.get() + column, transposed_stride_);
      if (in_.set_ranges != nullptr) {
        drop_nonfinite(transposed_.get() + column, plan_.hidden, ceil_div(rows, pair_), transposed_stride_, plan_.kind);
      }
    }
    float* row_sums = g_.dbias == nullptr ? nullptr : g_.dbias + first;
    if (row_sums != nullptr) std::fill(row_sums, row_sums + rows, 0.0f);
    uint32_t* across = g_.dweight == nullptr ? nullptr : across_.get() + worker * plan_.block_rows * across_stride_;
    for (int64_t begin = 0; begin < padded_; begin += chunk_) {
      const int64_t length = std::min(chunk_, padded_ - begin);
      if (!dense_) gather(weight, block, begin, std::min(begin + length, g_.count), worker);
      for (int64_t lane = 0; lane < length; lane += kLanes) {
        const float* offset = nullptr;
        int64_t stride = kLanes;
        const void* kept = dense_ ? tile_of(weight, block, (begin + lane) / kLanes, worker, &offset)
                                  : staged(lane, worker, &offset, &stride);
        int32_t targets[kLanes];
        for (int64_t j = 0; j < kLanes; j++) {
          const int64_t row = lanes_.target(begin + lane + j) - first;
          targets[j] = row >= 0 && row < rows ? static_cast<int32_t>(row) : -1;
        }
        plan_.kernels->gradient_tile(
            kept, plan_.kept, stride, rows, plan_.kind, lanes_.at(begin + lane, offset, targets),
            across == nullptr ? nullptr : across + lane / pair_, across_stride_,
            g_.dhidden == nullptr ? nullptr : along_.get() + (begin + lane) * along_depth_ + column * kLanes, row_sums);
      }
      if (across != nullptr) weight_gradient(block, begin, length, across, worker);
    }
  }

  // dW of a block: all tokens' products are summed in fp32 and rounded once.
  void weight_gradient(int64_t block, int64_t begin, int64_t length, const uint32_t* across, int64_t worker) {
    const int64_t rows = plan_.rows_of(block);
    const int64_t item = g_.dweight_dtype == Dtype::fp32 ? 4 : 2;
    char* out = static_cast<char*>(g_.dweight) + block * plan_.block_rows * plan_.hidden * item;
    for (int64_t p = 0; p < column_panels_; p++) {
      float* sum = sum_.get() + (worker * sums_ + (sums_ > 1 ? p : 0)) * plan_.block_rows * kLanes;
      plan_.multiply(rows, length / pair_, across, across_stride_, columns_.at(begin, length, p), sum, kLanes,
                     begin > 0);
      if (begin + length == padded_) {
        plan_.kernels->store_gradient(sum, rows, std::min(kLanes, plan_.hidden - p * kLanes), g_.dweight_dtype,
                                      out + p * kLanes * item, plan_.hidden);
      }
    }
  }

  // Exponentials of a panel of all tokens: stored, or computed again.
  const void* tile_of(WeightBlock weight, int64_t block, int64_t panel, int64_t worker, const float** offset) {
    if (panel < kept_panels_) {
      *offset = g_.offsets + (block * kept_panels_ + panel) * kLanes;
      return panel < in_.in_gradient.panels ? in_.in_gradient.tile(plan_, block, panel)
                                            : in_.spill.tile(plan_, block, panel - in_.in_gradient.panels);
    }
    const int64_t size = plan_.block_rows * kLanes;
    float* statistics = stage_offsets_.get() + worker * (chunk_ + kLanes) + chunk_;  // beyond a chunk's offsets
    float rest[kLanes];
    void* kept = exponentials_.get() + worker * size;
    exponentials_of_tile(plan_, in_, weight, recomputed_.panel(panel), block, panel,
                         tiles_.get() + worker * tile_size(plan_, in_), {statistics, rest, nullptr}, kept);
    *offset = statistics;
    return kept;
  }

  // Gather the tokens [begin, end) of `rows` from the panels that hold them.
  void gather(WeightBlock weight, int64_t block, int64_t begin, int64_t end, int64_t worker) {
    const int64_t rows = plan_.rows_of(block), size = plan_.kept_size();
    char* stage = stage_.get_bytes() + worker * plan_.block_rows * stage_stride_ * 4;
    float* offsets = stage_offsets_.get() + worker * (chunk_ + kLanes);
    for (int64_t i = begin; i < end;) {
      const int64_t panel = g_.rows[i] / kLanes, start = i;
      const float* offset = nullptr;
      const void* tile = tile_of(weight, block, panel, worker, &offset);
      uint64_t mask = 0;
      for (; i < end && g_.rows[i] / kLanes == panel; i++) {
        const int64_t lane = g_.rows[i] % kLanes;
        mask |= uint64_t{1} << lane;
        offsets[i - begin] = offset[lane];
      }
      plan_.kernels->compress_tile(tile, rows, plan_.kept, mask, stage + (start - begin) * size, stage_stride_);
    }
    const int64_t used = end - begin, padding = round_up(used, kLanes) - used;
    std::fill(offsets + used, offsets + used + padding, 0.0f);
    for (int64_t r = 0; r < rows; r++) std::memset(stage + (r * stage_stride_ + used) * size, 0, padding * size);
  }

  const void* staged(int64_t lane, int64_t worker, const float** offset, int64_t* stride) {
    *offset = stage_offsets_.get() + worker * (chunk_ + kLanes) + lane;
    *stride = stage_stride_;
    return stage_.get_bytes() + worker * plan_.block_rows * stage_stride_ * 4 + lane * plan_.kept_size();
  }

  // dH^T [hidden, tokens] += W^T [hidden, superblock] dz^T [superblock, tokens], a fixed depth at a time: how a
  // micro-kernel sums may depend on the depth, and how long a superblock is depends on the machine.
  void second_round(int64_t superblock, int64_t count) {
    const int64_t last = superblock + count - 1;
    const int64_t vocab_rows = (count - 1) * plan_.block_rows + plan_.rows_of(last);
    const int64_t depth = ceil_div(vocab_rows, pair_), step = kBlocksOfAProduct * plan_.block_rows / pair_;
    // rows of W^T that stay in the second-level cache while the token panels pass; whole tiles of each micro-kernel
    const int64_t height = std::max<int64_t>(448 * 1024 / (4 * std::min(depth, step)) / 48 * 48, 48);
    const int64_t strips = ceil_div(plan_.hidden, height), out_panels = padded_ / kLanes;
    const int64_t group = 8, groups = ceil_div(out_panels, group), tasks = strips * groups;
    parallel_tasks(tasks, worker_count(tasks), [&](int64_t task, int64_t) {
      const int64_t column = task / groups * height, columns = std::min(height, plan_.hidden - column);
      const int64_t first = task % groups * group;
      for (int64_t k = 0; k < depth; k += step) {
        for (int64_t panel = first; panel < std::min(first + group, out_panels); panel++) {
          float* out = dhidden_.get() + (panel * plan_.hidden + column) * kLanes;
          plan_.multiply(columns, std::min(step, depth - k), transposed_.get() + column * transposed_stride_ + k,
                         transposed_stride_, along_.get() + (panel * along_depth_ + k) * kLanes, out, kLanes,
                         superblock > 0 || k > 0);
        }
      }
    });
  }

  const Plan& plan_;
  const HeadInputs& in_;
  const GradientInputs& g_;
  const int64_t panels_, kept_panels_, padded_, chunk_, pair_;
  const bool dense_;  // every token has a gradient
  const int64_t column_panels_, superblock_, workers_, along_depth_, transposed_stride_, across_stride_, stage_stride_;
  const int64_t sums_;  // panels of dW that wait for more tokens
  const Lanes lanes_;
  const TokenPanels recomputed_;
  const ColumnPanels columns_;
  const Buffer<uint32_t> along_, transposed_;
  const Buffer<float> dhidden_;
  const Buffer<uint32_t> weights_, across_;
  const Buffer<float> sum_, tiles_, exponentials_, stage_, stage_offsets_;
};

}  // namespace

ScratchPlan ScratchPlan::of(const Plan& plan, int64_t tokens, int64_t row_bytes, int64_t budget) {
  const int64_t item = 4 / per_word(plan.kind), kept = plan.kept_size(), threads = thread_count();
  const int64_t panels = ceil_div(tokens, kLanes), padded = panels * kLanes, columns = round_up(plan.hidden, kLanes);
  const int64_t block_bytes = plan.block_rows * (padded + columns) * item;  // dz of all tokens, and the weight transposed
  const int64_t wanted = round_up(2 * threads, kBlocksOfAProduct);          // two blocks for each thread
  int64_t affordable = std::max<int64_t>(budget / 6 / block_bytes, 1);
  if (affordable > kBlocksOfAProduct) affordable -= affordable % kBlocksOfAProduct;

  ScratchPlan found{};
  found.superblock = std::min({wanted, affordable, plan.blocks});
  const int64_t chunk = std::min(padded, plan.token_chunk);
  int64_t per_thread = plan.block_rows * (columns * item + chunk * item + 4 * kLanes * 4);
  if (padded > chunk) per_thread += plan.block_rows * columns * 4;
  found.fixed_bytes = found.superblock * block_bytes + threads * per_thread;
  // hidden states as gathered and as packed, fp32 dH as summed and as returned; partial statistics
  found.fixed_bytes += padded * columns * (2 * item + 8) + padded * (std::min(plan.blocks, kSplits) * 12 + 64);
  const int64_t fits = row_bytes / (kLanes * kept);
  found.fixed_bytes += std::min(fits, panels) * kLanes * plan.blocks * 4;
  const int64_t panel_bytes = kLanes * (plan.vocab * kept + plan.blocks * 4);
  const int64_t left = std::max<int64_t>(budget - found.fixed_bytes, 0) / panel_bytes;
  const int64_t spill = std::min(left, std::max<int64_t>(panels - fits, 0));
  found.spill_bytes = spill * kLanes * plan.vocab * kept;
  found.kept_tokens = std::min((fits + spill) * kLanes, tokens);
  return found;
}

void gradient_of_head(const Plan& plan, const HeadInputs& inputs, const GradientInputs& gradient) {
  Gradient(plan, inputs, gradient).run();
}

}  // namespace grpo
