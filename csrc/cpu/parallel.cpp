// Tasks on PyTorch's own threads: a second OpenMP runtime would compete for the cores.
#include <torch/csrc/stable/ops.h>

#include "head.h"

namespace grpo {

int64_t worker_count(int64_t tasks) {
  return std::clamp<int64_t>(torch::stable::get_num_threads(), 1, std::max<int64_t>(tasks, 1));
}

void run_tasks(int64_t tasks, int64_t workers, void (*f)(int64_t, int64_t, void*), void* context) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; worker++) {
      for (int64_t task = next++; task < tasks; task = next++) f(task, worker, context);
    }
  });
}

}  // namespace grpo
