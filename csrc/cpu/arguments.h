// Checks of an operator's arguments, used before a pointer is taken from them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <string>
#include <vector>

#include "machine.h"
#include "pairs.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using namespace grpo;

void check_machine() {
  STD_TORCH_CHECK(machine().missing.empty(), "the native engine cannot run here: ", machine().missing);
}

Dtype dtype_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Dtype::fp32;
    case ScalarType::BFloat16: return Dtype::bf16;
    case ScalarType::Half: return Dtype::fp16;
    default: STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
  return Dtype::fp32;
}

void check_shape(const Tensor& x, const char* name, std::vector<int64_t> shape) {
  STD_TORCH_CHECK(x.is_cpu(), name, " must be on the CPU");
  bool same = x.dim() == static_cast<int64_t>(shape.size());
  std::string expected, came;
  for (size_t d = 0; d < shape.size(); d++) expected += (d ? ", " : "") + std::to_string(shape[d]);
  for (int64_t d = 0; d < x.dim(); d++) {
    came += (d ? ", " : "") + std::to_string(x.size(d));
    same = same && x.size(d) == shape[d];
  }
  STD_TORCH_CHECK(same, name, " must be [", expected, "]; got [", came, "]");
}

void check(const Tensor& x, const char* name, ScalarType dtype, std::vector<int64_t> shape) {
  check_shape(x, name, std::move(shape));
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " has the wrong dtype");
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
}

template <class T>
const T* data(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

const int64_t* rows_within(const Tensor& x, const char* name, int64_t count, int64_t limit) {
  check(x, name, ScalarType::Long, {count});
  const int64_t* values = data<int64_t>(x);
  for (int64_t k = 0; k < count; k++) {
    STD_TORCH_CHECK(0 <= values[k] && values[k] < limit, name, " must be in [0, ", limit, "); got ", values[k], " at ", k);
  }
  return values;
}

// Where each of the segments begins, and the last one ends.
const int64_t* segments_of(const Tensor& offsets, int64_t count) {
  const int64_t segments = offsets.numel() - 1;
  STD_TORCH_CHECK(segments >= 0, "offsets must hold at least one number");
  check(offsets, "offsets", ScalarType::Long, {segments + 1});
  const int64_t* from = data<int64_t>(offsets);
  for (int64_t s = 0; s <= segments; s++) {
    STD_TORCH_CHECK(from[s] >= (s == 0 ? 0 : from[s - 1]) && from[s] <= count, "offsets must rise within [0, ", count,
                    "]; got ", from[s], " at ", s);
  }
  STD_TORCH_CHECK(from[0] == 0 && from[segments] == count, "offsets must run from 0 to ", count, "; got ", from[0], " to ",
                  from[segments]);
  return from;
}

Matrix matrix(const Tensor& x, const char* name) {
  check_machine();
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 2, name, " must be a matrix on the CPU");
  STD_TORCH_CHECK(x.size(1) <= 1 || x.stride(1) == 1, "rows of ", name, " must be contiguous");
  STD_TORCH_CHECK(x.size(1) < int64_t{1} << 31, name, " must have fewer than 2^31 columns; got ", x.size(1));
  const Dtype dtype = dtype_of(x, name);
  return {static_cast<char*>(x.mutable_data_ptr()), dtype, x.stride(0) * static_cast<int64_t>(x.element_size()),
          x.size(1)};
}

Tensor zeros(std::vector<int64_t> shape) {
  Tensor out = torch::stable::empty(shape, ScalarType::Float);
  torch::stable::zero_(out);
  return out;
}

}  // namespace
