// The row kernels on a CPU: the same functions that the device runs, with simulated blocks and threads. Only barriers,
// bulk copies, shuffles and launches differ, since a CPU does not have them.
//
// A cluster's blocks and threads run one after the other, phase by phase as its barriers divide them. The streaming
// kernel, whose threads wait at a barrier in every stride, runs on real threads with a real barrier.
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>

#include "row_plan.h"
#include "row_steps.h"

using namespace grpo;

namespace {

const auto nothing = [](auto...) {};

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

// A block's shared memory: full of NaN, until the copy of a chunk has been waited for.
template <typename T>
struct Held {
  std::vector<Packet<T>> memory;  // for its alignment
  const T* from;
  int count;
  bool wide;

  Held(const T* from, int count, int length, bool wide)
      : memory(length / kPacket<T> + 1), from(from), count(count), wide(wide) {
    std::memset(static_cast<void*>(memory.data()), 0xff, memory.size() * sizeof(Packet<T>));
    for (int i = bulk_elements<T>(count, wide); i < count; ++i) data()[i] = from[i];
  }
  T* data() { return memory.data()->value; }
  void arrive(int chunk) {
    const int begin = chunk * kChunk<T>, elements = chunk_elements<T>(bulk_elements<T>(count, wide), begin);
    std::memcpy(data() + begin, from + begin, elements * sizeof(T));
  }
};

template <typename T, typename Out>
void run_cluster(RowMode mode, const RowArguments& a, int64_t row, int blocks, int threads) {
  const int length = part_length(a.vocab_size, blocks);
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride_logits;
  Out* out = static_cast<Out*>(a.out) + row * a.stride_out;
  const RowTransform t = row_transform(a, row);
  const Target target = row_target(a, row, logits, t);
  std::vector<Held<T>> held;
  for (int rank = 0; rank < blocks; ++rank) {
    const int count = part_count(a.vocab_size, length, rank);
    held.emplace_back(logits + length * rank, count, length, a.wide_logits);
  }
  const auto part = [&](int rank) {
    return Part<T>{held[rank].data(), length * rank, part_count(a.vocab_size, length, rank), true};
  };
  RowCoefficients c = {};
  if (mode == RowMode::gradient) {
    c = known_coefficients(a, row, target);
    for (int rank = 0; rank < blocks && a.stores_land_ahead; ++rank) {
      for (int chunk = 0; chunk * kChunk<T> < part(rank).count; ++chunk) held[rank].arrive(chunk);
    }
  } else {
    std::vector<Partial> of_blocks;
    for (int rank = 0; rank < blocks; ++rank) {
      std::vector<Partial> of_threads;
      for (int i = 0; i < threads; ++i) {
        of_threads.push_back(thread_statistics(part(rank), Thread{i, threads}, t, a.entropy != nullptr,
                                               [&](int chunk) { held[rank].arrive(chunk); }));
      }
      of_blocks.push_back(merge_threads(of_threads));
    }
    const RowStatistics s = finish(merge_in_order(of_blocks.data(), blocks), target.z);
    write_statistics(a, row, s);
    if (mode == RowMode::statistics) return;
    c = row_loss(a, row, s, target, true);
  }
  for (int rank = 0; rank < blocks; ++rank) {
    const auto arrived = [&](int chunk) {
      if (mode == RowMode::gradient && !a.stores_land_ahead) held[rank].arrive(chunk);
    };
    for (int i = 0; i < threads; ++i) {
      const Thread thread = {i, threads};
      if (c.zero) {
        thread_zeros(part(rank).count, thread, out + length * rank, a.wide_out);
      } else {
        // a chunk that is copied again after a store would hold stored values: in place, only the first copy is valid
        if (i == 0 || mode != RowMode::gradient) {
          thread_gradient(part(rank), thread, t, c, out + length * rank, a.wide_out, arrived, nothing);
        } else {
          thread_gradient(part(rank), thread, t, c, out + length * rank, a.wide_out, nothing, nothing);
        }
      }
    }
  }
}

template <typename T, typename Out>
void run_stream(RowMode mode, const RowArguments& a, int64_t row, int threads) {
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride_logits;
  Out* out = static_cast<Out*>(a.out) + row * a.stride_out;
  const RowTransform t = row_transform(a, row);
  const Target target = row_target(a, row, logits, t);
  const Part<T> part = {logits, 0, a.vocab_size, a.wide_logits};
  RowCoefficients c;
  if (mode == RowMode::gradient) {
    c = known_coefficients(a, row, target);
  } else {
    std::vector<Partial> of_threads;
    for (int i = 0; i < threads; ++i) {
      of_threads.push_back(thread_statistics(part, Thread{i, threads}, t, a.entropy != nullptr, nothing));
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
        thread_gradient(part, thread, t, c, out, a.wide_out, nothing, meet);
      }
    });
  }
  for (auto& thread : running) thread.join();
}

template <typename T, typename Out>
void run(RowMode mode, const RowArguments& a, int blocks, int threads) {
  for (int64_t row = 0; row < a.rows; ++row) {
    if (blocks > 0) {
      run_cluster<T, Out>(mode, a, row, blocks, threads);
    } else {
      run_stream<T, Out>(mode, a, row, threads);
    }
  }
}

}  // namespace

// Types: 0 float, 1 bfloat16, 2 float16. `blocks` of a cluster, or 0 to stream. Returns 0, or 1 for types not shipped.
extern "C" int run_rows(int mode, int logits, int out, const RowArguments* a, int blocks, int threads) {
  const auto what = static_cast<RowMode>(mode);
  if (logits == 0 && out == 0) return run<float, float>(what, *a, blocks, threads), 0;
  if (logits == 0 && out == 1) return run<float, Bf16>(what, *a, blocks, threads), 0;
  if (logits == 0 && out == 2) return run<float, Fp16>(what, *a, blocks, threads), 0;
  if (logits == 1 && out == 1) return run<Bf16, Bf16>(what, *a, blocks, threads), 0;
  if (logits == 2 && out == 2) return run<Fp16, Fp16>(what, *a, blocks, threads), 0;
  return 1;
}

extern "C" int size_of_arguments() { return int(sizeof(RowArguments)); }

// Returns whether the plan is possible; its blocks and threads are written to `plan`.
extern "C" bool plan(int vocab_size, int itemsize, bool clusters, int block_bytes, int processor_bytes, int blocks,
                     int threads, int* plan) {
  RowPlan chosen;
  const bool possible = plan_row(vocab_size, itemsize, {clusters, block_bytes, processor_bytes}, blocks, threads, &chosen);
  plan[0] = chosen.blocks;
  plan[1] = chosen.threads;
  return possible;
}

extern "C" int64_t held(int vocab_size, int itemsize, int blocks) { return held_bytes(vocab_size, itemsize, blocks); }
