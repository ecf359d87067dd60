// Paged attention: which rows meet which KV chunk, in what order, and how chunks merge. The arithmetic of a tile is in attention_tile.h.
//
// KV is cut in chunks of 64 tokens from position 0. Each (row, chunk) gives (m_c, l_c, O_c); a row's chunks merge ascending, from m = -inf, l = 0, O
// = 0:
//   m' = max(m, m_c), alpha = 2^(m - m'), beta = 2^(m_c - m'), l = fma(l_c, beta, l * alpha), O = fma(O_c, beta, O * alpha), m = m'
// and the result is O * (1 / l). A chunk of which a row sees nothing is left out for that row. Every row is alone in this,
// so that its bits do not depend on the rows beside it, on where the prompt was cut, or on whether its chunks were computed here or as partials.
// scale must be positive.
#include "attention_tile.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int kQueryTile = 32;                                            // queries whose state is held at once; more are done in turn
constexpr int kMaxTiles = (kQueryTile * 16 + kTileRows - 1) / kTileRows;  // 16 query heads a kv head
constexpr float kLog2E = 1.44269504088896341f;

// Rows [first, first + count) of a call's rows, `group` a query, whose positions are [t_first, t_last].
struct Tile {
  int first, count;
  int64_t t_first, t_last;
};

struct Shape {
  int group, head_dim;

  explicit Shape(const Attention& a) : group(a.q_heads / a.kv.kv_heads), head_dim(a.kv.head_dim) {}
};

// Where the two blocks of KV chunk `c` lie, of whose tokens only keys [lo, hi) are wanted: a block without any is never read, so that its place is
// the other's. Both null: the chunk is beyond hi.
inline void locate(const KvLayer& kv, const AttentionChunk& chunk, int kv_head, int64_t c, int64_t lo, int64_t hi, const bf16** block) {
  const int64_t head = kv_head_elements(kv.head_dim);
  for (int i = 0; i < 2; i++) {
    const int64_t token = c * kKvChunk + i * kBlock;
    const bool wanted = lo < token + kBlock && hi > token;
    block[i] = wanted ? kv.base + (static_cast<int64_t>(chunk.table[2 * c + i]) * kv.kv_heads + kv_head) * head : nullptr;
  }
  if (!block[0]) block[0] = block[1];
  if (!block[1]) block[1] = block[0];
}

// The (KV chunk, head)s of a range, one after the other, and what to prefetch meanwhile: the two after it, into the next range where this one ends.
class Walk {
 public:
  int64_t c;
  int kv_head;

  // Of a query or queries that see keys [lo, hi).
  Walk(const Attention& a, const KvRange& range, int64_t lo, int64_t hi)
      : c(range.c_begin), kv_head(range.kv_begin), a_(a), range_(range), lead_(range), lead_c_(c), lead_head_(kv_head), lo_(lo), hi_(hi) {
    place(here_);
    place(ahead_.near);
    place(ahead_.far);
  }
  bool done() const { return c >= range_.c_end; }
  void advance() {
    step(range_, &c, &kv_head);
    for (int i = 0; i < 2; i++) {
      here_[i] = ahead_.near[i];
      ahead_.near[i] = ahead_.far[i];
    }
    place(ahead_.far);
  }
  ChunkView view() const {
    const int64_t v = static_cast<int64_t>(kBlock) * a_.kv.head_dim;
    return {{here_[0], here_[1]}, {here_[0] + v, here_[1] + v}};
  }
  const Ahead* ahead() const { return ahead_.near[0] ? &ahead_ : nullptr; }

 private:
  static void step(const KvRange& range, int64_t* c, int* head) {
    if (++*head < range.kv_end) return;
    *head = range.kv_begin;
    ++*c;
  }
  // The next place of the lead, which runs ahead of c: beyond this range comes the next, then nothing new.
  void place(const bf16** block) {
    if (lead_c_ >= lead_.c_end && a_.next.chunk) {
      lead_ = a_.next;
      lead_c_ = lead_.c_begin;
      lead_head_ = lead_.kv_begin;
      lo_ = first_key(a_.window, lead_.chunk->start);
      hi_ = lead_.chunk->stop;
    }
    block[0] = ahead_.near[0];
    block[1] = ahead_.near[1];
    if (lead_c_ >= lead_.c_end) return;
    locate(a_.kv, *lead_.chunk, lead_head_, lead_c_, lo_, hi_, block);
    step(lead_, &lead_c_, &lead_head_);
  }

  const Attention& a_;
  const KvRange& range_;
  KvRange lead_;
  int64_t lead_c_;
  int lead_head_;
  int64_t lo_, hi_;  // keys wanted of the lead's range
  const bf16* here_[2];
  Ahead ahead_{};
};

// Rows cut into near-equal tiles: 8 rows are 4 + 4, never 6 + 2.
struct Tiles {
  int rows, count;
  Tile tile[kMaxTiles];

  Tiles(int64_t t0, int queries, int group) : rows(queries * group), count((rows + kTileRows - 1) / kTileRows) {
    for (int i = 0; i < count; i++) {
      const int first = rows * i / count, last = rows * (i + 1) / count - 1;
      tile[i] = {first, last + 1 - first, t0 + first / group, t0 + last / group};
    }
  }
};

// What the tile's rows see of KV chunk `c`. False: nothing.
inline bool look(const Attention& a, const Tile& tile, int group, int64_t t0, int64_t c, Visible* see) {
  const int64_t begin = c * kKvChunk, end = begin + kKvChunk;
  if (tile.t_last < begin || first_key(a.window, tile.t_first) >= end) return false;
  if (tile.t_first + 1 >= end && first_key(a.window, tile.t_last) <= begin) {
    *see = kSeesAll;
    return true;
  }
  see->lo_min = see->hi_min = kKvChunk;
  see->lo_max = see->hi_max = 0;
  for (int r = 0; r < tile.count; r++) {
    const int64_t t = t0 + (tile.first + r) / group;
    int64_t lo = first_key(a.window, t) - begin, hi = t + 1 - begin;
    hi = hi < 0 ? 0 : hi > kKvChunk ? kKvChunk : hi;
    lo = lo < 0 ? 0 : lo > hi ? hi : lo;
    see->lo[r] = static_cast<int>(lo);
    see->hi[r] = static_cast<int>(hi);
    if (see->lo[r] > see->lo_max) see->lo_max = see->lo[r];
    if (see->hi[r] < see->hi_min) see->hi_min = see->hi[r];
    if (lo == hi) continue;
    if (see->lo[r] < see->lo_min) see->lo_min = see->lo[r];
    if (see->hi[r] > see->hi_max) see->hi_max = see->hi[r];
  }
  return true;
}

// m, l of a tile's rows <- merged with the chunk's; leaves alpha and beta in w.exponent. A row that sees nothing keeps its own.
inline void merge_state(TileScratch& w, int count, const Visible& see, float* m, float* l) {
  if (see.all()) return merge_rows(w, m, l, m, l);
  float top[8], sum[8];
  merge_rows(w, m, l, top, sum);
  for (int r = 0; r < count; r++) {
    if (see.empty(r)) continue;
    m[r] = top[r];
    l[r] = sum[r];
  }
}

using ScoresFn = void (*)(TileScratch&, const Queries&, const ChunkView&, int, float, const Visible&, const Ahead*);
using ValuesFn = void (*)(TileScratch&, const ChunkView&, int, const Visible&, const Output&, const Ahead*);
constexpr ScoresFn kScores[] = {nullptr, scores<1>, scores<2>, scores<3>, scores<4>, scores<5>, scores<6>};
constexpr ValuesFn kValues[] = {nullptr, values<1>, values<2>, values<3>, values<4>, values<5>, values<6>};
#if HEADRACE_LEVEL != 3
using WidenFn = void (*)(float*, const bf16* const*, int);
constexpr WidenFn kWiden[] = {nullptr, widen_queries<1>, widen_queries<2>, widen_queries<3>, widen_queries<4>, widen_queries<5>, widen_queries<6>};
#endif

// Scratch: TileScratch, query words, then O of every row, then m and l of every tile, 8 floats each.
struct Scratch {
  TileScratch* tile;
  Word* q;
  float *o, *m, *l;
  Scratch(uint8_t* base, const Tiles& tiles, int head_dim) {
    tile = reinterpret_cast<TileScratch*>(base);
    q = reinterpret_cast<Word*>(base + sizeof(TileScratch));
    o = reinterpret_cast<float*>(q) + static_cast<int64_t>(tiles.rows) * head_dim;
    m = o + static_cast<int64_t>(tiles.rows) * head_dim;
    l = m + tiles.count * 8;
  }
};
static_assert(sizeof(TileScratch) + 2 * 8 * 4 * kMaxTiles <= 256 * 1024 && 2 * 4 * kQueryTile <= 8 * 64,
              "attention_scratch() covers the largest tile");

// The queries of a tile from its rows. words: room for the widened ones, count * head_dim.
inline Queries gather(const bf16* const* rows, [[maybe_unused]] int count, [[maybe_unused]] int head_dim, [[maybe_unused]] Word* words) {
#if HEADRACE_LEVEL == 3
  Queries queries;
  for (int r = 0; r < kTileRows; r++) queries.row[r] = reinterpret_cast<const uint32_t*>(rows[r < count ? r : 0]);
  return queries;
#else
  kWiden[count](words, rows, head_dim);
  return {words};
#endif
}

// out <- O * (1 / l)
inline void finish(const Attention& a, const Shape& shape, int kv_head, int64_t row, int head, const float* o, float l) {
  float* out = a.out + row * a.ld_out + static_cast<int64_t>(kv_head * shape.group + head) * shape.head_dim;
  const float inverse = 1.0f / l;
  for (int d = 0; d < shape.head_dim; d++) out[d] = o[d] * inverse;
}

void attend(const Attention& a, const AttentionChunk& chunk, int kv_head, int64_t q_begin, int64_t q_end, uint8_t* scratch) {
  const Shape shape(a);
  const int head_dim = shape.head_dim;
  const int64_t t0 = chunk.start + q_begin, lo = first_key(a.window, t0), hi = chunk.start + q_end;
  const Tiles tiles(t0, static_cast<int>(q_end - q_begin), shape.group);
  const Scratch mem(scratch, tiles, head_dim);
  Queries queries[kMaxTiles];
  for (int i = 0; i < tiles.count; i++) {
    const Tile& tile = tiles.tile[i];
    const bf16* rows[kTileRows];
    for (int r = 0; r < tile.count; r++) {
      const int row = tile.first + r;
      rows[r] = a.q + ((chunk.row + q_begin + row / shape.group) * a.q_heads + kv_head * shape.group + row % shape.group) * head_dim;
    }
    queries[i] = gather(rows, tile.count, head_dim, mem.q + static_cast<int64_t>(tile.first) * head_dim);
  }
  std::memset(mem.o, 0, static_cast<size_t>(tiles.rows) * head_dim * 4);
  for (int i = 0; i < tiles.count * 8; i++) {
    mem.m[i] = kMinusInf;
    mem.l[i] = 0;
  }
  std::memset(mem.tile, 0, sizeof(TileScratch));  // lanes of rows that do not exist are computed too
  const float c2 = a.scale * kLog2E;
  const KvRange range{&chunk, kv_head, kv_head + 1, lo / kKvChunk, kv_chunks(hi)};
  for (Walk walk(a, range, lo, hi); !walk.done(); walk.advance()) {
    const ChunkView view = walk.view();
    const Ahead* ahead = walk.ahead();
    for (int i = 0; i < tiles.count; i++) {
      const Tile& tile = tiles.tile[i];
      Visible see;
      if (!look(a, tile, shape.group, t0, walk.c, &see)) continue;
      kScores[tile.count](*mem.tile, queries[i], view, head_dim, c2, see, ahead);
      merge_state(*mem.tile, tile.count, see, mem.m + i * 8, mem.l + i * 8);
      float* o = mem.o + static_cast<int64_t>(tile.first) * head_dim;
      kValues[tile.count](*mem.tile, view, head_dim, see, {o, head_dim, mem.tile->exponent, mem.tile->exponent + 8}, ahead);
      ahead = nullptr;  // the first tile has fetched it
    }
  }
  for (int i = 0; i < tiles.count; i++)
    for (int r = 0; r < tiles.tile[i].count; r++) {
      const int row = tiles.tile[i].first + r;
      finish(a, shape, kv_head, chunk.row + q_begin + row / shape.group, row % shape.group, mem.o + static_cast<int64_t>(row) * head_dim,
             mem.l[i * 8 + r]);
    }
}

}  // namespace

void attention(const Attention& a, const AttentionChunk& chunk, int kv_head, int64_t q_begin, int64_t q_end, uint8_t* scratch) {
  for (int64_t q = q_begin; q < q_end; q += kQueryTile) attend(a, chunk, kv_head, q, q + kQueryTile < q_end ? q + kQueryTile : q_end, scratch);
}

void attention_one(const Attention& a, const RopeKv* rope, const KvRange& range, float* partial, uint8_t* scratch) {
  const Shape shape(a);
  const AttentionChunk& chunk = *range.chunk;
  const int head_dim = shape.head_dim, heads = range.kv_end - range.kv_begin, rows = heads * shape.group;
  const int64_t stride = 4 + head_dim, lo = first_key(a.window, chunk.start), hi = static_cast<int64_t>(chunk.start) + 1;
  const Tiles tiles(chunk.start, 1, shape.group);
  TileScratch& w = *reinterpret_cast<TileScratch*>(scratch);
  Queries* queries = reinterpret_cast<Queries*>(scratch + sizeof(TileScratch));
  float *m = reinterpret_cast<float*>(queries + heads * tiles.count), *l = m + heads * tiles.count * 8, *o = l + heads * tiles.count * 8;
  Word* words = reinterpret_cast<Word*>(o + static_cast<int64_t>(rows) * head_dim);
  bf16* turned = reinterpret_cast<bf16*>(words + static_cast<int64_t>(rows) * head_dim);
  const bf16* q = a.q + (static_cast<int64_t>(chunk.row) * a.q_heads + range.kv_begin * shape.group) * head_dim;
  if (rope) {
    RopeKv turn = *rope;
    AttentionChunk here = chunk;
    turn.qkv += chunk.row * turn.ld_qkv;
    turn.q = turned;
    here.row = 0;
    rope_kv(turn, here, range.kv_begin * shape.group, range.kv_end * shape.group);
    if (range.c_end * kKvChunk >= hi)
      for (int first = a.q_heads; first <= a.q_heads + a.kv.kv_heads; first += a.kv.kv_heads)
        rope_kv(turn, here, first + range.kv_begin, first + range.kv_end);
    q = turned + static_cast<int64_t>(range.kv_begin) * shape.group * head_dim;
  }
  for (int i = 0; i < heads * tiles.count; i++) {
    const Tile& tile = tiles.tile[i % tiles.count];
    const int64_t at = static_cast<int64_t>(i / tiles.count * shape.group + tile.first) * head_dim;
    const bf16* row[kTileRows];
    for (int r = 0; r < tile.count; r++) row[r] = q + at + static_cast<int64_t>(r) * head_dim;
    queries[i] = gather(row, tile.count, head_dim, words + at);
    for (int r = 0; r < 8; r++) {
      m[i * 8 + r] = kMinusInf;
      l[i * 8 + r] = 0;
    }
  }
  std::memset(&w, 0, sizeof(TileScratch));
  if (!partial) std::memset(o, 0, static_cast<size_t>(rows) * head_dim * 4);
  for (Walk walk(a, range, lo, hi); !walk.done(); walk.advance()) {
    const ChunkView view = walk.view();
    const Ahead* ahead = walk.ahead();
    const int head = walk.kv_head - range.kv_begin;
    for (int i = 0; i < tiles.count; i++) {
      const Tile& tile = tiles.tile[i];
      const int at = head * tiles.count + i;
      Visible see;
      look(a, tile, shape.group, chunk.start, walk.c, &see);
      kScores[tile.count](w, queries[at], view, head_dim, a.scale * kLog2E, see, ahead);
      if (partial) {
        float* out = partial + ((head * kv_chunks(hi) + walk.c) * shape.group + tile.first) * stride;
        for (int r = 0; r < tile.count; r++) {
          out[r * stride] = w.m[r];
          out[r * stride + 1] = w.l[r];
        }
        kValues[tile.count](w, view, head_dim, see, {out + 4, stride, nullptr, nullptr}, ahead);
      } else {
        merge_state(w, tile.count, see, m + at * 8, l + at * 8);
        float* out = o + static_cast<int64_t>(head * shape.group + tile.first) * head_dim;
        kValues[tile.count](w, view, head_dim, see, {out, head_dim, w.exponent, w.exponent + 8}, ahead);
      }
      ahead = nullptr;
    }
  }
  if (partial) return;
  for (int i = 0; i < heads * tiles.count; i++) {
    const Tile& tile = tiles.tile[i % tiles.count];
    for (int r = 0; r < tile.count; r++) {
      const int head = i / tiles.count * shape.group + tile.first + r;
      finish(a, shape, range.kv_begin, chunk.row, head, o + static_cast<int64_t>(head) * head_dim, l[i * 8 + r]);
    }
  }
}

void attention_merge(const Attention& a, const KvRange& range, const float* partial) {
  const Shape shape(a);
  const AttentionChunk& chunk = *range.chunk;
  const int64_t stride = 4 + shape.head_dim, hi = static_cast<int64_t>(chunk.start) + 1, first = first_key(a.window, chunk.start) / kKvChunk;
  TileScratch w{};
  for (int head = 0; head < (range.kv_end - range.kv_begin) * shape.group; head++) {
    float o[256] = {}, m[8] = {kMinusInf}, l[8] = {};
    for (int64_t c = first; c < kv_chunks(hi); c++) {
      const float* part = partial + ((head / shape.group * kv_chunks(hi) + c) * shape.group + head % shape.group) * stride;
      w.m[0] = part[0];
      w.l[0] = part[1];
      merge_state(w, 1, kSeesAll, m, l);
      const float alpha = w.exponent[0], beta = w.exponent[8];
      for (int d = 0; d < shape.head_dim; d++) o[d] = __builtin_fmaf(part[4 + d], beta, o[d] * alpha);
    }
    finish(a, shape, range.kv_begin, chunk.row, head, o, l[0]);
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace
