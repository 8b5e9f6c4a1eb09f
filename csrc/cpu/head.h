// The head's two operations on plain pointers, and the plan that both use.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "machine.h"

namespace grpo {

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
inline int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Rounded to bf16; a NaN stays one.
inline uint16_t bf16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Uninitialised memory for vectors.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(std::aligned_alloc(64, std::max<int64_t>(round_up(count * sizeof(T), 64), 64))),
              std::free) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  T* get() const { return data_.get(); }

 private:
  std::unique_ptr<T, void (*)(void*)> data_;
};

// One of the same length for each worker.
template <class T>
class WorkerBuffers {
 public:
  WorkerBuffers(int64_t workers, int64_t count) : count_(count), data_(workers * count) {}
  T* of(int64_t worker) const { return data_.get() + worker * count_; }

 private:
  int64_t count_;
  Buffer<T> data_;
};

// Whether the rows of a tile, this many words apart, lie in few sets of the first-level cache.
inline bool shares_cache_sets(int64_t stride) { return stride % 256 == 0; }

constexpr int64_t kMostBlockRows = 256, kMostBlocks = 3;

// How a head is split, by its size and types only: a score must not depend on the other tokens of the batch.
struct Plan {
  const Kernels* kernels;
  Operand kind;
  Dtype kept;  // of exponentials
  Gemm multiply;
  int64_t vocab, hidden;
  int64_t rank;          // of the low-rank product beside the weight's, or 0
  int64_t depth;         // of the products of scoring, in words
  int64_t words;         // of a packed row of weight or hidden states, or of a piece of it; a multiple of 16
  int64_t rank_words;    // the same of the low-rank weight
  int64_t stride;        // of packed rows, see `shares_cache_sets`
  int64_t block_rows;    // vocabulary rows whose packed weight stays in the second-level cache
  int64_t blocks;
  int64_t group;         // blocks of one product of dH, at most `kMostBlocks`
  int64_t token_chunk;   // tokens whose dz stays there
  int64_t held_words;    // of one operand of a product, which stays there while panels of the other pass

  static Plan of(int64_t vocab, int64_t hidden, int64_t rank, Dtype compute);

  int64_t pieces() const { return pieces_of(kind); }
  int64_t dhidden_columns() const { return hidden + rank; }
  int64_t rows_of(int64_t block) const { return std::min(block_rows, vocab - block * block_rows); }
  int64_t kept_size() const { return item_bytes(kept); }
};

// Vocabulary ranges whose statistics are computed one after the other; fixed, and merged in order, so that a score does
// not depend on which thread took which.
constexpr int64_t kSplits = 96;

// Where exponentials are kept: tiles [rows of the block, 64] of the leading token panels, one after the other in the
// memory of the block's rows.
struct Store {
  char* base;
  int64_t row_bytes;
  int64_t panels;

  // The tile of a panel, numbered within this store.
  char* tile(const Plan& plan, int64_t block, int64_t panel) const {
    return base + block * plan.block_rows * row_bytes + panel * plan.rows_of(block) * kLanes * plan.kept_size();
  }
  static Store of(char* base, int64_t row_bytes, const Plan& plan, int64_t token_panels) {
    return {base, row_bytes, std::min(row_bytes / (kLanes * plan.kept_size()), token_panels)};
  }
};

// The inputs that both operations share. Products are hidden @ weight^T * row_scale; or, beside a frozen weight, which
// may be quantised, low_hidden @ low_weight^T is added: then the gradient is that of `low_weight`.
struct HeadInputs {
  WeightRows hidden;  // [tokens, hidden], of the dtype of the computation
  WeightRows weight;
  const float* row_scale;   // [vocab] or nullptr
  const float* low_hidden;  // [tokens, rank] or nullptr
  WeightRows low_weight;    // [vocab, rank]
  const float* bias;       // [vocab] or nullptr
  const int64_t* targets;  // [tokens]
  const float* temperature;  // [tokens]
  // Candidate sets, or nullptr: token t keeps the ids in [set_ranges[2 t], set_ranges[2 t + 1]) of `set_ids`, ascending;
  // all ids if that begins at -1.
  const int64_t *set_ids, *set_ranges;
  int64_t tokens;
  float scale;
  float softcap;  // 0: none
  Store in_gradient, spill;  // exponentials of the first panels, and of the next ones

  bool has_low_rank() const { return low_hidden != nullptr; }
  // Hidden states and weight of the gradient.
  WeightRows gradient_states() const {
    if (has_low_rank()) return {low_hidden, Dtype::fp32, low_weight.columns, low_weight.columns};
    return hidden;
  }
  const WeightRows& gradient_weight() const { return has_low_rank() ? low_weight : weight; }

  int64_t kept_panels() const { return in_gradient.panels + spill.panels; }

  // The stored exponentials of a tile; nullptr if they are computed again.
  char* kept_tile(const Plan& plan, int64_t block, int64_t panel) const {
    if (panel < in_gradient.panels) return in_gradient.tile(plan, block, panel);
    return panel < kept_panels() ? spill.tile(plan, block, panel - in_gradient.panels) : nullptr;
  }

  // Where its maxima are in `offsets` [blocks, kept panels * 64].
  int64_t offset_at(int64_t block, int64_t panel) const { return (block * kept_panels() + panel) * kLanes; }
};

struct Statistics {
  float *max, *log_sum, *logp, *entropy;  // [tokens]
  bool with_entropy;

  // Of a row from its sums (see RowSums), fp32 or fp64; `target`: its z - maximum.
  template <class Number>
  void set(int64_t row, float row_max, Number rest, Number weighted, Number target) const {
    const Number sum_log = std::log1p(rest), target_logp = target - sum_log;
    const Number row_entropy = sum_log - weighted / (Number(1) + rest);
    max[row] = row_max;
    log_sum[row] = static_cast<float>(sum_log);
    logp[row] = static_cast<float>(target_logp > 0 ? 0 : target_logp);
    entropy[row] = with_entropy ? static_cast<float>(row_entropy < 0 ? 0 : row_entropy) : 0.0f;
  }
};

// Derivatives of single products, which take the place of those by the row's formula: in the order of the blocks that
// hold `ids`, then of `tokens`.
struct Entries {
  const int32_t* tokens;  // places in GradientInputs::rows
  const int32_t* ids;     // rows of the vocabulary
  const float* values;    // dL/d(product)
  int64_t count;
};

void score_head(const Plan& plan, const HeadInputs& inputs, const Statistics& out, float* offsets);

// [tokens, hidden + rank]: sums over the vocabulary, without the target's row, of exp(z - offset) dz/d(product) W, where
// no offset is below the token's maximum. dH is a multiple of them, and of the target's row.
struct HeadSums {
  const float* offset;  // [tokens]
  float* values;        // nullptr: there are none
};

// Scores, to the same bits, and the sums while a block of the weight is in the cache.
void score_and_sum_head(const Plan& plan, const HeadInputs& inputs, const Statistics& out, float* offsets,
                        const HeadSums& sums);

// out [tokens, vocab] = the products; only the inputs up to `low_weight` and the number of tokens are read.
void multiply_head(const Plan& plan, const HeadInputs& inputs, float* out, int64_t out_stride);

struct GradientInputs {
  const int64_t* rows;  // [count] ascending positions of the tokens that have a gradient
  int64_t count;
  const float *dlogp, *dentropy;  // [tokens]; dentropy may be nullptr
  Statistics statistics;
  const float* offsets;     // [blocks, kept panels * 64] as scoring wrote them
  void* dweight;            // [vocab, columns] or nullptr; that of `low_weight` in fp32, and added to
  Dtype dweight_dtype;
  float* dhidden;           // [count, hidden + rank] or nullptr
  float* dbias;             // [vocab] or nullptr
  Entries entries;
  // If there are any, dH is made of them: then there are no entries, dentropy is nullptr, and dW that of `low_weight`.
  HeadSums sums;
};

void gradient_of_head(const Plan& plan, const HeadInputs& inputs, const GradientInputs& gradient);

// How a scratch budget is spent on scores and gradient: exponentials get what the operands, partial results and the
// threads' blocks, which do not depend on it, leave.
struct ScratchPlan {
  int64_t spill_bytes;  // for exponentials of tokens that do not fit dW's storage
  int64_t fixed_bytes;  // of everything else
  int64_t kept_tokens;  // tokens whose exponentials are kept; those of others are computed again

  // `row_bytes`: of dW's storage, or 0.
  static ScratchPlan of(const Plan& plan, int64_t tokens, int64_t row_bytes, int64_t budget);
};

// The number of threads that calls from this thread take.
void use_threads(int64_t count);
int64_t thread_count();

// f(task, worker) for every task; a free worker takes the next one. f must not throw.
void run_tasks(int64_t tasks, int64_t workers, void (*f)(int64_t, int64_t, void*), void* context);
int64_t worker_count(int64_t tasks);

// Waits, in a task, for what an earlier task counts.
void wait_until_at_least(const std::atomic<int64_t>& count, int64_t wanted);

template <class F>
void parallel_tasks(int64_t tasks, int64_t workers, F&& f) {
  const auto call = [](int64_t task, int64_t worker, void* context) { (*static_cast<F*>(context))(task, worker); };
  run_tasks(tasks, workers, call, &f);
}

// Packed hidden states as b of the product z^T = W h^T, for panels of 64 tokens; the last one is padded with zeros.
class TokenPanels {
 public:
  TokenPanels(const Plan& plan, const HeadInputs& inputs, int64_t first_panel, int64_t last_panel);
  Right hidden(int64_t panel) const { return {hidden_.get() + (panel - first_) * size_, piece_}; }
  Right low_hidden(int64_t panel) const { return {low_hidden_.get() + (panel - first_) * low_size_, 0}; }  // in fp32

 private:
  int64_t first_, piece_, size_, low_size_;
  Buffer<uint32_t> hidden_, low_hidden_;
};

// Rows of the low-rank weight / row_scale, which products are multiplied by, as `Kernels::pack_rows` writes them. Only
// words of bf16 round them.
void pack_low_weight(const Plan& plan, const HeadInputs& inputs, int64_t first, int64_t rows, Operand kind, Packed out,
                     int64_t words);

// What `WeightBlock` will read, if that is the weight itself; nothing beyond the last block.
Ahead weight_ahead(const Plan& plan, const HeadInputs& inputs, int64_t block);

// Rows of the weight as a of a product, then a row of zeros if words hold two of them and one is left over: the weight
// itself where its layout is that of an operand, else a copy. The low-rank weight is copied twice: a product of 16
// columns in bf16 would cost the log-probs 1e-3 nats, so scores have it in fp32.
struct WeightBlock {
  Left weight, low_weight, low_weight_fp32;

  static int64_t buffer_words(const Plan& plan);
  static WeightBlock of(const Plan& plan, const HeadInputs& inputs, int64_t block, uint32_t* buffer);
};

// Products [rows, 64] of a block and a panel of tokens, before `Transform`.
void multiply_tile(const Plan& plan, const WeightBlock& weight, const TokenPanels& tokens, int64_t block, int64_t panel,
                   float* out, Ahead ahead);

// Floats of one worker for `exponentials_of_tile`: a tile, and one more for candidate sets.
inline int64_t tile_size(const Plan& plan, const HeadInputs& inputs) {
  return plan.block_rows * kLanes * (inputs.set_ranges == nullptr ? 1 : 2);
}

// z and its exponentials for one tile: the one code path of scoring and of recomputation.
void exponentials_of_tile(const Plan& plan, const HeadInputs& inputs, const WeightBlock& weight,
                          const TokenPanels& tokens, int64_t block, int64_t panel, float* z, const TileStatistics& out,
                          void* kept, Ahead ahead);

// Ranges of blocks whose statistics are merged one after the other; the next one begins where one ends.
inline int64_t split_count(const Plan& plan) { return std::min(kSplits, plan.blocks); }
inline int64_t split_begin(const Plan& plan, int64_t split) { return split * plan.blocks / split_count(plan); }
inline int64_t split_of(const Plan& plan, int64_t block) { return ((block + 1) * split_count(plan) - 1) / plan.blocks; }

// Statistics of all tokens for some ranges of the vocabulary, of which the first are the splits, and z of the targets.
class Partials {
 public:
  Partials(int64_t ranges, const HeadInputs& inputs, bool with_entropy)
      : padded_(round_up(inputs.tokens, kLanes)), with_entropy_(with_entropy),
        values_(ranges * 3 * padded_), target_logit_(padded_) {}

  TileStatistics at(int64_t range, int64_t panel) const {
    float* const first = values_.get() + range * 3 * padded_ + panel * kLanes;
    return {first, first + padded_, with_entropy_ ? first + 2 * padded_ : nullptr};
  }

  // Those of a scored tile, whose z are given.
  void take_targets(const Plan& plan, const HeadInputs& inputs, int64_t block, int64_t panel, const float* z) const;

  // The scores of all tokens from the splits, which are merged.
  void finish(const Plan& plan, const HeadInputs& inputs, const Statistics& out) const;

 private:
  int64_t padded_;
  bool with_entropy_;
  Buffer<float> values_, target_logit_;
};

}  // namespace grpo
