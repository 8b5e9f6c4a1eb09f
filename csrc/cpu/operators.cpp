// The operators: all arguments are checked here, before a pointer is used.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "arguments.h"
#include "divergence.h"
#include "head.h"
#include "pairs.h"

namespace {

// What a head may have of rows and of columns: index arithmetic on such sizes does not overflow.
constexpr int64_t kMostRows = int64_t{1} << 31;

void check_head_size(int64_t vocab, int64_t hidden) {
  STD_TORCH_CHECK(1 <= vocab && vocab < kMostRows && 1 <= hidden && hidden < kMostRows,
                  "a head must have from 1 to 2^31 - 1 rows and columns; got [", vocab, ", ", hidden, "]");
}

struct Head {
  Plan plan;
  HeadInputs inputs;
};

Head checked_matrices(const Tensor& hidden, const Tensor& weight) {
  check_machine();
  STD_TORCH_CHECK(hidden.dim() == 2, "hidden must be [N, H]; got ", hidden.dim(), " dimensions");
  STD_TORCH_CHECK(weight.dim() == 2, "weight must be [V, H]; got ", weight.dim(), " dimensions");
  const int64_t N = hidden.size(0), H = hidden.size(1), V = weight.size(0);
  check_head_size(V, H);
  check_shape(hidden, "hidden", {N, H});
  check_shape(weight, "weight", {V, H});
  STD_TORCH_CHECK(hidden.is_contiguous(), "hidden must be contiguous");
  STD_TORCH_CHECK(H == 1 || weight.stride(1) == 1, "rows of weight must be contiguous; got a stride of ",
                  weight.stride(1));
  const Dtype compute = dtype_of(hidden, "hidden");
  Head head{Plan::of(V, H, compute), {}};
  head.inputs.hidden = hidden.const_data_ptr();
  head.inputs.weight = weight.const_data_ptr();
  head.inputs.weight_dtype = dtype_of(weight, "weight");
  head.inputs.compute = compute;
  head.inputs.weight_stride = weight.stride(0);
  head.inputs.tokens = N;
  return head;
}

// Candidate sets of `inputs.tokens` tokens: see HeadInputs.
void add_sets(HeadInputs& inputs, const Tensor& ids, const Tensor& ranges, int64_t vocab) {
  inputs.set_ids = rows_within(ids, "set_ids", ids.numel(), vocab);
  check(ranges, "set_ranges", ScalarType::Long, {inputs.tokens, 2});
  inputs.set_ranges = data<int64_t>(ranges);
  for (int64_t t = 0; t < inputs.tokens; t++) {
    const int64_t begin = inputs.set_ranges[2 * t], end = inputs.set_ranges[2 * t + 1];
    STD_TORCH_CHECK(begin == -1 || (0 <= begin && begin <= end && end <= ids.numel()), "set_ranges must lie in [0, ",
                    ids.numel(), "], or begin at -1; got ", begin, " to ", end, " at ", t);
    for (int64_t k = begin + 1; begin >= 0 && k < end; k++) {
      STD_TORCH_CHECK(inputs.set_ids[k - 1] < inputs.set_ids[k], "set_ids must ascend within a set");
    }
  }
}

// `kept`: dW's storage, [V, H] of any dtype, or empty; `spill`: bytes.
Head checked_head(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& targets,
                  const Tensor& temperature, double scale, double softcap, const std::optional<Tensor>& set_ids,
                  const std::optional<Tensor>& set_ranges, const Tensor& kept, const Tensor& spill) {
  Head head = checked_matrices(hidden, weight);
  HeadInputs& inputs = head.inputs;
  const int64_t N = inputs.tokens, H = head.plan.hidden, V = head.plan.vocab;
  check(targets, "targets", ScalarType::Long, {N});
  check(temperature, "temperature", ScalarType::Float, {N});
  if (bias) check(*bias, "bias", ScalarType::Float, {V});
  STD_TORCH_CHECK(set_ids.has_value() == set_ranges.has_value(), "set_ids and set_ranges go together");
  if (set_ids) add_sets(inputs, *set_ids, *set_ranges, V);
  STD_TORCH_CHECK(std::isfinite(softcap) && softcap >= 0, "softcap must be finite and positive, or 0 for none; got ",
                  softcap);
  const int64_t* ids = data<int64_t>(targets);
  for (int64_t i = 0; i < N; i++) {
    STD_TORCH_CHECK(-1 <= ids[i] && ids[i] < V, "targets must be in [0, ", V, "), or -1 for another rank's; got ", ids[i],
                    " at ", i);
  }

  const int64_t panels = ceil_div(N, kLanes);
  Store in_gradient{nullptr, 0, 0};
  if (kept.numel() != 0) {
    check_shape(kept, "dweight", {V, H});
    STD_TORCH_CHECK(kept.is_contiguous(), "dweight must be contiguous");
    dtype_of(kept, "dweight");
    in_gradient = Store::of(static_cast<char*>(kept.mutable_data_ptr()), H * static_cast<int64_t>(kept.element_size()),
                            head.plan, panels);
  }
  check(spill, "spill", ScalarType::Byte, {spill.numel()});
  STD_TORCH_CHECK(spill.numel() % V == 0, "spill must hold the same number of bytes for each of ", V, " rows; got ",
                  spill.numel());
  const Store spilled = Store::of(static_cast<char*>(spill.mutable_data_ptr()), spill.numel() / V, head.plan,
                                  panels - in_gradient.panels);
  inputs.bias = bias ? data<float>(*bias) : nullptr;
  inputs.targets = ids;
  inputs.temperature = data<float>(temperature);
  inputs.scale = static_cast<float>(scale);
  inputs.softcap = static_cast<float>(softcap);
  inputs.in_gradient = in_gradient;
  inputs.spill = spilled;
  return head;
}

Statistics rows_of(const Tensor& statistics, int64_t tokens, bool with_entropy) {
  float* base = static_cast<float*>(statistics.mutable_data_ptr());
  return {base, base + tokens, base + 2 * tokens, base + 3 * tokens, with_entropy};
}

void head_products(Tensor hidden, Tensor weight, Tensor out) {
  const Head head = checked_matrices(hidden, weight);
  check_shape(out, "out", {head.inputs.tokens, head.plan.vocab});
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float, "out must be float32");
  STD_TORCH_CHECK(out.size(1) == 1 || out.stride(1) == 1, "rows of out must be contiguous; got a stride of ",
                  out.stride(1));
  STD_TORCH_CHECK(out.size(0) <= 1 || out.stride(0) >= out.size(1), "rows of out must not overlap; got a stride of ",
                  out.stride(0), " for ", out.size(1), " columns");
  if (head.inputs.tokens > 0) {
    multiply_head(head.plan, head.inputs, static_cast<float*>(out.mutable_data_ptr()), out.stride(0));
  }
}

std::tuple<Tensor, Tensor> head_scores(Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor targets,
                                       Tensor temperature, double scale, double softcap,
                                       std::optional<Tensor> set_ids, std::optional<Tensor> set_ranges,
                                       bool with_entropy, Tensor kept, Tensor spill) {
  const Head head =
      checked_head(hidden, weight, bias, targets, temperature, scale, softcap, set_ids, set_ranges, kept, spill);
  const int64_t kept_panels = head.inputs.in_gradient.panels + head.inputs.spill.panels;
  Tensor statistics = zeros({4, head.inputs.tokens});
  Tensor offsets = torch::stable::empty({head.plan.blocks, kept_panels * kLanes}, ScalarType::Float);
  if (head.inputs.tokens > 0) {
    score_head(head.plan, head.inputs, rows_of(statistics, head.inputs.tokens, with_entropy),
               static_cast<float*>(offsets.mutable_data_ptr()));
  }
  return {statistics, offsets};
}

std::tuple<Tensor, Tensor> head_gradient(Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor targets,
                                         Tensor temperature, double scale, double softcap,
                                         std::optional<Tensor> set_ids, std::optional<Tensor> set_ranges,
                                         Tensor statistics, Tensor offsets, Tensor rows, Tensor dlogp,
                                         std::optional<Tensor> dentropy, Tensor dweight, Tensor spill,
                                         int64_t superblock, bool need_hidden, bool need_bias) {
  const Head head =
      checked_head(hidden, weight, bias, targets, temperature, scale, softcap, set_ids, set_ranges, dweight, spill);
  const int64_t N = head.inputs.tokens, H = head.plan.hidden, V = head.plan.vocab;
  const int64_t kept_panels = head.inputs.in_gradient.panels + head.inputs.spill.panels;
  check(statistics, "statistics", ScalarType::Float, {4, N});
  check(offsets, "offsets", ScalarType::Float, {head.plan.blocks, kept_panels * kLanes});
  check(dlogp, "dlogp", ScalarType::Float, {N});
  if (dentropy) check(*dentropy, "dentropy", ScalarType::Float, {N});
  check(rows, "rows", ScalarType::Long, {rows.numel()});
  STD_TORCH_CHECK(superblock >= 1, "superblock must be at least 1; got ", superblock);
  const int64_t* index = data<int64_t>(rows);
  const int64_t count = rows.numel();
  for (int64_t i = 0; i < count; i++) {
    STD_TORCH_CHECK(index[i] > (i == 0 ? -1 : index[i - 1]) && index[i] < N,
                    "rows must ascend within [0, ", N, "); got ", index[i], " at ", i);
  }
  Tensor dhidden = torch::stable::empty({need_hidden ? count : 0, H}, ScalarType::Float);
  Tensor dbias = zeros({need_bias ? V : 0});
  if (count == 0) {
    if (dweight.numel() != 0) torch::stable::zero_(dweight);
    return {dhidden, dbias};
  }
  const bool need_weight = dweight.numel() != 0;
  gradient_of_head(head.plan, head.inputs,
                   {index, count, data<float>(dlogp), dentropy ? data<float>(*dentropy) : nullptr,
                    rows_of(statistics, N, true), data<float>(offsets), superblock,
                    need_weight ? dweight.mutable_data_ptr() : nullptr,
                    need_weight ? dtype_of(dweight, "dweight") : Dtype::fp32,
                    need_hidden ? static_cast<float*>(dhidden.mutable_data_ptr()) : nullptr,
                    need_bias ? static_cast<float*>(dbias.mutable_data_ptr()) : nullptr});
  return {dhidden, dbias};
}

LogitRows logit_rows(const Tensor& x, const char* name, int64_t rows, int64_t columns) {
  check_machine();
  check_shape(x, name, {rows, columns});
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, name, " must be float32");
  STD_TORCH_CHECK(columns >= 1, name, " must have at least one column");
  STD_TORCH_CHECK(columns == 1 || x.stride(1) == 1, "rows of ", name, " must be contiguous; got a stride of ", x.stride(1));
  STD_TORCH_CHECK(rows <= 1 || x.stride(0) >= columns, "rows of ", name, " must not overlap; got a stride of ",
                  x.stride(0), " for ", columns, " columns");
  return {static_cast<float*>(x.mutable_data_ptr()), rows, columns, x.stride(0)};
}

const int64_t* targets_of(const Tensor& targets, const LogitRows& z) {
  check(targets, "targets", ScalarType::Long, {z.rows});
  const int64_t* ids = data<int64_t>(targets);
  for (int64_t i = 0; i < z.rows; i++) {
    STD_TORCH_CHECK(0 <= ids[i] && ids[i] < z.columns, "targets must be in [0, ", z.columns, "); got ", ids[i], " at ", i);
  }
  return ids;
}

Tensor logit_statistics(Tensor logits, Tensor targets, bool with_entropy) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits must be [R, V]; got ", logits.dim(), " dimensions");
  const LogitRows z = logit_rows(logits, "logits", logits.size(0), logits.size(1));
  Tensor statistics = zeros({4, z.rows});
  statistics_of_rows(z, targets_of(targets, z), rows_of(statistics, z.rows, with_entropy));
  return statistics;
}

Tensor logit_divergence(Tensor logits, Tensor other, Tensor statistics, Tensor other_statistics, Tensor targets,
                      bool forward, std::optional<Tensor> factor, std::optional<Tensor> dlogp) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits must be [R, V]; got ", logits.dim(), " dimensions");
  const LogitRows z = logit_rows(logits, "logits", logits.size(0), logits.size(1));
  const LogitRows w = logit_rows(other, "other", z.rows, z.columns);
  check(statistics, "statistics", ScalarType::Float, {4, z.rows});
  check(other_statistics, "other_statistics", ScalarType::Float, {4, z.rows});
  if (factor) check(*factor, "factor", ScalarType::Float, {z.rows});
  if (dlogp) check(*dlogp, "dlogp", ScalarType::Float, {z.rows});
  Tensor value = zeros({z.rows});
  divergence_of_rows(z, w, rows_of(statistics, z.rows, true), rows_of(other_statistics, z.rows, true),
                     targets_of(targets, z), forward, factor ? data<float>(*factor) : nullptr,
                     dlogp ? data<float>(*dlogp) : nullptr, static_cast<float*>(value.mutable_data_ptr()));
  return value;
}

CandidateSets candidate_sets(const Tensor& ids, const Tensor& offsets, const Tensor& targets,
                             const std::optional<Tensor>& bias, const Tensor& temperature, double scale,
                             double softcap) {
  check_machine();
  const int64_t tokens = offsets.numel() - 1;
  const int64_t* from = segments_of(offsets, ids.numel());
  check(targets, "targets", ScalarType::Long, {tokens});
  check(temperature, "temperature", ScalarType::Float, {tokens});
  if (bias) check(*bias, "bias", ScalarType::Float, {bias->numel()});
  const int64_t limit = bias ? bias->numel() : std::numeric_limits<int64_t>::max();
  return {tokens, from, rows_within(ids, "ids", ids.numel(), limit), data<int64_t>(targets),
          bias ? data<float>(*bias) : nullptr, data<float>(temperature), static_cast<float>(scale),
          static_cast<float>(softcap)};
}

std::tuple<Tensor, Tensor> set_scores(Tensor hidden, Tensor weight, Tensor index, Tensor ids, Tensor offsets,
                                      Tensor targets, std::optional<Tensor> bias, Tensor temperature, double scale,
                                      double softcap, bool with_entropy) {
  const CandidateSets sets = candidate_sets(ids, offsets, targets, bias, temperature, scale, softcap);
  const Matrix tokens = matrix(hidden, "hidden"), rows = matrix(weight, "weight");
  STD_TORCH_CHECK(tokens.columns == rows.columns && tokens.dtype == rows.dtype,
                  "hidden and weight must have as many columns and the same dtype");
  STD_TORCH_CHECK(hidden.size(0) == sets.tokens, "hidden must have ", sets.tokens, " rows; got ", hidden.size(0));
  Tensor z = torch::stable::empty({ids.numel()}, ScalarType::Float);
  Tensor statistics = torch::stable::empty({4, sets.tokens}, ScalarType::Float);
  score_sets(sets, tokens, rows, rows_within(index, "index", ids.numel(), weight.size(0)),
             static_cast<float*>(z.mutable_data_ptr()), rows_of(statistics, sets.tokens, with_entropy));
  return {z, statistics};
}

Tensor set_derivatives(Tensor z, Tensor statistics, Tensor ids, Tensor offsets, Tensor targets, Tensor temperature,
                       double scale, double softcap, Tensor dlogp, std::optional<Tensor> dentropy) {
  const CandidateSets sets = candidate_sets(ids, offsets, targets, std::nullopt, temperature, scale, softcap);
  check(z, "z", ScalarType::Float, {ids.numel()});
  check(statistics, "statistics", ScalarType::Float, {4, sets.tokens});
  check(dlogp, "dlogp", ScalarType::Float, {sets.tokens});
  if (dentropy) check(*dentropy, "dentropy", ScalarType::Float, {sets.tokens});
  Tensor out = torch::stable::empty({ids.numel()}, ScalarType::Float);
  differentiate_sets(sets, data<float>(z), rows_of(statistics, sets.tokens, true), data<float>(dlogp),
                     dentropy ? data<float>(*dentropy) : nullptr, static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

void add_segment_sums_of(Tensor out, Tensor rows, Tensor x, Tensor index, Tensor factor, Tensor offsets) {
  const Matrix to = matrix(out, "out"), from = matrix(x, "x");
  STD_TORCH_CHECK(to.columns == from.columns, "out and x must have as many columns");
  const int64_t count = index.numel(), segments = rows.numel();
  check(factor, "factor", ScalarType::Float, {count});
  STD_TORCH_CHECK(offsets.numel() == segments + 1, "offsets must be [", segments + 1, "]; got [", offsets.numel(), "]");
  const int64_t* into = rows_within(rows, "rows", segments, out.size(0));
  for (int64_t s = 1; s < segments; s++) STD_TORCH_CHECK(into[s - 1] < into[s], "rows must ascend");
  add_segment_sums(to, into, from, rows_within(index, "index", count, x.size(0)), data<float>(factor),
                   segments_of(offsets, count), segments);
}

// (vocabulary rows of a block, bytes of an operand's element, bytes of a kept exponential), for a compute dtype that is
// bf16 or not.
std::vector<int64_t> head_plan(int64_t vocab, int64_t hidden, bool bf16) {
  check_machine();
  check_head_size(vocab, hidden);
  const Plan plan = Plan::of(vocab, hidden, bf16 ? Dtype::bf16 : Dtype::fp32);
  return {plan.block_rows, 4 / per_word(plan.kind), plan.kept_size()};
}

// (why the engine cannot run here, or nothing; what multiplies bf16)
std::tuple<std::string, std::string> probe() {
  return {machine().missing, machine().name};
}

void use_isa(std::string name) { use_instruction_set(name); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(grpo_fused_C, m) {
  m.def("probe() -> (str, str)");
  m.def("_use_isa(str name) -> ()");  // for tests
  m.def(
      "set_scores(Tensor hidden, Tensor weight, Tensor index, Tensor ids, Tensor offsets, Tensor targets, Tensor? bias, "
      "Tensor temperature, float scale, float softcap, bool with_entropy) -> (Tensor, Tensor)");
  m.def(
      "set_derivatives(Tensor z, Tensor statistics, Tensor ids, Tensor offsets, Tensor targets, Tensor temperature, "
      "float scale, float softcap, Tensor dlogp, Tensor? dentropy) -> Tensor");
  m.def("add_segment_sums(Tensor(a!) out, Tensor rows, Tensor x, Tensor index, Tensor factor, Tensor offsets) -> ()");
  m.def("head_plan(int vocab, int hidden, bool bf16) -> int[]");
  m.def("logit_statistics(Tensor logits, Tensor targets, bool with_entropy) -> Tensor");
  m.def(
      "logit_divergence(Tensor logits, Tensor(a!) other, Tensor statistics, Tensor other_statistics, Tensor targets, "
      "bool forward, Tensor? factor, Tensor? dlogp) -> Tensor");
  m.def("head_products(Tensor hidden, Tensor weight, Tensor(a!) out) -> ()");
  m.def(
      "head_scores(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor temperature, float scale, "
      "float softcap, Tensor? set_ids, Tensor? set_ranges, bool with_entropy, Tensor(a!) kept, Tensor(b!) spill) -> "
      "(Tensor, Tensor)");
  m.def(
      "head_gradient(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor temperature, float scale, "
      "float softcap, Tensor? set_ids, Tensor? set_ranges, Tensor statistics, Tensor offsets, Tensor rows, Tensor dlogp, "
      "Tensor? dentropy, Tensor(a!) dweight, Tensor spill, int superblock, bool need_hidden, bool need_bias) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fused_C, CompositeExplicitAutograd, m) {
  m.impl("probe", TORCH_BOX(&probe));
  m.impl("_use_isa", TORCH_BOX(&use_isa));
  m.impl("head_plan", TORCH_BOX(&head_plan));
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fused_C, CPU, m) {
  m.impl("logit_statistics", TORCH_BOX(&logit_statistics));
  m.impl("logit_divergence", TORCH_BOX(&logit_divergence));
  m.impl("head_products", TORCH_BOX(&head_products));
  m.impl("head_scores", TORCH_BOX(&head_scores));
  m.impl("head_gradient", TORCH_BOX(&head_gradient));
  m.impl("set_scores", TORCH_BOX(&set_scores));
  m.impl("set_derivatives", TORCH_BOX(&set_derivatives));
  m.impl("add_segment_sums", TORCH_BOX(&add_segment_sums_of));
}
