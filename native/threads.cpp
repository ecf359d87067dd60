#include "threads.h"

#include <emmintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace headrace {
namespace {

// A pause takes about 65 cycles on Zen 4/5 and 140 on recent Intel cores.
constexpr int kIdleSpins = 2000;     // after a step: about 35 us of hope that the next one starts at once
constexpr int kBarrierSpins = 2000;  // inside a step: then yield, so that an oversubscribed machine degrades instead of collapsing

void futex_wait(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

Pool::Pool(int threads) : owner_(getpid()) {
  for (int thread = 1; thread < threads; thread++) workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
  if (getpid() != owner_) {  // a forked child: the threads do not exist here
    for (std::thread& worker : workers_) worker.detach();
    return;
  }
  stop_ = true;
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(epoch_);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(void (*body)(void*, int), void* context) {
  if (getpid() != owner_) throw std::runtime_error("[Pool] the process was forked after its threads started; start a new process instead");
  if (workers_.empty()) return body(context, 0);
  body_ = body;
  context_ = context;
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst)) futex_wake(epoch_);
  body(context, 0);
  barrier();
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    uint32_t now;
    while ((now = epoch_.load(std::memory_order_acquire)) == seen) {
      if (++spins < kIdleSpins) {
        _mm_pause();
      } else {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        if (epoch_.load(std::memory_order_seq_cst) == seen) futex_wait(epoch_, seen);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
    seen = now;
    if (stop_) return;
    body_(context_, thread);
    barrier();
  }
}

void Pool::barrier() {
  const uint32_t threads = static_cast<uint32_t>(size());
  if (threads == 1) return;
  const uint32_t generation = release_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
    arrived_.store(0, std::memory_order_relaxed);
    release_.store(generation + 1, std::memory_order_release);
    return;
  }
  int spins = 0;
  while (release_.load(std::memory_order_acquire) == generation) {
    if (++spins < kBarrierSpins)
      _mm_pause();
    else
      sched_yield();
  }
}

}  // namespace headrace
