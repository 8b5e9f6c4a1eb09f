// Tasks on threads of our own, so that the library needs nothing of PyTorch; they sleep between calls.
#include <pthread.h>
#include <xmmintrin.h>

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "head.h"

namespace grpo {
namespace {

// What a thread does before it sleeps: the next tasks of a call begin sooner. About 50 microseconds.
constexpr int kSpins = 1000;

struct Job {
  void (*f)(int64_t, int64_t, void*);
  void* context;
  int64_t tasks, workers;
  unsigned arithmetic;  // how the caller rounds, and what it does with denormal numbers
};

template <class F>
void wait_until(F&& done) {
  for (int spins = 0; !done(); spins++) {
    if (spins < kSpins) {
      _mm_pause();
    } else {
      std::this_thread::yield();
    }
  }
}

// Helpers enter a job while it is open. The caller works on it too, closes it when no task is left, and waits for the
// helpers that are inside only: one that the system has put aside is not waited for before it has taken a task.
class Pool {
 public:
  // False if another thread's job is running.
  bool run(const Job& job) {
    const std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    while (static_cast<int64_t>(helpers_.size()) < job.workers - 1 && add_helper()) {
    }
    job_ = job;
    next_ = 0;
    gate_ = (gate_ & ~kInside) + kGeneration + kOpen;
    gate_.notify_all();
    work(job, 0);
    gate_ -= kOpen;
    wait_until([&] { return (gate_ & kInside) == 0; });
    return true;
  }

 private:
  // Of `gate_`: helpers inside, whether it is open, and a number for each job.
  static constexpr uint32_t kInside = 0xffff, kOpen = 1 << 16, kGeneration = 1 << 17;

  bool add_helper() {
    const int64_t worker = static_cast<int64_t>(helpers_.size()) + 1;
    try {
      helpers_.emplace_back([this, worker] { help(worker); });
    } catch (const std::system_error&) {  // the system allows no more threads: the others do the work
      return false;
    }
    pthread_setname_np(helpers_.back().native_handle(), "grpo_fused");  // as `top` and `perf` show it
    helpers_.back().detach();  // it ends with the process
    return true;
  }

  void help(int64_t worker) {
    for (uint32_t seen = 0;;) {
      uint32_t gate = gate_;
      for (int spins = 0; done_with(gate, seen) && spins < kSpins; spins++) {
        _mm_pause();
        gate = gate_;
      }
      if (done_with(gate, seen)) {
        gate_.wait(gate);
        continue;
      }
      if (!gate_.compare_exchange_weak(gate, gate + 1)) continue;
      seen = gate & ~(kInside | kOpen);
      if (worker < job_.workers) {
        _mm_setcsr(job_.arithmetic);
        work(job_, worker);
      }
      gate_--;
    }
  }

  // Whether there is no open job that this helper has not seen.
  static bool done_with(uint32_t gate, uint32_t seen) {
    return (gate & kOpen) == 0 || (gate & ~(kInside | kOpen)) == seen;
  }

  void work(const Job& job, int64_t worker) {
    for (int64_t task = next_++; task < job.tasks; task = next_++) job.f(task, worker, job.context);
  }

  std::mutex busy_;
  std::vector<std::thread> helpers_;
  Job job_{};
  std::atomic<int64_t> next_{0};
  std::atomic<uint32_t> gate_{0};
};

Pool* the_pool = nullptr;  // never deleted: helpers use it until the process ends

// A child has none of its parent's threads.
void forget_pool() { the_pool = new Pool; }

Pool& pool() {
  static const int registered = (forget_pool(), pthread_atfork(nullptr, nullptr, forget_pool));
  (void)registered;
  return *the_pool;
}

thread_local int64_t threads = 1;

}  // namespace

void wait_until_at_least(const std::atomic<int64_t>& count, int64_t wanted) {
  wait_until([&] { return count >= wanted; });
}

void use_threads(int64_t count) { threads = count; }

int64_t thread_count() { return std::max<int64_t>(threads, 1); }

int64_t worker_count(int64_t tasks) { return std::clamp<int64_t>(thread_count(), 1, std::max<int64_t>(tasks, 1)); }

void run_tasks(int64_t tasks, int64_t workers, void (*f)(int64_t, int64_t, void*), void* context) {
  const Job job{f, context, tasks, workers, _mm_getcsr()};
  if (workers > 1 && pool().run(job)) return;
  for (int64_t task = 0; task < tasks; task++) f(task, 0, context);
}

}  // namespace grpo
