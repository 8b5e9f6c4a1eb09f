// The unchanged row kernels, csrc/cuda/row_kernel.cuh, on threads of a CPU.
#include "emulated.h"

#include "cuda/row_kernel.cuh"

namespace grpo {

Partial* of_warps() { return reinterpret_cast<Partial*>(emulated::block->shared.data()); }

namespace {

template <RowMode Mode, typename T, typename Out>
int run(const RowArguments& a, int threads) {
  for (int64_t row = 0; row < a.rows; ++row) {
    emulated::launch(unsigned(row), threads, sizeof(Partial) * threads / kWarp, [&] { row_kernel<Mode, T, Out>(a); });
  }
  return 0;
}

template <typename T, typename Out>
int run(RowMode mode, const RowArguments& a, int threads) {
  if (mode == RowMode::statistics) return run<RowMode::statistics, T, Out>(a, threads);
  if (mode == RowMode::gradient) return run<RowMode::gradient, T, Out>(a, threads);
  return run<RowMode::loss, T, Out>(a, threads);
}

}  // namespace
}  // namespace grpo

// Like run_rows of row_harness.cpp.
extern "C" int run_rows(int mode, int logits, int out, const grpo::RowArguments* a, int threads) {
  using namespace grpo;
  const auto what = static_cast<RowMode>(mode);
  if (logits == 0 && out == 0) return run<float, float>(what, *a, threads);
  if (logits == 0 && out == 1) return run<float, Bf16>(what, *a, threads);
  if (logits == 1 && out == 1) return run<Bf16, Bf16>(what, *a, threads);
  return 1;
}

extern "C" int size_of_arguments() { return int(sizeof(grpo::RowArguments)); }
