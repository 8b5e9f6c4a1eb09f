// All kernels, for the instruction set whose vectors are already declared.
//
// They are plain functions of pointers in an unnamed namespace: an inline function (of the standard library, say) that
// is compiled here may be what the linker picks for everybody, on machines without this instruction set too.
#pragma once

#include "math.h"

#include "pack.h"

#include "gemm.h"
#include "gradient.h"
#include "pairs.h"
#include "score.h"
#include "divergence.h"

namespace grpo {
namespace {

constexpr Kernels kAll{
    .multiply = multiply_fp32,
    .score_tile = score_tile,
    .merge_tile = merge_tile,
    .gradient_tile = gradient_tile,
    .compress_tile = compress_tile,
    .pack_rows = pack_rows,
    .transpose_panel = transpose_panel,
    .interleave_panel = interleave_panel,
    .store_gradient = store_gradient,
    .transpose_tile = transpose_tile,
    .row_product = row_product,
    .add_row = add_row,
    .row_sums = row_sums,
    .row_divergence = row_divergence,
    .row_derivative = row_derivative,
};

}  // namespace
}  // namespace grpo
