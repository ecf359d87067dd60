// Measurements that must not pass through Python: what this machine can do at most (reads, multiply-adds), and a linear layer on packed random
// weights. A measurement is a window: every thread works for about `seconds`, the caller interleaves windows of limit and kernel and compares
// neighbours.
#include <immintrin.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "bind.h"
#include "kernels.h"

namespace nb = nanobind;

namespace headrace {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Memory in huge pages where the system allows, as the packed weights are held.
class Arena {
 public:
  explicit Arena(size_t bytes) : bytes_((bytes + kHuge - 1) / kHuge * kHuge) {
    void* p = mmap(nullptr, bytes_ + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    base_ = p;
    data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + kHuge - 1) / kHuge * kHuge);
    madvise(data_, bytes_, MADV_HUGEPAGE);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { munmap(base_, bytes_ + kHuge); }
  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kHuge = size_t{1} << 21;
  size_t bytes_;
  void* base_;
  uint8_t* data_;
};

// A spinning barrier: a step's phases are microseconds, so a sleeping one would be most of what is measured.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait() {
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      while (phase_.load(std::memory_order_acquire) == phase) _mm_pause();
    }
  }

 private:
  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

void run_on(int threads, const std::function<void(int)>& body) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++) others.emplace_back(body, t);
  body(0);
  for (std::thread& other : others) other.join();
}

uint64_t mix(uint64_t& state) {  // splitmix64
  uint64_t z = (state += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

void fill_random(uint8_t* p, size_t bytes, uint64_t seed) {
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t v = mix(seed);
    std::memcpy(p + i, &v, 8);
  }
}

// ---- limits ----

#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512vnni,avx512bf16")))
#define EACH16(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12) F(13) F(14) F(15)
#define EACH12(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11)

constexpr int kBurst = 20000;

// Independent chains of one instruction, a burst at a time: 16 of 32 registers, 12 of 16.
#define PEAK(name, target, vector, each, line) \
  target void name() {                         \
    vector x = {}, y = {}, a[16] = {};         \
    for (int i = 0; i < kBurst; i++) {         \
      each(line)                               \
    }                                          \
  }
#define DOT(i) __asm__ volatile("vpdpbusd %1,%2,%0" : "+v"(a[i]) : "v"(x), "v"(y));
#define BF(i) __asm__ volatile("vdpbf16ps %1,%2,%0" : "+v"(a[i]) : "v"(x), "v"(y));
#define FMA(i) __asm__ volatile("vfmadd231ps %1,%2,%0" : "+v"(a[i]) : "v"(x), "v"(y));
#define MADD(i) __asm__ volatile("vpmaddubsw %1,%2,%0" : "=x"(a[i]) : "x"(x), "x"(y));
PEAK(dot512, TARGET_AVX512, __m512i, EACH16, DOT)
PEAK(bf512, TARGET_AVX512, __m512i, EACH16, BF)
PEAK(fma512, TARGET_AVX512, __m512i, EACH16, FMA)
PEAK(fma256, TARGET_AVX2, __m256i, EACH12, FMA)
PEAK(madd256, TARGET_AVX2, __m256i, EACH12, MADD)

// One linear stream; `ahead` bytes are prefetched into L1 where it is not 0.
#define READ(name, target, vector, line, instruction)                                                                     \
  target void name(const uint8_t* p, size_t bytes, size_t ahead) {                                                        \
    vector a[8] = {};                                                                                                     \
    for (size_t o = 0; o + 8 * line <= bytes; o += 8 * line)                                                              \
      for (int i = 0; i < 8; i++) {                                                                                       \
        if (ahead) __builtin_prefetch(p + o + ahead + line * i);                                                          \
        __asm__ volatile(instruction " %1,%0,%0" : "+v"(a[i]) : "m"(*reinterpret_cast<const vector*>(p + o + line * i))); \
      }                                                                                                                   \
  }
READ(read512, TARGET_AVX512, __m512i, 64, "vpxord")
READ(read256, TARGET_AVX2, __m256i, 32, "vpxor")

// The machine's limits on `threads` threads: multiply-adds a second and bytes read a second.
class Limits {
 public:
  Limits(int threads, size_t mib) : threads_(threads), memory_(mib << 20) {
    __builtin_cpu_init();
    vnni_ = __builtin_cpu_supports("avx512vnni");
    bf16_ = __builtin_cpu_supports("avx512bf16");
    avx512_ = __builtin_cpu_supports("avx512f");
    if (!__builtin_cpu_supports("avx2")) throw nb::value_error("[Limits] cpu: expected avx2 or better");
    fill_random(memory_.data(), memory_.bytes(), 1);
  }

  // GB/s; `ahead`: bytes of software prefetch, 0 for none.
  double read(double seconds, size_t ahead) {
    const size_t share = memory_.bytes() / threads_ / 4096 * 4096, slice = size_t{1} << 20;
    return rate(seconds,
                [&](int t, int64_t step) {
                  const size_t at = static_cast<size_t>(step) * slice % share, bytes = std::min(slice, share - at);
                  (avx512_ ? read512 : read256)(memory_.data() + t * share + at, bytes, ahead);
                  return static_cast<double>(bytes);
                }) /
           1e9;
  }
  // GMAC/s of the level's own instruction; 0 where there is none.
  double int8(double seconds) { return vnni_ ? peak(seconds, dot512, 16 * 64) : peak(seconds, madd256, 12 * 32); }
  double bfloat16(double seconds) { return bf16_ ? peak(seconds, bf512, 16 * 32) : 0; }
  double float32(double seconds) { return avx512_ ? peak(seconds, fma512, 16 * 16) : peak(seconds, fma256, 12 * 8); }

 private:
  double peak(double seconds, void (*burst)(), double work) {
    return rate(seconds,
                [&](int, int64_t) {
                  burst();
                  return work * kBurst;
                }) /
           1e9;
  }

  // The sum over the threads of work done over time taken.
  template <typename Step>
  double rate(double seconds, const Step& step) {
    Barrier barrier(threads_);
    std::vector<double> rates(threads_ * 8);  // 64 B apart
    run_on(threads_, [&](int t) {
      barrier.wait();
      const double start = now();
      double done = 0, elapsed = 0;
      for (int64_t i = 0; elapsed < seconds; i++) {
        done += step(t, i);
        elapsed = now() - start;
      }
      rates[t * 8] = done / elapsed;
    });
    double sum = 0;
    for (int t = 0; t < threads_; t++) sum += rates[t * 8];
    return sum;
  }

  int threads_;
  Arena memory_;
  bool vnni_, bf16_, avx512_;
};

// ---- one linear layer, many layers of weights one after the other ----

class LinearBench {
 public:
  LinearBench(int format, int64_t n, int64_t k, int64_t rows, int epilogue, int layers, int threads)
      : threads_(threads),
        layers_(layers),
        groups_(k / kGroup),
        layer_bytes_(packed_bytes(static_cast<Format>(format), n, k)),
        weights_(layer_bytes_ * layers),
        input_(rows * (k + 64) * 3 + rows * (groups_ + 16) * 12 + 4096),
        output_(rows * (n + 16) * 4 + rows * (n + 64) * 3 + 65536) {
    a_ = {};
    a_.format = static_cast<Format>(format);
    a_.n = n, a_.k = k, a_.rows = rows;
    a_.epilogue = static_cast<Epilogue>(epilogue);
    fill_weights();
    a_.in = activations(input_.data(), k, rows);
    fill_activations();
    if (a_.epilogue == Epilogue::silu_mul) {
      a_.act_out = activations(output_.data(), n / 2, rows);
      (a_.format == Format::bf16 ? reinterpret_cast<void*&>(a_.act_out.q) : reinterpret_cast<void*&>(a_.act_out.b)) = nullptr;
    } else {
      a_.out = reinterpret_cast<float*>(output_.data());
      a_.ld_out = n + 16;
    }
  }

  // Seconds of one layer: passes over all layers, a barrier after each layer as in a step, for about `seconds`. The threads share a layer out as the
  // pool does: each begins with its own half of its range and then takes what is left, so a thread the system interrupts does not hold up the rest.
  double run(double seconds) {
    const int64_t units = (a_.n + kPanel - 1) / kPanel / (a_.epilogue == Epilogue::silu_mul ? 2 : 1);
    const int64_t unit_bytes = static_cast<int64_t>(layer_bytes_) / units;
    Barrier barrier(threads_);
    std::vector<Share> shares(threads_);
    std::atomic<bool> more{true};
    double elapsed = 0;
    int64_t done = 0;
    run_on(threads_, [&](int t) {
      Linear a = a_;
      int turn = 0;  // layers alternate between two counters
      barrier.wait();
      const double start = now();
      while (more.load(std::memory_order_relaxed)) {
        for (int layer = 0; layer < layers_; layer++, turn ^= 1) {
          a.weight = weights_.data() + layer * layer_bytes_;
          const auto take = [&](int owner) {
            const int64_t begin = units * owner / threads_, end = units * (owner + 1) / threads_;
            for (;;) {
              const int64_t first = begin + shares[owner].taken[turn].fetch_add(1, std::memory_order_relaxed);
              if (first >= end) return;
              const int64_t last = first + 1;
              a.next = a.weight + last * unit_bytes;
              if (last == units * (t + 1) / threads_)
                a.next = weights_.data() + (layer + 1) % layers_ * layer_bytes_ + units * t / threads_ * unit_bytes;
              kernels().linear(a, first, last);
            }
          };
          for (int i = 0; i < threads_; i++) take((t + i) % threads_);
          shares[t].taken[turn ^ 1].store(0, std::memory_order_relaxed);  // of the layer before, which nobody takes from any more
          barrier.wait();
        }
        if (t == 0) {
          done += layers_;
          elapsed = now() - start;
          if (elapsed >= seconds) more.store(false, std::memory_order_relaxed);
        }
        barrier.wait();
      }
    });
    return elapsed / static_cast<double>(done);
  }

  size_t bytes() const { return layer_bytes_; }
  double macs() const { return static_cast<double>(a_.rows) * a_.n * a_.k; }

 private:
  static int64_t padded(int64_t bytes) { return bytes % 1024 ? bytes : bytes + 64; }

  static Activations activations(uint8_t* p, int64_t k, int64_t rows) {
    Activations act = {};
    act.ldq = padded((k + 63) / 64 * 64);
    act.ldg = (k / kGroup + 15) / 16 * 16;
    act.ldb = padded(2 * ((k + 31) / 32 * 32)) / 2;
    act.q = reinterpret_cast<int8_t*>(p);
    p += act.ldq * rows;
    act.scale = reinterpret_cast<float*>(p);
    p += act.ldg * rows * 4;
    act.corr = reinterpret_cast<int32_t*>(p);
    p += act.ldg * rows * 4;
    act.sum = reinterpret_cast<float*>(p);
    p += act.ldg * rows * 4;
    act.b = reinterpret_cast<bf16*>(p);
    return act;
  }

  void fill_weights() {
    uint8_t* p = weights_.data();
    fill_random(p, weights_.bytes(), 2);
    const size_t record = group_bytes(a_.format), records = layer_bytes_ * layers_ / record;
    if (a_.format == Format::bf16) {
      for (size_t i = 0; i < records * record; i += 2) p[i + 1] = static_cast<uint8_t>((p[i + 1] & 0x80) | 0x3C);  // +-2^-7 .. 2^-6
      return;
    }
    const int halves = a_.format == Format::q4_1 ? 64 : 32;
    for (size_t i = 0; i < records; i++)
      for (int c = 0; c < halves; c++) p[i * record + 2 * c + 1] = static_cast<uint8_t>((p[i * record + 2 * c + 1] & 0x83) | 0x20);  // +-2^-7 .. 2^-6
  }

  void fill_activations() {
    uint64_t state = 3;
    for (int64_t r = 0; r < a_.rows; r++)
      for (int64_t g = 0; g < groups_; g++) {
        int32_t sum = 0;
        for (int k = 0; k < kGroup; k++) {
          const int8_t q = static_cast<int8_t>(static_cast<int>(mix(state) % 255) - 127);
          a_.in.q[r * a_.in.ldq + g * kGroup + k] = q;
          a_.in.b[r * a_.in.ldb + g * kGroup + k] = static_cast<bf16>(0x3C00 | (q < 0 ? 0x8000 : 0) | (q & 0x7f));
          sum += q;
        }
        const int64_t at = r * a_.in.ldg + g;
        a_.in.scale[at] = 0.01f + 1e-4f * static_cast<float>(mix(state) % 64);
        a_.in.corr[at] = -128 * sum;
        a_.in.sum[at] = a_.in.scale[at] * static_cast<float>(sum);
      }
  }

  struct alignas(64) Share {
    std::atomic<int64_t> taken[2] = {{0}, {0}};
  };

  int threads_, layers_;
  int64_t groups_;
  size_t layer_bytes_;
  Arena weights_, input_, output_;
  Linear a_;
};

}  // namespace
}  // namespace headrace

void bind_bench(nb::module_& m) {
  using headrace::Limits;
  using headrace::LinearBench;
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Limits>(m, "Limits", "What this machine can do at most; each method measures a window of `seconds` on all `threads`.")
      .def(nb::init<int, size_t>(), nb::arg("threads"), nb::arg("mib"))
      .def("read", &Limits::read, nb::arg("seconds"), nb::arg("ahead") = 0, release, "GB/s of reads; `ahead`: bytes of software prefetch.")
      .def("int8", &Limits::int8, nb::arg("seconds"), release, "GMAC/s of 8-bit dot products.")
      .def("bf16", &Limits::bfloat16, nb::arg("seconds"), release, "GMAC/s of bf16 dot products; 0 without the instruction.")
      .def("fp32", &Limits::float32, nb::arg("seconds"), release, "GMAC/s of fp32 multiply-adds.");
  nb::class_<LinearBench>(m, "LinearBench", "A linear layer over `layers` random packed weights, one after the other, on `threads`.")
      .def(nb::init<int, int64_t, int64_t, int64_t, int, int, int>(), nb::arg("format"), nb::arg("n"), nb::arg("k"), nb::arg("rows"),
           nb::arg("epilogue"), nb::arg("layers"), nb::arg("threads"))
      .def("run", &LinearBench::run, nb::arg("seconds"), release, "Seconds a layer took, over a window of about `seconds`.")
      .def_prop_ro("bytes", &LinearBench::bytes, "Bytes of one layer's packed weight.")
      .def_prop_ro("macs", &LinearBench::macs, "Multiply-adds of one layer.");
}
