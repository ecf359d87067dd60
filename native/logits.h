// One row of logits: what changes them before anything is chosen, and the candidates for being among the best.
#pragma once
#include "kernels.h"
#include "lanes.h"
#include "select.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kSpan = 256;  // tokens of a block: 16 vectors
constexpr float kMax = 3.40282346638528859812e38f;
constexpr float kNegInf = -__builtin_inff();

struct Row {
  float* logits;
  int64_t vocab, blocks;
  float most;  // the largest logit, -inf if there is none
  // Scratch. `maxima` (16 a block: of each lane's 16 tokens) shares memory with `weights`, which is filled after its last use.
  int32_t* ids;    // [vocab]
  float* weights;  // [vocab], whole vectors
  float* maxima;   // [blocks][16]
  uint64_t* keys;  // [vocab]
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

Row row_of(float* logits, int64_t vocab, uint8_t* scratch) {
  const size_t floats = (static_cast<size_t>(vocab) * 4 + 127) / 64 * 64;  // at least one vector past the end
  Row row = {logits, vocab, (vocab + kSpan - 1) / kSpan, kNegInf, nullptr, nullptr, nullptr, nullptr};
  row.ids = reinterpret_cast<int32_t*>(scratch);
  row.weights = reinterpret_cast<float*>(scratch + floats);
  row.maxima = row.weights;
  row.keys = reinterpret_cast<uint64_t*>(scratch + 2 * floats);
  return row;
}

// ---- 1, 2: penalties and bias -----------------------------------------------------------------------------------------------------

void penalize(const Row& row, const Sampling& s) {
  const bool repetition = s.repetition_penalty != 1.0f;
  if (!repetition && s.presence_penalty == 0.0f && s.frequency_penalty == 0.0f) return;
  // Times each token was generated; only the entries that are used are ever written.
  int32_t* count = row.ids;
  const int32_t first = repetition ? 0 : s.num_prompt;
  const auto exists = [&](int32_t i) { return s.tokens[i] >= 0 && s.tokens[i] < row.vocab; };
  for (int32_t i = first; i < s.num_tokens; i++)
    if (exists(i)) count[s.tokens[i]] = 0;
  for (int32_t i = s.num_prompt; i < s.num_tokens; i++)
    if (exists(i)) count[s.tokens[i]]++;
  for (int32_t i = first; i < s.num_tokens; i++) {
    if (!exists(i) || count[s.tokens[i]] < 0) continue;
    float& x = row.logits[s.tokens[i]];
    const int32_t times = count[s.tokens[i]];
    if (repetition) x = x > 0 ? x / s.repetition_penalty : x * s.repetition_penalty;
    if (times > 0) x = (x - s.frequency_penalty * static_cast<float>(times)) - s.presence_penalty;
    count[s.tokens[i]] = -1;
  }
}

// ---- 3: mask, and what the later steps need to know ---------------------------------------------------------------------------------

// Afterwards every logit is -inf or finite. Sets maxima and most.
void scan(Row& row, const uint32_t* mask) {
  const Lanes largest = spread(kMax), none = spread(kNegInf);
  Lanes most = none;
  for (int64_t block = 0; block < row.blocks; block++) {
    const int64_t begin = block * kSpan, end = smaller(begin + kSpan, row.vocab);
    Lanes best = none;
    uint32_t finite = 0xffff;
    for (int64_t i = begin; i < end; i += kLanes) {
      Lanes x = load_lanes(row.logits + i, end - i, kNegInf);
      if (mask) {
        x = select(mask[i / 32] >> (i % 32) & 0xffff, x, none);
        if (end - i >= kLanes) {
          store_lanes(row.logits + i, x);
        } else {
          for (int64_t j = i; j < end; j++)
            if (!(mask[j / 32] >> (j % 32) & 1)) row.logits[j] = kNegInf;
        }
      }
      finite &= at_least(largest, x);
      best = max(x, best);
    }
    if (finite != 0xffff) {
      best = none;
      for (int64_t i = begin; i < end; i++) {
        if (row.logits[i] != row.logits[i]) row.logits[i] = kNegInf;
        if (row.logits[i] > kMax) row.logits[i] = kMax;
      }
      for (int64_t i = begin; i < end; i += kLanes) best = max(load_lanes(row.logits + i, end - i, kNegInf), best);
    }
    store_lanes(row.maxima + block * kLanes, best);
    most = max(best, most);
  }
  float lanes[kLanes];
  store_lanes(lanes, most);
  for (const float x : lanes) row.most = x > row.most ? x : row.most;
}

int32_t lowest_allowed(int64_t vocab, const uint32_t* mask) {
  for (int64_t i = 0; mask && i < vocab; i++)
    if (mask[i / 32] >> (i % 32) & 1) return static_cast<int32_t>(i);
  return 0;
}

// ---- candidates -------------------------------------------------------------------------------------------------------------------------

// A value that at least k logits reach: the k-th largest of the maxima of disjoint sets. -kMax where there are too few sets.
float reached_by(const Row& row, int64_t k) {
  if (k * 3 <= row.blocks) {
    for (int64_t block = 0; block < row.blocks; block++) {
      float most = kNegInf;
      for (int l = 0; l < kLanes; l++) most = row.maxima[block * kLanes + l] > most ? row.maxima[block * kLanes + l] : most;
      row.keys[block] = key_of(most, block);
    }
    return logit_of(kth_largest(row.keys, row.blocks, k));
  }
  const int64_t sets = row.blocks * kLanes;
  if (k > sets) return -kMax;
  // A set a lane: the last block's may be empty (-inf), and in a vocabulary of a few tokens there are more sets than keys have room for.
  if (sets > row.vocab) return -kMax;
  for (int64_t i = 0; i < sets; i++) row.keys[i] = key_of(row.maxima[i], i);
  return logit_of(kth_largest(row.keys, sets, k));
}

// ids <- tokens with logits >= least (and finite), ascending. Returns how many.
int64_t collect(const Row& row, float least) {
  const Lanes limit = spread(least > -kMax ? least : -kMax);
  int64_t count = 0;
  for (int64_t block = 0; block < row.blocks; block++) {
    if (!at_least(load_lanes(row.maxima + block * kLanes), limit)) continue;
    const int64_t end = smaller((block + 1) * kSpan, row.vocab);
    for (int64_t i = block * kSpan; i < end; i += kLanes)
      for (uint32_t mask = at_least(load_lanes(row.logits + i, end - i, kNegInf), limit); mask; mask &= mask - 1)
        row.ids[count++] = static_cast<int32_t>(i + __builtin_ctz(mask));
  }
  return count;
}

void make_keys(const Row& row, int64_t count) {
  for (int64_t i = 0; i < count; i++) row.keys[i] = key_of(row.logits[row.ids[i]], i);
}

// Keeps the candidates whose key is at least `least`, still ascending.
int64_t keep_best(const Row& row, int64_t count, uint64_t least) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t id = row.ids[i];
    row.ids[kept] = id;
    kept += key_of(row.logits[id], i) >= least;
  }
  return kept;
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace
