// Paged attention: which rows meet which KV chunk, in what order, and how chunks merge. The arithmetic of a tile is in attention_tile.h.
//
// KV is cut in chunks of 64 tokens from position 0. Each (row, chunk) gives (m_c, l_c, O_c); a row's chunks merge ascending, from m = -inf, l = 0, O
// = 0:
//   m' = max(m, m_c), alpha = exp((m - m') * scale), beta = exp((m_c - m') * scale), l = fma(l_c, beta, l * alpha), O = fma(O_c, beta, O * alpha), m
//   = m'
// and the result is O * (1 / l). A chunk of which a row sees nothing is left out for that row. Every row is alone in this, so that its bits do not
// depend on the rows beside it, on where the prompt was cut, or on whether its chunks were computed here or as partials. scale must be positive.
#include "attention_tile.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int kQueryTile = 32;  // queries whose state is held at once; more are done in turn

struct Shape {
  int group, head_dim;
  int64_t block_stride, head_offset;  // in elements of the pool

  Shape(const Attention& a, int kv_head)
      : group(a.q_heads / a.kv.kv_heads),
        head_dim(a.kv.head_dim),
        block_stride(kv_head_elements(a.kv.head_dim) * a.kv.kv_heads),
        head_offset(kv_head_elements(a.kv.head_dim) * kv_head) {}
};

inline int64_t first_key(const Attention& a, int64_t position) { return a.window > 0 && position >= a.window ? position - a.window + 1 : 0; }

// The two blocks of KV chunk `c`, of whose tokens only keys [lo, hi) are wanted.
inline void locate(const Attention& a, const AttentionChunk& chunk, const Shape& shape, int64_t c, int64_t lo, int64_t hi, const bf16** k,
                   const bf16** v) {
  for (int i = 0; i < 2; i++) {
    const int64_t token = c * kKvChunk + i * kBlock;
    const bool wanted = lo < token + kBlock && hi > token;
    k[i] = wanted ? a.kv.base + chunk.table[2 * c + i] * shape.block_stride + shape.head_offset : nullptr;
  }
  if (!k[0]) k[0] = k[1];
  if (!k[1]) k[1] = k[0];
  for (int i = 0; i < 2; i++) v[i] = k[i] + static_cast<int64_t>(kBlock) * shape.head_dim;
}

// Rows [first, first + count) of the queries from position `t0` on, `group` rows a query. False: none of them sees the chunk.
inline bool look(const Attention& a, int64_t t0, int group, int first, int count, int64_t c, Visible* see) {
  see->lo_min = see->hi_min = kKvChunk;
  see->lo_max = see->hi_max = 0;
  bool any = false;
  for (int r = 0; r < count; r++) {
    const int64_t t = t0 + (first + r) / group, begin = c * kKvChunk;
    int64_t lo = first_key(a, t) - begin, hi = t + 1 - begin;
    lo = lo < 0 ? 0 : lo > kKvChunk ? kKvChunk : lo;
    hi = hi < 0 ? 0 : hi > kKvChunk ? kKvChunk : hi;
    if (lo >= hi) lo = hi;
    see->lo[r] = static_cast<int>(lo);
    see->hi[r] = static_cast<int>(hi);
    if (see->lo[r] > see->lo_max) see->lo_max = see->lo[r];
    if (see->hi[r] < see->hi_min) see->hi_min = see->hi[r];
    if (lo >= hi) continue;
    any = true;
    if (see->lo[r] < see->lo_min) see->lo_min = see->lo[r];
    if (see->hi[r] > see->hi_max) see->hi_max = see->hi[r];
  }
  return any;
}

// m, l of `count` rows <- merged with the chunk's; leaves alpha and beta in w.exponent. An empty row keeps its own.
inline void merge_state(TileScratch& w, int count, float scale, const Visible* see, float* m, float* l) {
  float top[8];
  for (int r = 0; r < count; r++) {
    top[r] = m[r] > w.m[r] ? m[r] : w.m[r];
    w.exponent[r] = (m[r] - top[r]) * scale;
    w.exponent[8 + r] = (w.m[r] - top[r]) * scale;
  }
  exp16(w.exponent);
  for (int r = 0; r < count; r++) {
    if (see && see->empty(r)) continue;
    m[r] = top[r];
    l[r] = __builtin_fmaf(w.l[r], w.exponent[8 + r], l[r] * w.exponent[r]);
  }
}

using ScoresFn = void (*)(TileScratch&, const Word*, const ChunkView&, int, float, const Visible&);
using ValuesFn = void (*)(const TileScratch&, const ChunkView&, int, const Visible&, const Output&);
using PackFn = void (*)(Word*, const bf16* const*, int);
constexpr ScoresFn kScores[] = {nullptr, scores<1>, scores<2>, scores<3>, scores<4>, scores<5>, scores<6>};
constexpr ValuesFn kValues[] = {nullptr, values<1>, values<2>, values<3>, values<4>, values<5>, values<6>};
constexpr PackFn kPack[] = {nullptr, pack_queries<1>, pack_queries<2>, pack_queries<3>, pack_queries<4>, pack_queries<5>, pack_queries<6>};

// Rows cut into near-equal tiles: 8 rows are 4 + 4, never 6 + 2.
struct Tiles {
  int rows, count;
  explicit Tiles(int n) : rows(n), count((n + kTileRows - 1) / kTileRows) {}
  int first(int i) const { return rows * i / count; }
};

// Scratch: TileScratch, then query words, then (not for partials) O, m and l of every row.
struct Scratch {
  TileScratch* tile;
  Word* q;
  float *o, *m, *l;
  Scratch(uint8_t* base, int rows, int head_dim) {
    tile = reinterpret_cast<TileScratch*>(base);
    q = reinterpret_cast<Word*>(base + sizeof(TileScratch));
    o = reinterpret_cast<float*>(q) + static_cast<int64_t>(rows) * head_dim;
    m = o + static_cast<int64_t>(rows) * head_dim;
    l = m + rows;
  }
};
static_assert(sizeof(TileScratch) + 2 * 4 * 16 * kQueryTile <= 256 * 1024 && 2 * 4 * kQueryTile <= 8 * 64,
              "attention_scratch() covers the largest tile");

void pack_tiles(const Attention& a, const AttentionChunk& chunk, const Shape& shape, int kv_head, int64_t q_begin, const Tiles& tiles, Word* out) {
  for (int i = 0; i < tiles.count; i++) {
    const bf16* rows[kTileRows];
    const int first = tiles.first(i), count = tiles.first(i + 1) - first;
    for (int r = 0; r < count; r++) {
      const int64_t query = q_begin + (first + r) / shape.group;
      rows[r] = a.q + ((chunk.row + query) * a.q_heads + kv_head * shape.group + (first + r) % shape.group) * shape.head_dim;
    }
    kPack[count](out + static_cast<int64_t>(first) * shape.head_dim / 2 * kPerPair, rows, shape.head_dim);
  }
}

// out <- O * (1 / l)
inline void finish(const Attention& a, const Shape& shape, int kv_head, int64_t row, int head, const float* o, float l) {
  float* out = a.out + row * a.ld_out + static_cast<int64_t>(kv_head * shape.group + head) * shape.head_dim;
  const float inverse = 1.0f / l;
  for (int d = 0; d < shape.head_dim; d++) out[d] = o[d] * inverse;
}

void attend(const Attention& a, const AttentionChunk& chunk, int kv_head, int64_t q_begin, int64_t q_end, uint8_t* scratch) {
  const Shape shape(a, kv_head);
  const int head_dim = shape.head_dim;
  const Tiles tiles(static_cast<int>(q_end - q_begin) * shape.group);
  const Scratch mem(scratch, tiles.rows, head_dim);
  pack_tiles(a, chunk, shape, kv_head, q_begin, tiles, mem.q);
  std::memset(mem.o, 0, static_cast<size_t>(tiles.rows) * head_dim * 4);
  for (int i = 0; i < tiles.rows; i++) {
    mem.m[i] = kMinusInf;
    mem.l[i] = 0;
  }
  const int64_t t0 = chunk.start + q_begin, lo = first_key(a, t0), hi = chunk.start + q_end;
  for (int64_t c = lo / kKvChunk; c * kKvChunk < hi; c++) {
    ChunkView view{};
    locate(a, chunk, shape, c, lo, hi, view.k, view.v);
    if ((c + 1) * kKvChunk < hi) locate(a, chunk, shape, c + 1, lo, hi, view.next_k, view.next_v);
    for (int i = 0; i < tiles.count; i++) {
      const int first = tiles.first(i), count = tiles.first(i + 1) - first;
      Visible see;
      if (!look(a, t0, shape.group, first, count, c, &see)) continue;
      kScores[count](*mem.tile, mem.q + static_cast<int64_t>(first) * head_dim / 2 * kPerPair, view, head_dim, a.scale, see);
      merge_state(*mem.tile, count, a.scale, &see, mem.m + first, mem.l + first);
      kValues[count](*mem.tile, view, head_dim, see,
                     {mem.o + static_cast<int64_t>(first) * head_dim, head_dim, mem.tile->exponent, mem.tile->exponent + 8, true});
      for (int b = 0; b < 2; b++) view.next_k[b] = view.next_v[b] = nullptr;  // the first tile has fetched it
    }
  }
  for (int i = 0; i < tiles.rows; i++)
    finish(a, shape, kv_head, chunk.row + q_begin + i / shape.group, i % shape.group, mem.o + static_cast<int64_t>(i) * head_dim, mem.l[i]);
}

}  // namespace

void attention(const Attention& a, const AttentionChunk& chunk, int kv_head, int64_t q_begin, int64_t q_end, uint8_t* scratch) {
  for (int64_t q = q_begin; q < q_end; q += kQueryTile) attend(a, chunk, kv_head, q, q + kQueryTile < q_end ? q + kQueryTile : q_end, scratch);
}

void attention_partial(const Attention& a, const AttentionChunk& chunk, int kv_head, int64_t c_begin, int64_t c_end, float* partial,
                       uint8_t* scratch) {
  const Shape shape(a, kv_head);
  const int64_t stride = 4 + shape.head_dim, t0 = chunk.start, lo = first_key(a, t0), hi = t0 + 1;
  const Tiles tiles(shape.group);
  const Scratch mem(scratch, tiles.rows, shape.head_dim);
  pack_tiles(a, chunk, shape, kv_head, 0, tiles, mem.q);
  if (c_begin < lo / kKvChunk) c_begin = lo / kKvChunk;
  if (c_end > (hi + kKvChunk - 1) / kKvChunk) c_end = (hi + kKvChunk - 1) / kKvChunk;
  for (int64_t c = c_begin; c < c_end; c++) {
    ChunkView view{};
    locate(a, chunk, shape, c, lo, hi, view.k, view.v);
    if (c + 1 < c_end) locate(a, chunk, shape, c + 1, lo, hi, view.next_k, view.next_v);
    for (int i = 0; i < tiles.count; i++) {
      const int first = tiles.first(i), count = tiles.first(i + 1) - first;
      Visible see;
      look(a, t0, shape.group, first, count, c, &see);
      kScores[count](*mem.tile, mem.q + static_cast<int64_t>(first) * shape.head_dim / 2 * kPerPair, view, shape.head_dim, a.scale, see);
      float* out = partial + (c * shape.group + first) * stride;
      for (int r = 0; r < count; r++) {
        out[r * stride] = mem.tile->m[r];
        out[r * stride + 1] = mem.tile->l[r];
      }
      kValues[count](*mem.tile, view, shape.head_dim, see, {out + 4, stride, nullptr, nullptr, false});
      for (int b = 0; b < 2; b++) view.next_k[b] = view.next_v[b] = nullptr;
    }
  }
}

void attention_merge(const Attention& a, const AttentionChunk& chunk, int kv_head, const float* partial) {
  const Shape shape(a, kv_head);
  const int64_t stride = 4 + shape.head_dim, lo = first_key(a, chunk.start), hi = static_cast<int64_t>(chunk.start) + 1;
  TileScratch w{};
  for (int head = 0; head < shape.group; head++) {
    float o[256] = {}, m = kMinusInf, l = 0;
    for (int64_t c = lo / kKvChunk; c * kKvChunk < hi; c++) {
      const float* part = partial + (c * shape.group + head) * stride;
      w.m[0] = part[0];
      w.l[0] = part[1];
      merge_state(w, 1, a.scale, nullptr, &m, &l);
      const float alpha = w.exponent[0], beta = w.exponent[8];
      for (int d = 0; d < shape.head_dim; d++) o[d] = __builtin_fmaf(part[4 + d], beta, o[d] * alpha);
    }
    finish(a, shape, kv_head, chunk.row, head, o, l);
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace
