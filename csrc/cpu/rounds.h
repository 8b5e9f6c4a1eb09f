// The order of the gradient's tasks, and what each of them waits for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace grpo {

void wait_until_at_least(const std::atomic<int64_t>& count, int64_t wanted);

// A superblock has two rounds: of its blocks, then of the tiles of dH, to each of which it is added. All tasks are one
// queue: blocks of superblock 0, of 1, tiles of 0, blocks of 2, tiles of 1, and so on. A tile waits for the blocks of
// its superblock, and for the superblock before to be added to it; a block for the tiles that still read its memory,
// `slots` superblocks before. So sums have one order, a task waits only for tasks before it in the queue, and a thread
// that the system has put aside holds up the others only after another superblock's work, not at the end of each round.
// With one slot, whose memory is the least, a superblock begins after the one before.
class Rounds {
 public:
  // slots: superblocks whose dz is in memory at a time; tiles: 0 if dH is not wanted.
  Rounds(int64_t blocks, int64_t superblock, int64_t slots, int64_t tiles)
      : blocks_(blocks), superblock_(superblock), slots_(slots), tiles_(tiles), last_((blocks - 1) / superblock),
        blocks_done_(last_ + 1), tiles_done_(last_ + 1), added_(tiles) {}

  int64_t tasks() const { return blocks_ + (last_ + 1) * tiles_; }

  // block(superblock, block) or tile(superblock, tile), when what it waits for is done.
  template <class Block, class Tile>
  void run(int64_t task, Block&& block, Tile&& tile) {
    const Task next = task_at(task);
    const int64_t at = next.superblock;
    if (next.tile < 0) {
      if (at >= slots_) wait_until_at_least(tiles_done_[at - slots_], tiles_);
      block(at, next.block);
      blocks_done_[at]++;
    } else {
      wait_until_at_least(blocks_done_[at], blocks_of(at));
      wait_until_at_least(added_[next.tile], at);
      tile(at, next.tile);
      added_[next.tile]++;
      tiles_done_[at]++;
    }
  }

  int64_t blocks_of(int64_t superblock) const { return std::min(superblock_, blocks_ - superblock * superblock_); }

 private:
  struct Task {
    int64_t superblock, block, tile;  // tile: -1 for a block
  };

  Task task_at(int64_t task) const {
    const int64_t lead = slots_ > 1 ? std::min(superblock_, blocks_) : 0;  // blocks before all others
    if (task < lead) return {0, task, -1};
    task -= lead;
    // tiles of each superblock, after the blocks of the next one, which may be fewer; with one slot, after its own
    const int64_t ahead = lead > 0 ? 1 : 0, both = superblock_ + tiles_;
    const int64_t at = std::min(task / both, std::max<int64_t>(last_ - ahead, 0));
    task -= at * both;
    const int64_t blocks = at + ahead > last_ ? 0 : blocks_of(at + ahead);
    if (task < blocks) return {at + ahead, (at + ahead) * superblock_ + task, -1};
    task -= blocks;
    return task < tiles_ ? Task{at, 0, task} : Task{at + 1, 0, task - tiles_};
  }

  int64_t blocks_, superblock_, slots_, tiles_, last_;
  std::vector<std::atomic<int64_t>> blocks_done_, tiles_done_, added_;
};

}  // namespace grpo
