// The pool that runs a step: the caller is thread 0. Threads spin for a short while after a run, then sleep.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace headrace {

// Waits for something that another thread is about to do: a pause, and after a while a yield, so that an oversubscribed machine degrades instead of
// collapsing.
class Patience {
 public:
  void wait();

 private:
  int spins_ = 0;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }
  // Runs body(context, thread) on the caller and on every worker that comes in before the caller's own has returned, and returns when they have. So
  // the body must share its work out as it goes: a worker that the system has not let run yet is done without. Throws in a forked child, which has no
  // workers.
  void run(void (*body)(void*, int), void* context);

 private:
  void work(int thread);

  std::vector<std::thread> workers_;
  pid_t owner_;
  void (*body_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(128) std::atomic<uint32_t> epoch_{0};  // a new run
  alignas(128) std::atomic<uint32_t> sleepers_{0};
  alignas(128) std::atomic<bool> open_{false};  // the run that epoch_ counted may be entered
  alignas(128) std::atomic<uint32_t> inside_{0};
};

}  // namespace headrace
