// The library's functions, of plain C: all arguments are checked here, before a pointer is used. Each returns nullptr, or
// why it refused the call. Integers are int64_t, other numbers double; a tensor may be nullptr where it is optional.
#include <cmath>
#include <limits>
#include <new>

#include "arguments.h"
#include "divergence.h"
#include "head.h"
#include "pairs.h"

using namespace grpo;

namespace {

struct Head {
  Plan plan;
  HeadInputs inputs;
};

Plan plan_of(int64_t vocab, int64_t hidden, int64_t rank, Dtype compute) {
  check_machine();
  check(1 <= vocab && vocab < kMostRows && 1 <= hidden && hidden < kMostRows && 0 <= rank && rank < kMostRows,
        "a head must have from 1 to 2^31 - 1 rows and columns; got [", vocab, ", ", hidden, "], and a rank of ", rank);
  return Plan::of(vocab, hidden, rank, compute);
}

bool quantized(Dtype dtype) { return dtype == Dtype::int8 || dtype == Dtype::fp8 || dtype == Dtype::half_bytes; }

WeightRows weight_rows(const Tensor& x, const char* name, Dtype dtype) {
  check(x.size(1) <= 1 || x.stride(1) == 1, "rows of ", name, " must be contiguous; got a stride of ", x.stride(1));
  return {x.data, dtype, x.size(1), x.stride(0)};
}

// The weight of a head with so many columns, perhaps quantised. `group_scale` [V, G], `codes` [16], `rounded` (a scalar):
// see WeightRows.
WeightRows head_weight(const Tensor& x, const Tensor* group_scale, const Tensor* codes, int64_t rounded,
                       int64_t columns) {
  check_matrix(x, "weight", "[V, H]");
  const int64_t vocab = x.size(0);
  check_shape(x, "weight", {vocab, codes == nullptr ? columns : columns / 2});
  check((codes != nullptr) == (x.scalar == Scalar::bytes), "bytes of a weight need codes, and codes bytes");
  WeightRows weight = weight_rows(x, "weight", x.scalar == Scalar::int8    ? Dtype::int8
                                               : x.scalar == Scalar::fp8   ? Dtype::fp8
                                               : x.scalar == Scalar::bytes ? Dtype::half_bytes
                                                                           : dtype_of(x, "weight"));
  check(!quantized(weight.dtype) || columns % 32 == 0, "a quantised weight must have a multiple of 32 columns; got ",
        columns);
  weight.columns = columns;
  weight.codes = floats(codes, "codes", 16);
  const Scalar to{rounded};
  check(to == Scalar::fp32 || to == Scalar::bf16 || to == Scalar::fp16, "rounded must be that of a float; got ", rounded);
  const Dtype narrow = to == Scalar::fp32 ? Dtype::fp32 : to == Scalar::bf16 ? Dtype::bf16 : Dtype::fp16;
  const bool exact = group_scale == nullptr && codes == nullptr && (quantized(weight.dtype) || weight.dtype == narrow);
  if (!exact) weight.rounded = narrow;
  if (group_scale != nullptr) {
    const int64_t groups = group_scale->size(1);
    check_tensor(*group_scale, "group_scale", Scalar::fp32, {vocab, groups});
    check(groups > 0 && columns % groups == 0 && columns / groups % 32 == 0,
          "groups of the weight must have a multiple of 32 columns; got ", groups, " groups of ", columns, " columns");
    weight.scale = data<float>(*group_scale);
    weight.groups = groups;
  }
  return weight;
}

// The products of a head: see HeadInputs and `head_weight`.
Head checked_products(const Tensor& hidden, const Tensor& weight, const Tensor* row_scale, const Tensor* group_scale,
                      const Tensor* codes, int64_t rounded, const Tensor* low_hidden, const Tensor* low_weight) {
  check_matrix(hidden, "hidden", "[N, H]");
  const int64_t N = hidden.size(0), H = hidden.size(1);
  HeadInputs inputs{};
  inputs.hidden = weight_rows(hidden, "hidden", dtype_of(hidden, "hidden"));
  inputs.tokens = N;
  inputs.weight = head_weight(weight, group_scale, codes, rounded, H);
  const int64_t V = weight.size(0);
  inputs.row_scale = floats(row_scale, "row_scale", V);
  check((low_hidden == nullptr) == (low_weight == nullptr), "low_hidden and low_weight go together");
  if (low_weight != nullptr) {
    check_matrix(*low_weight, "low_weight", "[V, R]");
    const int64_t R = low_weight->size(1);
    check(R > 0, "low_weight must have columns");
    check_shape(*low_weight, "low_weight", {V, R});
    check_tensor(*low_hidden, "low_hidden", Scalar::fp32, {N, R});
    inputs.low_hidden = data<float>(*low_hidden);
    inputs.low_weight = weight_rows(*low_weight, "low_weight", dtype_of(*low_weight, "low_weight"));
  }
  return {plan_of(V, H, inputs.low_weight.columns, inputs.hidden.dtype), inputs};
}

// Candidate sets of `inputs.tokens` tokens: see HeadInputs.
void add_sets(HeadInputs& inputs, const Tensor& ids, const Tensor& ranges, int64_t vocab) {
  inputs.set_ids = rows_within(ids, "set_ids", ids.numel(), vocab);
  check_tensor(ranges, "set_ranges", Scalar::int64, {inputs.tokens, 2});
  inputs.set_ranges = data<int64_t>(ranges);
  for (int64_t t = 0; t < inputs.tokens; t++) {
    const int64_t begin = inputs.set_ranges[2 * t], end = inputs.set_ranges[2 * t + 1];
    check(begin == -1 || (0 <= begin && begin <= end && end <= ids.numel()), "set_ranges must lie in [0, ",
                    ids.numel(), "], or begin at -1; got ", begin, " to ", end, " at ", t);
    for (int64_t k = begin + 1; begin >= 0 && k < end; k++) {
      check(inputs.set_ids[k - 1] < inputs.set_ids[k], "set_ids must ascend within a set");
    }
  }
}

// `kept`: storage of the gradient, shaped like its weight, or empty; in that of a low-rank weight nothing is kept.
// `spill`: bytes.
Head checked_head(Head head, const Tensor& targets, const Tensor& temperature, double scale, double softcap,
                  const Tensor* bias, const Tensor* set_ids, const Tensor* set_ranges, const Tensor& kept,
                  const Tensor& spill) {
  HeadInputs& inputs = head.inputs;
  const int64_t N = inputs.tokens, columns = inputs.gradient_weight().columns, V = head.plan.vocab;
  check_tensor(targets, "targets", Scalar::int64, {N});
  check_tensor(temperature, "temperature", Scalar::fp32, {N});
  check((set_ids == nullptr) == (set_ranges == nullptr), "set_ids and set_ranges go together");
  if (set_ids != nullptr) add_sets(inputs, *set_ids, *set_ranges, V);
  check(std::isfinite(softcap) && softcap >= 0, "softcap must be finite and positive, or 0 for none; got ",
                  softcap);
  const int64_t* ids = data<int64_t>(targets);
  for (int64_t i = 0; i < N; i++) {
    check(-1 <= ids[i] && ids[i] < V, "targets must be in [0, ", V, "), or -1 for another rank's; got ", ids[i],
                    " at ", i);
  }

  const int64_t panels = ceil_div(N, kLanes);
  Store in_gradient{nullptr, 0, 0};
  if (kept.numel() != 0) {
    check_shape(kept, "dweight", {V, columns});
    check(kept.is_contiguous(), "dweight must be contiguous");
    const Dtype dtype = dtype_of(kept, "dweight");
    check(!inputs.has_low_rank() || dtype == Dtype::fp32, "dweight of a low-rank weight must be float32");
    const bool frozen = quantized(inputs.weight.dtype) || inputs.weight.scale != nullptr;
    check(inputs.has_low_rank() || !frozen, "a quantised weight is frozen: it has no dweight");
    const int64_t row_bytes = inputs.has_low_rank() ? 0 : columns * kept.element_size();
    in_gradient = Store::of(data<char>(kept), row_bytes, head.plan, panels);
  }
  check_tensor(spill, "spill", Scalar::bytes, {spill.numel()});
  check(spill.numel() % V == 0, "spill must hold the same number of bytes for each of ", V, " rows; got ",
                  spill.numel());
  const Store spilled = Store::of(data<char>(spill), spill.numel() / V, head.plan,
                                  panels - in_gradient.panels);
  inputs.bias = floats(bias, "bias", V);
  inputs.targets = ids;
  inputs.temperature = data<float>(temperature);
  inputs.scale = static_cast<float>(scale);
  inputs.softcap = static_cast<float>(softcap);
  inputs.in_gradient = in_gradient;
  inputs.spill = spilled;
  return head;
}

// [4, rows]: maximum, log of the sum of exponentials, log-prob, entropy.
Statistics rows_of(const Tensor& statistics, const char* name, int64_t rows, bool with_entropy) {
  check_tensor(statistics, name, Scalar::fp32, {4, rows});
  float* base = data<float>(statistics);
  return {base, base + rows, base + 2 * rows, base + 3 * rows, with_entropy};
}

LogitRows logit_rows(const Tensor& x, const char* name) {
  check_machine();
  check_matrix(x, name, "[R, V]");
  check(x.scalar == Scalar::fp32, name, " must be float32");
  check(x.size(1) >= 1, name, " must have at least one column");
  check(x.size(1) == 1 || x.stride(1) == 1, "rows of ", name, " must be contiguous; got a stride of ", x.stride(1));
  check(x.size(0) <= 1 || x.stride(0) >= x.size(1), "rows of ", name, " must not overlap; got a stride of ", x.stride(0),
        " for ", x.size(1), " columns");
  return {data<float>(x), x.size(0), x.size(1), x.stride(0)};
}

const int64_t* targets_of(const Tensor& targets, const LogitRows& z) {
  return rows_within(targets, "targets", z.rows, z.columns);
}

CandidateSets candidate_sets(const Tensor& ids, const Tensor& offsets, const Tensor& targets, const Tensor* bias,
                             const Tensor& temperature, double scale, double softcap) {
  check_machine();
  const int64_t tokens = offsets.numel() - 1, count = ids.numel();
  const int64_t* from = segments_of(offsets, count);
  check_tensor(targets, "targets", Scalar::int64, {tokens});
  check_tensor(temperature, "temperature", Scalar::fp32, {tokens});
  const int64_t limit = bias != nullptr ? bias->numel() : std::numeric_limits<int64_t>::max();
  return {tokens, from, rows_within(ids, "ids", count, limit), data<int64_t>(targets), floats(bias, "bias", limit),
          data<float>(temperature), static_cast<float>(scale), static_cast<float>(softcap)};
}

// See Entries; all three are nullptr if there are none. `places`: how many tokens have a gradient.
Entries entries_of(const Plan& plan, const Tensor* tokens, const Tensor* ids, const Tensor* values, int64_t places) {
  if (tokens == nullptr) return {};
  const int64_t count = tokens->numel();
  const Entries entries{rows_within<int32_t>(*tokens, "entry_tokens", count, places),
                        rows_within<int32_t>(*ids, "entry_ids", count, plan.vocab),
                        floats(values, "entry_values", count), count};
  for (int64_t k = 1; k < count; k++) {
    const int64_t before = entries.ids[k - 1] / plan.block_rows, block = entries.ids[k] / plan.block_rows;
    check(before < block || (before == block && entries.tokens[k - 1] <= entries.tokens[k]),
          "entries must be in the order of blocks of ", plan.block_rows, " ids, then of tokens; got another at ", k);
  }
  return entries;
}

// See HeadSums; both are nullptr if there are none.
HeadSums sums_of(const Head& head, const Tensor* offset, const Tensor* sums) {
  check((offset == nullptr) == (sums == nullptr), "sum_offset and sums go together");
  if (sums == nullptr) return {};
  check_tensor(*sums, "sums", Scalar::fp32, {head.inputs.tokens, head.plan.dhidden_columns()});
  return {floats(offset, "sum_offset", head.inputs.tokens), data<float>(*sums)};
}

// Calls f; its exception becomes the result.
template <class F>
const char* guarded(F&& f) {
  thread_local std::string refusal;
  try {
    f();
    return nullptr;
  } catch (const std::bad_alloc&) {
    refusal = "out of memory";
  } catch (const std::exception& error) {
    refusal = error.what();
  }
  return refusal.c_str();
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// A hash of the declarations in this file, which cpu_library.py expects: calls of a library with others would crash.
API const char* grpo_signature() { return "8c0f04ff"; }

// Why the engine cannot run here, or an empty text.
API const char* grpo_missing() { return machine().missing.c_str(); }

// What multiplies bf16.
API const char* grpo_instruction_set() { return machine().name; }

// For tests: see `use_instruction_set`.
API void grpo_use_isa(const char* name, int64_t group) { use_instruction_set(name, group); }

// How many threads calls from the calling thread take.
API void grpo_use_threads(int64_t count) { use_threads(count); }

// How a head is worked on, for a compute dtype that is bf16 or not. out: vocabulary rows of a block; blocks; tokens of a
// panel; panels whose exponentials fit dW's rows of `row_bytes` and `spill_bytes`.
API const char* grpo_head_layout(int64_t vocab, int64_t hidden, int64_t rank, int64_t bf16, int64_t tokens,
                                 int64_t row_bytes, int64_t spill_bytes, int64_t* out) {
  return guarded([&] {
    const Plan plan = plan_of(vocab, hidden, rank, bf16 ? Dtype::bf16 : Dtype::fp32);
    const int64_t panels = ceil_div(tokens, kLanes);
    const int64_t in_gradient = Store::of(nullptr, row_bytes, plan, panels).panels;
    const int64_t spilled = Store::of(nullptr, spill_bytes / vocab, plan, panels - in_gradient).panels;
    const int64_t values[] = {plan.block_rows, plan.blocks, kLanes, in_gradient + spilled};
    std::copy(std::begin(values), std::end(values), out);
  });
}

// How a scratch budget is spent on scores and gradient of so many tokens: see `ScratchPlan`.
API const char* grpo_scratch_plan(int64_t vocab, int64_t hidden, int64_t rank, int64_t bf16, int64_t tokens,
                                  int64_t row_bytes, int64_t budget, int64_t* out) {
  return guarded([&] {
    const Plan plan = plan_of(vocab, hidden, rank, bf16 ? Dtype::bf16 : Dtype::fp32);
    const ScratchPlan scratch = ScratchPlan::of(plan, tokens, row_bytes, budget);
    const int64_t values[] = {scratch.spill_bytes, scratch.fixed_bytes, scratch.kept_tokens};
    std::copy(std::begin(values), std::end(values), out);
  });
}

API const char* grpo_head_products(const Tensor* hidden, const Tensor* weight, const Tensor* row_scale,
                                   const Tensor* group_scale, const Tensor* codes, int64_t rounded,
                                   const Tensor* low_hidden, const Tensor* low_weight, const Tensor* out) {
  return guarded([&] {
    const Head head =
        checked_products(*hidden, *weight, row_scale, group_scale, codes, rounded, low_hidden, low_weight);
    const LogitRows rows = logit_rows(*out, "out");
    check_shape(*out, "out", {head.inputs.tokens, head.plan.vocab});
    if (head.inputs.tokens > 0) multiply_head(head.plan, head.inputs, rows.data, rows.stride);
  });
}

API const char* grpo_head_scores(const Tensor* hidden, const Tensor* weight, const Tensor* row_scale,
                                 const Tensor* group_scale, const Tensor* codes, int64_t rounded,
                                 const Tensor* low_hidden, const Tensor* low_weight, const Tensor* targets,
                                 const Tensor* temperature, double scale, double softcap, const Tensor* bias,
                                 const Tensor* set_ids, const Tensor* set_ranges, int64_t with_entropy,
                                 const Tensor* kept, const Tensor* spill, const Tensor* statistics,
                                 const Tensor* offsets, const Tensor* sum_offset, const Tensor* sums) {
  return guarded([&] {
    const Head head = checked_head(
        checked_products(*hidden, *weight, row_scale, group_scale, codes, rounded, low_hidden, low_weight), *targets,
        *temperature, scale, softcap, bias, set_ids, set_ranges, *kept, *spill);
    const Statistics out = rows_of(*statistics, "statistics", head.inputs.tokens, with_entropy != 0);
    check_tensor(*offsets, "offsets", Scalar::fp32, {head.plan.blocks, head.inputs.kept_panels() * kLanes});
    const HeadSums of = sums_of(head, sum_offset, sums);
    check(of.values == nullptr || set_ids == nullptr, "sums serve no candidate sets");
    if (head.inputs.tokens == 0) return;
    if (of.values == nullptr) {
      score_head(head.plan, head.inputs, out, data<float>(*offsets));
    } else {
      score_and_sum_head(head.plan, head.inputs, out, data<float>(*offsets), of);
    }
  });
}

API const char* grpo_head_gradient(const Tensor* hidden, const Tensor* weight, const Tensor* row_scale,
                                   const Tensor* group_scale, const Tensor* codes, int64_t rounded,
                                   const Tensor* low_hidden, const Tensor* low_weight, const Tensor* targets,
                                   const Tensor* temperature, double scale, double softcap, const Tensor* bias,
                                   const Tensor* set_ids, const Tensor* set_ranges, const Tensor* statistics,
                                   const Tensor* offsets, const Tensor* rows, const Tensor* dlogp,
                                   const Tensor* dentropy, const Tensor* entry_tokens, const Tensor* entry_ids,
                                   const Tensor* entry_values, const Tensor* dweight, const Tensor* spill,
                                   const Tensor* sum_offset, const Tensor* sums, const Tensor* dhidden,
                                   const Tensor* dbias) {
  return guarded([&] {
    const Head head = checked_head(
        checked_products(*hidden, *weight, row_scale, group_scale, codes, rounded, low_hidden, low_weight), *targets,
        *temperature, scale, softcap, bias, set_ids, set_ranges, *dweight, *spill);
    const int64_t N = head.inputs.tokens, V = head.plan.vocab, count = rows->numel();
    const Statistics known = rows_of(*statistics, "statistics", N, true);
    check_tensor(*offsets, "offsets", Scalar::fp32, {head.plan.blocks, head.inputs.kept_panels() * kLanes});
    const int64_t* index = rows_within(*rows, "rows", count, N);
    for (int64_t i = 1; i < count; i++) check(index[i] > index[i - 1], "rows must ascend; got ", index[i], " at ", i);
    if (dhidden != nullptr) {
      check_tensor(*dhidden, "dhidden", Scalar::fp32, {count, head.plan.dhidden_columns()});
    }
    const bool need_weight = dweight->numel() != 0;
    const GradientInputs gradient{
        index, count, floats(dlogp, "dlogp", N), floats(dentropy, "dentropy", N), known, data<float>(*offsets),
        need_weight ? dweight->data : nullptr, need_weight ? dtype_of(*dweight, "dweight") : Dtype::fp32,
        dhidden == nullptr ? nullptr : data<float>(*dhidden), floats(dbias, "dbias", V),
        entries_of(head.plan, entry_tokens, entry_ids, entry_values, count), sums_of(head, sum_offset, sums)};
    check(sums == nullptr || (dentropy == nullptr && entry_tokens == nullptr && set_ids == nullptr),
          "sums serve no entropy's gradient, no entries and no candidate sets");
    check(sums == nullptr || !need_weight || low_weight != nullptr, "with sums, dweight must be of a low-rank weight");
    if (count > 0) {
      gradient_of_head(head.plan, head.inputs, gradient);
    } else {
      const bool writes = need_weight && !head.inputs.has_low_rank();  // whose gradient is added to
      if (writes) std::fill_n(data<char>(*dweight), dweight->numel() * dweight->element_size(), 0);
      if (dbias != nullptr) std::fill_n(data<float>(*dbias), V, 0.0f);
    }
  });
}

API const char* grpo_logit_statistics(const Tensor* logits, const Tensor* targets, int64_t with_entropy,
                                      const Tensor* statistics) {
  return guarded([&] {
    const LogitRows z = logit_rows(*logits, "logits");
    statistics_of_rows(z, targets_of(*targets, z), rows_of(*statistics, "statistics", z.rows, with_entropy != 0));
  });
}

API const char* grpo_logit_divergence(const Tensor* logits, const Tensor* other, const Tensor* statistics,
                                      const Tensor* other_statistics, const Tensor* targets, int64_t forward,
                                      const Tensor* factor, const Tensor* dlogp, const Tensor* value) {
  return guarded([&] {
    const LogitRows z = logit_rows(*logits, "logits"), w = logit_rows(*other, "other");
    check_shape(*other, "other", {z.rows, z.columns});
    divergence_of_rows(z, w, rows_of(*statistics, "statistics", z.rows, true),
                       rows_of(*other_statistics, "other_statistics", z.rows, true), targets_of(*targets, z),
                       forward != 0, floats(factor, "factor", z.rows), floats(dlogp, "dlogp", z.rows),
                       floats(value, "value", z.rows));
  });
}

API const char* grpo_set_scores(const Tensor* hidden, const Tensor* weight, const Tensor* index, const Tensor* ids,
                                const Tensor* offsets, const Tensor* targets, const Tensor* bias,
                                const Tensor* temperature, double scale, double softcap, int64_t with_entropy,
                                const Tensor* z, const Tensor* statistics) {
  return guarded([&] {
    const CandidateSets sets = candidate_sets(*ids, *offsets, *targets, bias, *temperature, scale, softcap);
    const Matrix tokens = matrix(*hidden, "hidden"), rows = matrix(*weight, "weight");
    check(tokens.columns == rows.columns && tokens.dtype == rows.dtype,
          "hidden and weight must have as many columns and the same dtype");
    check(hidden->size(0) == sets.tokens, "hidden must have ", sets.tokens, " rows; got ", hidden->size(0));
    score_sets(sets, tokens, rows, rows_within(*index, "index", ids->numel(), weight->size(0)),
               floats(z, "z", ids->numel()), rows_of(*statistics, "statistics", sets.tokens, with_entropy != 0));
  });
}

API const char* grpo_set_derivatives(const Tensor* z, const Tensor* statistics, const Tensor* ids, const Tensor* offsets,
                                     const Tensor* targets, const Tensor* temperature, double scale, double softcap,
                                     const Tensor* dlogp, const Tensor* dentropy, const Tensor* out) {
  return guarded([&] {
    const CandidateSets sets = candidate_sets(*ids, *offsets, *targets, nullptr, *temperature, scale, softcap);
    differentiate_sets(sets, floats(z, "z", ids->numel()), rows_of(*statistics, "statistics", sets.tokens, true),
                       floats(dlogp, "dlogp", sets.tokens), floats(dentropy, "dentropy", sets.tokens),
                       floats(out, "out", ids->numel()));
  });
}

API const char* grpo_add_segment_sums(const Tensor* out, const Tensor* rows, const Tensor* x, const Tensor* index,
                                      const Tensor* factor, const Tensor* offsets) {
  return guarded([&] {
    const Matrix to = matrix(*out, "out"), from = matrix(*x, "x");
    check(to.columns == from.columns, "out and x must have as many columns");
    const int64_t count = index->numel(), segments = rows->numel();
    check(offsets->numel() == segments + 1, "offsets must be [", segments + 1, "]; got [", offsets->numel(), "]");
    const int64_t* into = rows_within(*rows, "rows", segments, out->size(0));
    for (int64_t s = 1; s < segments; s++) check(into[s - 1] < into[s], "rows must ascend");
    add_segment_sums(to, into, from, rows_within(*index, "index", count, x->size(0)), floats(factor, "factor", count),
                     segments_of(*offsets, count), segments);
  });
}
