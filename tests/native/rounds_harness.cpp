// The order of the gradient's tasks (csrc/cpu/rounds.h), one after the other, with waits that are counted.
#include "cpu/rounds.h"

namespace {
int unmet;
}

namespace grpo {
void wait_until_at_least(const std::atomic<int64_t>& count, int64_t wanted) { unmet += count < wanted; }
}  // namespace grpo

// The number of tasks; superblock, block and tile of `task`, -1 for what it has not, in `out`; how many of its waits are
// not met after all tasks before it but `left_out`.
extern "C" int64_t rounds_of(int64_t blocks, int64_t superblock, int64_t slots, int64_t tiles, int64_t task,
                             int64_t left_out, int64_t* out) {
  grpo::Rounds rounds(blocks, superblock, slots, tiles);
  const auto run = [&](int64_t i) {
    rounds.run(
        i, [&](int64_t at, int64_t block) { out[0] = at, out[1] = block, out[2] = -1; },
        [&](int64_t at, int64_t tile) { out[0] = at, out[1] = -1, out[2] = tile; });
  };
  for (int64_t i = 0; i < task; i++) {
    if (i != left_out) run(i);
  }
  unmet = 0;
  run(task);
  out[3] = unmet;
  return rounds.tasks();
}
