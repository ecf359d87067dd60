// CPU and operating-system detection and the one table. Best level first; the first one supported wins, unless HEADRACE_ISA names another.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "kernels.h"

#define HEADRACE_LEVELS(X) X(amx) X(avx512bf16) X(avx512vnni) X(avx2) X(scalar)

namespace headrace {
#define HEADRACE_DECLARE(name, result, parameters) result name parameters;
#define HEADRACE_LEVEL(level)        \
  namespace level {                  \
  HEADRACE_KERNELS(HEADRACE_DECLARE) \
  }
HEADRACE_LEVELS(HEADRACE_LEVEL)
#undef HEADRACE_LEVEL
#undef HEADRACE_DECLARE

namespace {

// Linux gives a process the 8 KiB of tile registers only if asked, before its threads start.
bool allow_tiles() {
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

struct Cpu {
  bool avx2 = false, avx512vnni = false, avx512bf16 = false, amx = false;

  Cpu() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool osxsave = c & (1u << 27), fma = c & (1u << 12), f16c = c & (1u << 29);
    if (!osxsave) return;
    unsigned lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    const bool ymm = (lo & 0x6) == 0x6, zmm = (lo & 0xE6) == 0xE6;  // the operating system saves these registers
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = ymm && fma && f16c && (b & (1u << 5));
    const bool f = b & (1u << 16), dq = b & (1u << 17), bw = b & (1u << 30), vl = b & (1u << 31), vnni = c & (1u << 11), vbmi = c & (1u << 1);
    const bool tiles = (lo & 0x60000) == 0x60000 && (d & (1u << 24)) && (d & (1u << 25));  // the unit, and int8 on it
    avx512vnni = avx2 && zmm && f && dq && bw && vl && vnni;
    unsigned a1, b1, c1, d1;
    if (avx512vnni && __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) avx512bf16 = (a1 & (1u << 5)) && vbmi;
    amx = avx512vnni && tiles && allow_tiles();
  }
};

struct Level {
  const char* name;
  bool (*supported)(const Cpu&);
  Kernels table;
};

#define HEADRACE_ENTRY(name, result, parameters) LEVEL::name,
const Level kLevels[] = {
#define LEVEL amx
    {"amx", [](const Cpu& cpu) { return cpu.amx; }, {HEADRACE_KERNELS(HEADRACE_ENTRY)}},
#undef LEVEL
#define LEVEL avx512bf16
    {"avx512bf16", [](const Cpu& cpu) { return cpu.avx512bf16; }, {HEADRACE_KERNELS(HEADRACE_ENTRY)}},
#undef LEVEL
#define LEVEL avx512vnni
    {"avx512vnni", [](const Cpu& cpu) { return cpu.avx512vnni; }, {HEADRACE_KERNELS(HEADRACE_ENTRY)}},
#undef LEVEL
#define LEVEL avx2
    {"avx2", [](const Cpu& cpu) { return cpu.avx2; }, {HEADRACE_KERNELS(HEADRACE_ENTRY)}},
#undef LEVEL
#define LEVEL scalar
    {"scalar", [](const Cpu&) { return true; }, {HEADRACE_KERNELS(HEADRACE_ENTRY)}},
#undef LEVEL
};
constexpr int kNumLevels = sizeof(kLevels) / sizeof(kLevels[0]);

const Cpu& cpu() {
  static const Cpu detected;
  return detected;
}

const Level* choose() {
  if (const char* wanted = std::getenv("HEADRACE_ISA")) {
    for (const Level& level : kLevels)
      if (std::strcmp(level.name, wanted) == 0 && level.supported(cpu())) return &level;
  }
  for (const Level& level : kLevels)
    if (level.supported(cpu())) return &level;
  return &kLevels[kNumLevels - 1];
}

const Level* current = choose();

}  // namespace

const Kernels& kernels() { return current->table; }
const char* kernels_level() { return current->name; }

bool use_level(const char* name) {
  for (const Level& level : kLevels)
    if (std::strcmp(level.name, name) == 0 && level.supported(cpu())) {
      current = &level;
      return true;
    }
  return false;
}

int num_levels() {
  int count = 0;
  for (const Level& level : kLevels) count += level.supported(cpu());
  return count;
}

const char* level_name(int i) {
  for (const Level& level : kLevels)
    if (level.supported(cpu()) && i-- == 0) return level.name;
  return nullptr;
}

}  // namespace headrace
