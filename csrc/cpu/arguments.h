// Tensors as Python passes them (grpo_fused/engines/cpu_library.py), and their checks, before a pointer is used.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "machine.h"
#include "pairs.h"

namespace grpo {

enum class Scalar : int64_t { other = -1, fp32, bf16, fp16, int64, bytes, int8, fp8, int32 };

// A tensor on the CPU. The sizes and strides (in elements) of more than two dimensions are left out.
struct Tensor {
  void* data;
  Scalar scalar;
  int64_t dim;
  int64_t sizes[2], strides[2];

  int64_t size(int64_t d) const { return sizes[d]; }
  int64_t stride(int64_t d) const { return strides[d]; }
  int64_t numel() const { return dim == 0 ? 1 : dim == 1 ? sizes[0] : sizes[0] * sizes[1]; }
  int64_t element_size() const {
    switch (scalar) {
      case Scalar::int64: return 8;
      case Scalar::fp32: case Scalar::int32: return 4;
      case Scalar::bytes: case Scalar::int8: case Scalar::fp8: return 1;
      default: return 2;
    }
  }
  bool is_contiguous() const {
    int64_t next = 1;
    for (int64_t d = dim - 1; d >= 0; next *= sizes[d--]) {
      if (sizes[d] != 1 && strides[d] != next && numel() != 0) return false;
    }
    return true;
  }
};

// Throws the parts as one text.
template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

namespace {

// What a matrix may have of rows and of columns: arithmetic on such sizes does not overflow.
constexpr int64_t kMostRows = int64_t{1} << 31;

void check_machine() { check(machine().missing.empty(), "the native engine cannot run here: ", machine().missing); }

Dtype dtype_of(const Tensor& x, const char* name) {
  switch (x.scalar) {
    case Scalar::fp32: return Dtype::fp32;
    case Scalar::bf16: return Dtype::bf16;
    case Scalar::fp16: return Dtype::fp16;
    default: check(false, name, " must be float32, bfloat16 or float16");
  }
  return Dtype::fp32;
}

void check_matrix(const Tensor& x, const char* name, const char* shape) {
  check(x.dim == 2, name, " must be ", shape, "; got ", x.dim, " dimensions");
  check(x.size(0) < kMostRows && x.size(1) < kMostRows, name, " must have fewer than 2^31 rows and columns; got [",
        x.size(0), ", ", x.size(1), "]");
}

void check_shape(const Tensor& x, const char* name, const std::vector<int64_t>& shape) {
  bool same = x.dim == static_cast<int64_t>(shape.size());
  for (int64_t d = 0; same && d < x.dim; d++) same = x.size(d) == shape[d];
  if (same) return;
  std::string expected, came;
  for (size_t d = 0; d < shape.size(); d++) expected += (d ? ", " : "") + std::to_string(shape[d]);
  for (int64_t d = 0; d < std::min<int64_t>(x.dim, 2); d++) came += (d ? ", " : "") + std::to_string(x.size(d));
  check(false, name, " must be [", expected, "]; got [", came, x.dim > 2 ? ", ...]" : "]");
}

void check_tensor(const Tensor& x, const char* name, Scalar scalar, const std::vector<int64_t>& shape) {
  check_shape(x, name, shape);
  check(x.scalar == scalar, name, " has the wrong dtype");
  check(x.is_contiguous(), name, " must be contiguous");
}

template <class T>
T* data(const Tensor& x) {
  return static_cast<T*>(x.data);
}

// Fp32 numbers [count]; nullptr for an argument that is left out.
float* floats(const Tensor* x, const char* name, int64_t count) {
  if (x == nullptr) return nullptr;
  check_tensor(*x, name, Scalar::fp32, {count});
  return data<float>(*x);
}

template <class Index = int64_t>
const Index* rows_within(const Tensor& x, const char* name, int64_t count, int64_t limit) {
  check_tensor(x, name, sizeof(Index) == 4 ? Scalar::int32 : Scalar::int64, {count});
  const Index* values = data<Index>(x);
  for (int64_t k = 0; k < count; k++) {
    check(0 <= values[k] && values[k] < limit, name, " must be in [0, ", limit, "); got ", values[k], " at ", k);
  }
  return values;
}

// Where each of the segments begins, and the last one ends.
const int64_t* segments_of(const Tensor& offsets, int64_t count) {
  const int64_t segments = offsets.numel() - 1;
  check(segments >= 0, "offsets must hold at least one number");
  check_tensor(offsets, "offsets", Scalar::int64, {segments + 1});
  const int64_t* from = data<int64_t>(offsets);
  for (int64_t s = 0; s <= segments; s++) {
    check(from[s] >= (s == 0 ? 0 : from[s - 1]) && from[s] <= count, "offsets must rise within [0, ", count, "]; got ",
          from[s], " at ", s);
  }
  check(from[0] == 0 && from[segments] == count, "offsets must run from 0 to ", count, "; got ", from[0], " to ",
        from[segments]);
  return from;
}

Matrix matrix(const Tensor& x, const char* name) {
  check_machine();
  check_matrix(x, name, "a matrix");
  check(x.size(1) <= 1 || x.stride(1) == 1, "rows of ", name, " must be contiguous");
  return {data<char>(x), dtype_of(x, name), x.stride(0) * x.element_size(), x.size(1)};
}

}  // namespace
}  // namespace grpo
