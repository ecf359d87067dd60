// Sampling one row of logits. The same token and the same bits at every level, whatever runs beside it.
//
// In this order:
//   1 penalties, once for each token seen: repetition over prompt and generated (x > 0 ? x / r : x * r), then over the generated ones
//     x - frequency * count, then - presence
//   2 bias added; ids that do not exist are ignored
//   3 NaN becomes -inf, +inf the largest float
//   4 log-probabilities: (x - max) - log(sum of exp(x - max)), of these logits, temperature 1
//   5 the mask: what it does not allow becomes -inf
//   6 temperature 0: the largest logit, lowest id first. Otherwise weights w = exp((x - max) * (1 / temperature)), of
//   7 the top_k largest logits (of equal ones the lowest ids), of these
//   8 those with w >= min_p (the best token's w is 1), of these
//   9 the shortest run in descending order (of equal logits the lowest ids first) whose weights reach top_p of the sum
//  10 one draw: the first token in order of id at which the running sum of weights exceeds u * sum.
// u: Philox4x32-10 of key = seed, counter = (num_tokens, sample_index, 0, 0); its first two words as 53 bits. A row with nothing to choose from
// (all -inf) gives the lowest id the mask allows, else 0, with log-probability -inf.
//
// Sums of weights: a block of 256 tokens in 16 lanes (16 steps, then the tree of lanes.h), blocks ascending in double. Never a full sort: the
// maxima of small sets of tokens bound from below what can be among the k best, and sets that lie below are skipped.
#include "logits.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// ---- weights ----------------------------------------------------------------------------------------------------------------------------

inline Lanes weight(Lanes x, Lanes most, Lanes inverse) { return where_at_least(x, spread(-kMax), exp(mul(sub(x, most), inverse))); }

// Weights of all tokens, zero below `limit`: the sum; each block's to sums and each token's to row.weights (in place of the maxima) where asked.
double weigh(const Row& row, float inverse_temperature, float limit, float* sums, bool store) {
  const Lanes most = spread(row.most), inverse = spread(inverse_temperature), least = spread(limit);
  double total = 0;
  for (int64_t block = 0; block < row.blocks; block++) {
    const int64_t begin = block * kSpan, end = smaller(begin + kSpan, row.vocab);
    Lanes lanes = spread(0);
    for (int64_t i = begin; i < end; i += kLanes) {
      Lanes w = weight(load_lanes(row.logits + i, end - i, kNegInf), most, inverse);
      w = where_at_least(w, least, w);
      if (store) store_lanes(row.weights + i, w);
      lanes = add(lanes, w);
    }
    const float s = sum(lanes);
    if (sums) sums[block] = s;
    total += static_cast<double>(s);
  }
  return total;
}

struct Share {
  double mass;
  int64_t count;
};

// Of the stored weights, those of logits >= least; each block's sum to sums where not null.
Share share_of(const Row& row, float least, float* sums) {
  const Lanes limit = spread(least);
  Share share = {};
  for (int64_t block = 0; block < row.blocks; block++) {
    const int64_t begin = block * kSpan, end = smaller(begin + kSpan, row.vocab);
    Lanes lanes = spread(0);
    for (int64_t i = begin; i < end; i += kLanes) {
      const Lanes x = load_lanes(row.logits + i, end - i, kNegInf);
      lanes = add(lanes, where_at_least(x, limit, load_lanes(row.weights + i)));
      share.count += __builtin_popcount(at_least(x, limit));
    }
    const float s = sum(lanes);
    if (sums) sums[block] = s;
    share.mass += static_cast<double>(s);
  }
  return share;
}

// The first index at which the running sum from `start` exceeds r; where rounding leaves none, the last with a weight.
int64_t draw(const float* weights, int64_t count, double start, double r) {
  int64_t last = 0;
  for (int64_t i = 0; i < count; i++) {
    start += static_cast<double>(weights[i]);
    if (weights[i] > 0) last = i;
    if (r < start) return last;
  }
  return last;
}

// Philox4x32-10, as published.
double uniform(uint64_t seed, uint32_t position, uint32_t sample_index) {
  uint32_t c[4] = {position, sample_index, 0, 0}, key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(a)};
    std::memcpy(c, next, sizeof(c));
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return static_cast<double>((static_cast<uint64_t>(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

// ---- choosing ---------------------------------------------------------------------------------------------------------------------------

int32_t largest(const Row& row) {
  const Lanes most = spread(row.most);
  for (int64_t block = 0; block < row.blocks; block++) {
    if (!at_least(load_lanes(row.maxima + block * kLanes), most)) continue;
    for (int64_t i = block * kSpan;; i++)
      if (row.logits[i] == row.most) return static_cast<int32_t>(i);
  }
  return 0;
}

// A draw from the stored weights, whose block sums and total are given.
int32_t draw_from_blocks(const Row& row, const float* sums, double total, double u) {
  const double r = u * total;
  int64_t last = 0;
  double start = 0, before = 0;
  for (int64_t block = 0; block < row.blocks; block++) {
    if (sums[block] > 0) {
      last = block;
      before = start;
    }
    start += static_cast<double>(sums[block]);
    if (r < start) break;
  }
  const int64_t begin = last * kSpan;
  return static_cast<int32_t>(begin + draw(row.weights + begin, smaller(kSpan, row.vocab - begin), before, r));
}

// Temperature alone, or with min_p.
int32_t draw_from_all(const Row& row, float inverse, float limit, double u) {
  float* sums = reinterpret_cast<float*>(row.keys);
  const double total = weigh(row, inverse, limit, sums, true);
  return draw_from_blocks(row, sums, total, u);
}

// top_k, then min_p and top_p among those: candidates are few.
int32_t draw_from_best(const Row& row, const Sampling& s, float inverse, float limit, double u) {
  int64_t count = collect(row, reached_by(row, s.top_k));
  if (count > s.top_k) {
    make_keys(row, count);
    count = keep_best(row, count, kth_largest(row.keys, count, s.top_k));
  }
  // The logits into whole vectors, then their weights in place.
  for (int64_t i = 0; i < count; i++) row.weights[i] = row.logits[row.ids[i]];
  double total = 0;
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i += kLanes)
    store_lanes(row.weights + i, weight(load_lanes(row.weights + i, count - i, kNegInf), spread(row.most), spread(inverse)));
  for (int64_t i = 0; i < count; i++) {
    const float w = row.weights[i];
    if (w < limit) continue;
    row.ids[kept] = row.ids[i];
    row.weights[kept++] = w;
    total += static_cast<double>(w);
  }
  count = kept;
  if (s.top_p < 1) {
    make_keys(row, count);
    const uint64_t least = nucleus(row.keys, count, row.weights, static_cast<double>(s.top_p) * total);
    total = 0;
    kept = 0;
    for (int64_t i = 0; i < count; i++) {
      if (key_of(row.logits[row.ids[i]], i) < least) continue;
      row.ids[kept] = row.ids[i];
      total += static_cast<double>(row.weights[kept++] = row.weights[i]);
    }
    count = kept;
  }
  return row.ids[draw(row.weights, count, 0, u * total)];
}

// top_p, perhaps after min_p, over the whole vocabulary.
int32_t draw_from_nucleus(const Row& row, float top_p, float inverse, float limit, double u) {
  // Often the nucleus lies within a few tokens. Their weights tell whether it does.
  int64_t count = collect(row, reached_by(row, row.blocks < 192 ? row.blocks / 3 + 1 : 64));
  const double target = static_cast<double>(top_p) * weigh(row, inverse, limit, nullptr, true);
  double mass = 0;
  for (int64_t i = 0; i < count; i++) mass += static_cast<double>(row.weights[row.ids[i]]);
  if (mass >= target) {
    for (int64_t i = 0; i < count; i++) row.keys[i] = key_of(row.logits[row.ids[i]], row.ids[i]);
    const uint64_t least = nucleus(row.keys, count, row.weights, target);
    double total = 0;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {  // in place: kept <= i <= ids[i]
      const int32_t id = row.ids[i];
      if (key_of(row.logits[id], id) < least) continue;
      row.ids[kept] = id;
      total += static_cast<double>(row.weights[kept++] = row.weights[id]);
    }
    return row.ids[draw(row.weights, kept, 0, u * total)];
  }

  // Else close in on the logit where it ends, [low, high), until few tokens are between. All of `high` and above are in it.
  float low = -kMax, high = -kNegInf, from = row.most - 32.0f / inverse, to = row.most;
  if (!(from > -kMax)) from = -kMax;
  int64_t below = row.vocab, above = 0;
  mass = 0;
  for (int step = 0; step < 32 && below - above > 128; step++) {
    const float middle = from + (to - from) * 0.5f;
    const Share share = share_of(row, middle, nullptr);
    if (share.mass >= target) {
      low = from = middle;
      below = share.count;
    } else {
      high = to = middle;
      above = share.count;
      mass = share.mass;
    }
  }
  // The order matters only between them: those that stay of [low, high), the rest are cleared.
  count = 0;
  for (int64_t i = 0; i < row.vocab; i += kLanes) {
    const Lanes x = load_lanes(row.logits + i, row.vocab - i, kNegInf);
    for (uint32_t mask = at_least(x, spread(low)) & ~at_least(x, spread(high)); mask; mask &= mask - 1) {
      const int64_t id = i + __builtin_ctz(mask);
      if (row.weights[id] > 0) row.keys[count++] = key_of(row.logits[id], id);
    }
  }
  const uint64_t least = count ? nucleus(row.keys, count, row.weights, target - mass) : 0;
  for (int64_t i = 0; i < row.vocab; i += kLanes) {
    const Lanes x = load_lanes(row.logits + i, row.vocab - i, kNegInf);
    store_lanes(row.weights + i, where_at_least(x, spread(low), load_lanes(row.weights + i)));
  }
  for (int64_t i = 0; i < count; i++)
    if (row.keys[i] < least) row.weights[index_of(row.keys[i])] = 0;
  float* sums = reinterpret_cast<float*>(row.keys);
  const double total = share_of(row, -kMax, sums).mass;
  return draw_from_blocks(row, sums, total, u);
}

}  // namespace

Sampled sample(float* logits, int64_t vocab, const Sampling& s, int32_t* top_ids, float* top_logprobs, uint8_t* scratch) {
  Row row = row_of(logits, vocab, scratch);
  penalize(row, s);
  for (int32_t i = 0; i < s.num_bias; i++)
    if (s.bias_ids[i] >= 0 && s.bias_ids[i] < vocab) logits[s.bias_ids[i]] += s.bias_values[i];
  // Log-probabilities are the model's own, of what was possible before the mask.
  const bool masked_later = s.mask && s.num_logprobs >= 0;
  scan(row, masked_later ? nullptr : s.mask);
  const float most = row.most;
  const int64_t tops = s.num_logprobs > 0 ? smaller(s.num_logprobs, vocab) : 0;
  for (int64_t i = tops; i < s.num_logprobs; i++) {
    top_ids[i] = -1;
    top_logprobs[i] = kNegInf;
  }

  double log_sum = 0;
  if (s.num_logprobs >= 0 && row.most > kNegInf) log_sum = __builtin_log(weigh(row, 1.0f, 0.0f, nullptr, false));
  const auto logprob = [&](float x) {
    return x > kNegInf ? static_cast<float>((static_cast<double>(x) - static_cast<double>(most)) - log_sum) : kNegInf;
  };
  if (tops) {
    int64_t count = collect(row, reached_by(row, tops));
    make_keys(row, count);
    if (count > tops) kth_largest(row.keys, count, tops);
    count = smaller(count, tops);
    sort_descending(row.keys, count);
    for (int64_t i = 0; i < count; i++) {
      top_ids[i] = row.ids[index_of(row.keys[i])];
      top_logprobs[i] = logprob(logits[top_ids[i]]);
    }
    for (int64_t i = count, id = 0; i < tops; i++, id++) {  // fewer tokens are possible than were asked for: impossible ones, ascending
      while (logits[id] > kNegInf) id++;
      top_ids[i] = static_cast<int32_t>(id);
      top_logprobs[i] = kNegInf;
    }
  }
  if (masked_later) {
    row.most = kNegInf;
    scan(row, s.mask);
  }

  const float inverse = s.temperature > 0 ? 1.0f / s.temperature : 0.0f;
  Sampled out;
  if (!(row.most > kNegInf)) {
    out.token = lowest_allowed(vocab, s.mask);
  } else if (!(inverse > 0 && inverse <= kMax)) {  // also where 1 / temperature is nothing to multiply by
    out.token = largest(row);
  } else {
    const double u = uniform(s.seed, static_cast<uint32_t>(s.num_tokens), static_cast<uint32_t>(s.sample_index));
    const float limit = !(s.min_p > 0) ? 0.0f : s.min_p < 1 ? s.min_p : 1.0f;
    if (s.top_k > 0 && s.top_k < vocab) {
      out.token = draw_from_best(row, s, inverse, limit, u);
    } else if (s.top_p < 1) {
      out.token = draw_from_nucleus(row, s.top_p, inverse, limit, u);
    } else {
      out.token = draw_from_all(row, inverse, limit, u);
    }
  }
  out.logprob = s.num_logprobs >= 0 ? logprob(logits[out.token]) : 0.0f;
  return out;
}

}  // namespace HEADRACE_ISA
}  // namespace headrace
