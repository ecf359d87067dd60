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
constexpr int kIdleSpins = 2000;  // after a step: about 35 us of hope that the next one starts at once
constexpr int kWaitSpins = 2000;  // inside a step

void futex_wait(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

void Patience::wait() {
  if (++spins_ < kWaitSpins)
    _mm_pause();
  else
    sched_yield();
}

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
  open_.store(true, std::memory_order_seq_cst);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst)) futex_wake(epoch_);
  body(context, 0);
  open_.store(false, std::memory_order_seq_cst);
  Patience patience;
  while (inside_.load(std::memory_order_seq_cst)) patience.wait();
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
    // Counted first, then asked: either the caller sees this worker inside and waits for it, or this worker sees that the run is over. The run it
    // enters may be a later one than `now`, hence `seen` anew. In the moment between open_ and epoch_ it can still enter one twice: the second time
    // everything is done already.
    inside_.fetch_add(1, std::memory_order_seq_cst);
    if (open_.load(std::memory_order_seq_cst)) {
      seen = epoch_.load(std::memory_order_acquire);
      body_(context_, thread);
    }
    inside_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace headrace
