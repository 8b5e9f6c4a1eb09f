// The row kernels on a CPU: the same functions that the device runs, with simulated threads. Only barriers, shuffles
// and launches differ, since a CPU does not have them.
//
// The threads of the gradient, which may wait at a barrier in every stride, are real threads with a real barrier.
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>

#include "row_steps.h"

using namespace grpo;

namespace {

constexpr int kWarp = 32;

// As merge_block in row_kernel.cuh: a tree over lanes, then warps in order.
Partial merge_threads(std::vector<Partial> threads) {
  std::vector<Partial> warps;
  for (size_t first = 0; first < threads.size(); first += kWarp) {
    Partial* lane = &threads[first];
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      for (int i = 0; i < offset; ++i) {
        const Partial pair[] = {lane[i], lane[i + offset]};
        lane[i] = merge_in_order(pair, 2);
      }
    }
    warps.push_back(lane[0]);
  }
  return merge_in_order(warps.data(), int(warps.size()));
}

template <typename T, typename Out>
void run(RowMode mode, const RowArguments& a, int64_t row, int threads) {
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride_logits;
  Out* out = static_cast<Out*>(a.out) + row * a.stride_out;
  const RowTransform t = row_transform(a, row);
  const Target target = row_target(a, row, logits, t);
  const Row<T> values = {logits, a.vocab_size, a.wide_logits};
  RowCoefficients c;
  if (mode == RowMode::gradient) {
    c = known_coefficients(a, row, target);
  } else {
    std::vector<Partial> of_threads;
    for (int i = 0; i < threads; ++i) {
      of_threads.push_back(thread_statistics(values, Thread{i, threads}, t, a.entropy != nullptr));
    }
    const RowStatistics s = finish(merge_threads(of_threads), target.z);
    write_statistics(a, row, s);
    if (mode == RowMode::statistics) return;
    c = row_loss(a, row, s, target, true);
  }
  std::barrier meeting(threads);
  const auto meet = [&] {
    if (a.stores_land_ahead) meeting.arrive_and_wait();
  };
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&, i] {
      const Thread thread = {i, threads};
      if (c.zero) {
        thread_zeros(a.vocab_size, thread, out, a.wide_out);
      } else {
        thread_gradient(values, thread, t, c, out, a.wide_out, meet);
      }
    });
  }
  for (auto& thread : running) thread.join();
}

}  // namespace

template <typename T, typename Out>
int run(RowMode mode, const RowArguments& a, int threads) {
  for (int64_t row = 0; row < a.rows; ++row) run<T, Out>(mode, a, row, threads);
  return 0;
}

// Types: 0 float, 1 bfloat16, 2 float16. Returns 0, or 1 for types not shipped.
extern "C" int run_rows(int mode, int logits, int out, const RowArguments* a, int threads) {
  const auto what = static_cast<RowMode>(mode);
  if (logits == 0 && out == 0) return run<float, float>(what, *a, threads);
  if (logits == 0 && out == 1) return run<float, Bf16>(what, *a, threads);
  if (logits == 0 && out == 2) return run<float, Fp16>(what, *a, threads);
  if (logits == 1 && out == 1) return run<Bf16, Bf16>(what, *a, threads);
  if (logits == 2 && out == 2) return run<Fp16, Fp16>(what, *a, threads);
  return 1;
}

extern "C" int size_of_arguments() { return int(sizeof(RowArguments)); }
