// The unchanged row kernels, csrc/cuda/row_kernel.cuh, on threads of a CPU.
#include "emulated.h"

#include "cuda/row_kernel.cuh"

namespace grpo {

BlockMemory block_memory() {
  return {reinterpret_cast<RowScratch*>(emulated::block().scratch.data()),
          reinterpret_cast<unsigned char*>(emulated::block().row.data())};
}

namespace {

template <RowMode Mode, typename T, typename Out>
int run(const RowArguments& a, int blocks, int threads) {
  for (int64_t row = 0; row < a.rows; ++row) {
    if (blocks > 0) {
      emulated::launch(blocks, threads, unsigned(row * blocks), sizeof(RowScratch),
                       held_bytes(a.vocab_size, sizeof(T), blocks), [&] { row_cluster_kernel<Mode, T, Out>(a); });
    } else {
      emulated::launch(1, threads, unsigned(row), sizeof(RowScratch), 0, [&] { row_stream_kernel<Mode, T, Out>(a); });
    }
  }
  return 0;
}

template <typename T, typename Out>
int run(RowMode mode, const RowArguments& a, int blocks, int threads) {
  if (mode == RowMode::statistics) return run<RowMode::statistics, T, Out>(a, blocks, threads);
  if (mode == RowMode::gradient) return run<RowMode::gradient, T, Out>(a, blocks, threads);
  return run<RowMode::loss, T, Out>(a, blocks, threads);
}

}  // namespace
}  // namespace grpo

// Like run_rows of row_harness.cpp.
extern "C" int run_rows(int mode, int logits, int out, const grpo::RowArguments* a, int blocks, int threads) {
  using namespace grpo;
  const auto what = static_cast<RowMode>(mode);
  if (logits == 0 && out == 0) return run<float, float>(what, *a, blocks, threads);
  if (logits == 0 && out == 1) return run<float, Bf16>(what, *a, blocks, threads);
  if (logits == 1 && out == 1) return run<Bf16, Bf16>(what, *a, blocks, threads);
  return 1;
}

extern "C" int size_of_arguments() { return int(sizeof(grpo::RowArguments)); }
