// Selection without sorting: a key for each candidate, larger is better, no two equal.
#pragma once
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// The order of the logits, of equal ones the lower index first.
inline uint64_t key_of(float x, int64_t index) {
  const uint32_t u = float_to_bits(x == 0 ? 0.0f : x);  // -0 and 0 are equal
  return static_cast<uint64_t>(u >> 31 ? ~u : u | 0x80000000u) << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}
inline int64_t index_of(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }
inline float logit_of(uint64_t key) {
  const uint32_t u = static_cast<uint32_t>(key >> 32);
  return bits_to_float(u >> 31 ? u & 0x7fffffffu : ~u);
}

// Puts one key of [begin, end) where it belongs in descending order, larger ones before it, and returns its place. No branches on the order.
// The choice of the key is arbitrary but fixed, so that everything after it is, too.
int64_t partition(uint64_t* keys, int64_t begin, int64_t end, uint64_t* random) {
  *random = *random * 6364136223846793005u + 1442695040888963407u;
  const int64_t at = begin + static_cast<int64_t>((*random >> 33) % static_cast<uint64_t>(end - begin)), last = end - 1;
  const uint64_t pivot = keys[at];
  keys[at] = keys[last];
  int64_t middle = begin;
  for (int64_t i = begin; i < last; i++) {
    const uint64_t key = keys[i];
    keys[i] = keys[middle];
    keys[middle] = key;
    middle += key > pivot;
  }
  keys[last] = keys[middle];
  keys[middle] = pivot;
  return middle;
}

// The k-th largest of n keys, 1 <= k <= n. Afterwards the k largest come first, in no order.
uint64_t kth_largest(uint64_t* keys, int64_t n, int64_t k) {
  uint64_t random = 1;
  for (int64_t begin = 0, end = n;;) {
    const int64_t middle = partition(keys, begin, end, &random);
    if (middle == k - 1) return keys[middle];
    (middle < k - 1 ? begin : end) = middle < k - 1 ? middle + 1 : middle;
  }
}

// The smallest key of the shortest descending run whose weights reach `target`; the smallest of all where they do not.
uint64_t nucleus(uint64_t* keys, int64_t n, const float* weights, double target) {
  uint64_t random = 1, least = 0;
  double before = 0;  // weights of the keys in front of begin
  for (int64_t begin = 0, end = n; begin < end;) {
    const int64_t middle = partition(keys, begin, end, &random);
    double mass = 0;
    for (int64_t i = begin; i < middle; i++) mass += static_cast<double>(weights[index_of(keys[i])]);
    if (before + mass >= target && middle > begin) {
      end = middle;
      continue;
    }
    least = keys[middle];
    before += mass + static_cast<double>(weights[index_of(least)]);
    if (before >= target) break;
    begin = middle + 1;
  }
  return least;
}

void sort_descending(uint64_t* keys, int64_t n) {  // heapsort: a heap with the smallest on top
  const auto sink = [&](int64_t i, int64_t count) {
    const uint64_t key = keys[i];
    for (int64_t child; (child = 2 * i + 1) < count; i = child) {
      if (child + 1 < count && keys[child + 1] < keys[child]) child++;
      if (key <= keys[child]) break;
      keys[i] = keys[child];
    }
    keys[i] = key;
  };
  for (int64_t i = n / 2 - 1; i >= 0; i--) sink(i, n);
  for (int64_t count = n - 1; count > 0; count--) {
    const uint64_t key = keys[0];
    keys[0] = keys[count];
    keys[count] = key;
    sink(0, count);
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
