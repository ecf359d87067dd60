// The pool that runs a step: the caller is thread 0. Threads spin between the phases of a step and for a short while after it, then sleep.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace headrace {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }
  // Runs body(context, thread) on every thread and returns when all have finished. Throws in a forked child, which has no workers.
  void run(void (*body)(void*, int), void* context);
  // Between phases of a run: returns when every thread has arrived. What was written before is visible after.
  void barrier();

 private:
  void work(int thread);

  std::vector<std::thread> workers_;
  pid_t owner_;
  void (*body_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;
  alignas(128) std::atomic<uint32_t> epoch_{0};  // a new run
  alignas(128) std::atomic<uint32_t> sleepers_{0};
  alignas(128) std::atomic<uint32_t> arrived_{0};  // at the barrier
  alignas(128) std::atomic<uint32_t> release_{0};  // its generation
};

}  // namespace headrace
