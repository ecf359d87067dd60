// A step: what the threads do of each operation, and who does it. The building of a program is in program.cpp.
#include <time.h>

#include <algorithm>
#include <cstring>

#include "program.h"

namespace headrace {
namespace {

constexpr int64_t kQueryTile = 32;  // queries of one attention item
// With this many rows a thread or more, rows are shared out and not columns: what a thread computes it reads again itself, and threads meet
// only around attention. Each then reads all the weights, which are few bytes beside that many rows' arithmetic.
constexpr int64_t kOwnRows = 16;
constexpr int64_t kRowBlock = 36;  // rows that pass through a run of operations together: what they are at each stays in L2

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

int64_t Program::forward(const int32_t* chunks, int num_chunks, const int32_t* copies, int num_copies) {
  chunks_.clear();
  row_tokens_.clear();
  row_chunk_.clear();
  selected_.clear();
  copies_.clear();
  for (int i = 0; i < num_copies; i++) copies_.emplace_back(copies[2 * i], copies[2 * i + 1]);
  for (int i = 0; i < num_chunks; i++) {
    const int32_t *c = chunks + 4 * i, row = c[0], start = c[1], stop = c[2];
    const int32_t* tokens = tokens_.as<int32_t>() + row * (limits_.context + 1);
    const int32_t first = static_cast<int32_t>(row_tokens_.size());
    chunks_.push_back({first, start, stop, tables_.as<int32_t>() + static_cast<int64_t>(row) * limits_.max_blocks});
    row_tokens_.insert(row_tokens_.end(), tokens + start, tokens + stop);
    row_chunk_.insert(row_chunk_.end(), static_cast<size_t>(stop - start), i);
    for (int32_t position = c[3]; position < stop; position++) selected_.push_back(first + position - start);
  }
  num_rows_ = static_cast<int64_t>(row_tokens_.size());
  num_selected_ = static_cast<int64_t>(selected_.size());
  turned_rows_ = 0;
  for (const AttentionChunk& c : chunks_) turned_rows_ += is_decode(c) ? 0 : c.stop - c.start;
  plan_attention();
  first_stage_ = stage_.load(std::memory_order_relaxed);
  pool_.run([](void* self, int thread) { static_cast<Program*>(self)->run(thread); }, this);
  return num_selected_;
}

// Items of attention for every layer of this step, longest first, dealt out to the threads. A single query attends with all its heads, chunk by
// chunk; one whose keys would keep one thread busy for more than its share is cut at KV chunks, and between heads if there are too few of those. The
// merge is by chunk, ascending, so the bits do not depend on the cut.
void Program::plan_attention() {
  splits_.clear();
  for (auto& list : items_) list.clear();
  std::vector<Item> items;
  const auto visible = [this](int64_t position) { return position + 1 - first_key(limits_.window, position); };
  const auto first_chunk = [this](int64_t position) { return first_key(limits_.window, position) / kKvChunk; };
  int64_t total = 0;
  for (const AttentionChunk& c : chunks_)
    for (int64_t position = c.start; position < c.stop; position++) total += visible(position);
  const int heads = limits_.kv_heads;
  const int64_t limit = std::max<int64_t>(1, total * heads / (4 * limits_.threads));  // so fewer than 4 * threads queries are cut
  float* partial = partial_.as<float>();
  for (const AttentionChunk& c : chunks_) {
    if (!is_decode(c)) {
      for (int q = 0, queries = c.stop - c.start; q < queries; q += kQueryTile) {
        const int end = std::min<int>(queries, q + kQueryTile);
        for (int h = 0; h < heads; h++)
          items.push_back({{&c, h, h + 1, first_chunk(c.start + q), kv_chunks(c.start + end)}, q, end, -1, (end - q) * visible(c.start + end - 1)});
      }
      continue;
    }
    const int64_t keys = visible(c.start), first = first_chunk(c.start), last = kv_chunks(c.stop);
    const int64_t pieces = limits_.threads > 1 ? (keys * heads + limit - 1) / limit : 1;
    const int64_t cuts = std::min(last - first, pieces), groups = std::min<int64_t>(heads, (pieces + cuts - 1) / cuts);
    for (int64_t g = 0; g < groups; g++) {
      const int h0 = static_cast<int>(heads * g / groups), h1 = static_cast<int>(heads * (g + 1) / groups);
      const int split = cuts > 1 ? static_cast<int>(splits_.size()) : -1;
      for (int64_t p = 0; p < cuts; p++) {
        const int64_t a = first + (last - first) * p / cuts, b = first + (last - first) * (p + 1) / cuts;
        items.push_back({{&c, h0, h1, a, b}, 0, 1, split, keys * (h1 - h0) / cuts});
      }
      if (cuts == 1) continue;
      splits_.push_back({partial, static_cast<int>(cuts), &pieces_left_[splits_.size()]});
      splits_.back().left->store(static_cast<int>(cuts), std::memory_order_relaxed);
      partial += (h1 - h0) * last * (limits_.q_heads / heads) * (4 + limits_.head_dim);
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  std::vector<int64_t> load(items_.size(), 0);
  for (const Item& item : items) {
    const size_t least = static_cast<size_t>(std::min_element(load.begin(), load.end()) - load.begin());
    load[least] += item.cost;
    items_[least].push_back(item);
  }
}

template <class F>
void Program::timed(double& seconds, int thread, F f) {
  if (!profile_ || thread != 0) return f();
  const double before = now();
  f();
  seconds += now() - before;
}

bool Program::over(int thread) const { return stage_.load(std::memory_order_acquire) != cursors_[static_cast<size_t>(thread)].stage; }

// Takes up to `grain` of the `count` units of `owner`'s share: the first one, or -1 if there are none left or the stage is over.
int64_t Program::claim(int thread, int owner, int64_t count, int64_t grain) {
  std::atomic<uint64_t>& claimed = cursors_[static_cast<size_t>(owner)].claimed;
  const uint64_t stage = cursors_[static_cast<size_t>(thread)].stage;
  uint64_t now = claimed.load(std::memory_order_relaxed);
  do {
    if (now >> 32 != stage || static_cast<int64_t>(now & 0xffffffffu) >= count) return -1;
  } while (!claimed.compare_exchange_weak(now, now + static_cast<uint64_t>(grain), std::memory_order_relaxed));
  return static_cast<int64_t>(now & 0xffffffffu);
}

// Runs f(begin, end) over [0, units) in pieces of `grain`: each thread its own contiguous share first, then what the others have left.
template <class F>
Program::Stage Program::share(int thread, int64_t units, int64_t grain, F f) {
  const int threads = limits_.threads;
  Stage stage{units, 0};
  if (over(thread)) return stage;
  for (int i = 0; i < threads; i++) {
    const int owner = (thread + i) % threads;
    const int64_t begin = units * owner / threads, end = units * (owner + 1) / threads;
    for (int64_t at; (at = claim(thread, owner, end - begin, grain)) >= 0;) {
      const int64_t from = begin + at, to = std::min(end, from + grain);
      f(from, to);
      stage.done += to - from;
    }
  }
  return stage;
}

// Whoever does the last unit opens the next stage.
void Program::end_stage(int thread, Stage stage) {
  uint32_t& at = cursors_[static_cast<size_t>(thread)].stage;
  if (stage.done && units_done_.fetch_add(stage.done, std::memory_order_acq_rel) + stage.done == stage.units) {
    units_done_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < limits_.threads; i++)
      cursors_[static_cast<size_t>(i)].claimed.store(static_cast<uint64_t>(at + 1) << 32, std::memory_order_relaxed);
    stage_.store(at + 1, std::memory_order_release);
  } else {
    timed(waited_, thread, [&] {
      for (Patience patience; !over(thread);) patience.wait();
    });
  }
  at++;
}

// Rows `from` and after of `rows` rows of activations: of a few rows each thread has a copy of its own.
Activations Program::view(int act, int64_t rows, int thread, int64_t from) const {
  const ActBuffer& buffer = activations_[static_cast<size_t>(act)];
  Activations a = buffer.all;
  const int64_t row = from + (rows > kSmall || buffer.shared ? 0 : limits_.max_tokens + thread * kSmall);
  if (a.q) {
    a.q += row * a.ldq;
    a.scale += row * a.ldg;
    a.corr += row * a.ldg;
    a.sum += row * a.ldg;
  }
  if (a.b) a.b += row * a.ldb;
  return a;
}

void Program::run(int thread) {
  cursors_[static_cast<size_t>(thread)].stage = first_stage_;
  if (!copies_.empty()) {
    const size_t bytes = static_cast<size_t>(limits_.kv_heads) * kv_head_elements(limits_.head_dim) * sizeof(bf16);
    const Stage copied = share(thread, limits_.num_layers, 1, [&](int64_t layer, int64_t) {
      uint8_t* base = reinterpret_cast<uint8_t*>(kv(static_cast<int>(layer)).base);
      for (const auto& [from, to] : copies_) std::memcpy(base + to * bytes, base + from * bytes, bytes);
    });
    end_stage(thread, copied);
  }
  for (const auto& [first, last] : runs_) {
    const int64_t rows = rows_of(ops_[first]), own = (rows + limits_.threads - 1) / limits_.threads;
    if (ops_[first].kind != Kind::attention && own >= kOwnRows) {
      const int64_t blocks = (own + kRowBlock - 1) / kRowBlock;
      end_stage(thread, share(thread, rows, (own + blocks - 1) / blocks, [&](int64_t begin, int64_t end) {
                  for (size_t i = first; i < last; i++) timed(ops_[i].seconds, thread, [&] { run_rows(ops_[i], thread, begin, end); });
                }));
    } else {
      for (size_t i = first; i < last; i++) {
        Stage stage;
        timed(ops_[i].seconds, thread, [&] { stage = run_op(ops_[i], thread); });
        if (stage.units) end_stage(thread, stage);
      }
    }
  }
}

// The whole of an operation, shared out over the threads.
Program::Stage Program::run_op(const Op& op, int thread) {
  const int64_t rows = rows_of(op);
  const auto body = [&](int64_t begin, int64_t end) { run_rows(op, thread, begin, end); };
  switch (op.kind) {
    case Kind::embed:
      return share(thread, rows, 8, body);
    case Kind::rms_norm:
    case Kind::quantize:
      if (rows > kSmall) return share(thread, rows, 4, body);
      if (!over(thread)) body(0, rows);  // each thread for itself: nobody waits
      return {};
    case Kind::linear: {
      if (rows == 0) return {};
      Linear a = layer(op, thread, 0, rows);
      const int64_t units = panels(op);
      const auto share_of = [this](const Op& l, int t) { return l.packed.data + panels(l) * t / limits_.threads * panel_bytes(l); };
      // A panel of few rows is half a microsecond: several at a time keep the stream of weights going, up to 1.4 times as fast with the cores on
      // two complexes.
      const int64_t grain = rows > kSmall ? 1 : std::max<int64_t>(1, units / (6 * limits_.threads));
      return share(thread, units, grain, [&](int64_t begin, int64_t end) {
        a.next = a.weight + end * panel_bytes(op);
        if (a.next == share_of(op, thread + 1)) a.next = op.next ? share_of(*op.next, thread) : nullptr;
        kernels().linear(a, begin, end);
      });
    }
    case Kind::rope_kv: {
      if (turned_rows_ == 0) return {};
      const int64_t heads = limits_.q_heads + 2 * limits_.kv_heads;
      const int64_t grain = num_rows_ <= kSmall ? 4 : 2 * heads;
      return share(thread, num_rows_ * heads, grain, [&](int64_t begin, int64_t end) { run_rope(op, begin, end); });
    }
    case Kind::attention:
      return run_attention(op, thread);
  }
  return {};
}

// Rows [begin, end) of an operation that computes each row from the same row only.
void Program::run_rows(const Op& op, int thread, int64_t begin, int64_t end) {
  const Kernels& k = kernels();
  switch (op.kind) {
    case Kind::embed: {
      const Buffer& out = buffers_[static_cast<size_t>(op.out)];
      for (int64_t r = begin; r < end; r++)
        k.embed(op.packed.format, op.packed.data, op.packed.k, row_tokens_[static_cast<size_t>(r)], op.scale, out.data + r * out.columns);
      break;
    }
    case Kind::rms_norm:
    case Kind::quantize: {
      const Buffer& x = buffers_[static_cast<size_t>(op.x)];
      const Activations act = view(op.act, rows_of(op), thread);
      if (op.kind == Kind::quantize) return k.quantize(x.data, x.columns, op.k, begin, end, act);
      if (!op.selected || num_selected_ == num_rows_) return k.rms_norm(x.data, x.columns, op.k, op.weight, op.eps, begin, end, act);
      for (int64_t r = begin; r < end; r++)  // gather: row r of the result is row selected_[r] of x
        k.rms_norm(x.data + (selected_[static_cast<size_t>(r)] - r) * x.columns, x.columns, op.k, op.weight, op.eps, r, r + 1, act);
      break;
    }
    case Kind::linear: {
      const Linear a = layer(op, thread, begin, end);
      k.linear(a, 0, panels(op));
      break;
    }
    case Kind::rope_kv: {
      const int64_t heads = limits_.q_heads + 2 * limits_.kv_heads;
      run_rope(op, begin * heads, end * heads);
      break;
    }
    case Kind::attention:
      break;
  }
}

// Rows [begin, end) of a linear layer.
Linear Program::layer(const Op& op, int thread, int64_t begin, int64_t end) const {
  const int64_t rows = rows_of(op);
  Linear a{};
  a.format = op.packed.format;
  a.weight = op.packed.data;
  a.n = op.packed.n;
  a.k = round_up(op.packed.k, kGroup);
  a.rows = end - begin;
  a.in = view(op.act, rows, thread, begin);
  a.epilogue = op.epilogue;
  a.bias = op.bias;
  a.next = op.next ? op.next->packed.data : nullptr;
  if (op.epilogue == Epilogue::silu_mul) {
    a.act_out = view(op.act_out, rows, thread, begin);
  } else {
    const Buffer& out = buffers_[static_cast<size_t>(op.out)];
    a.out = out.data + begin * out.columns + op.column;
    a.ld_out = out.columns;
  }
  return a;
}

// What a linear layer is shared out in: panels, or pairs of them.
int64_t Program::panels(const Op& op) { return (op.packed.n + kPanel - 1) / kPanel / (op.epilogue == Epilogue::silu_mul ? 2 : 1); }

int64_t Program::panel_bytes(const Op& op) {
  return static_cast<int64_t>(packed_bytes(op.packed.format, kPanel, op.packed.k)) * (op.epilogue == Epilogue::silu_mul ? 2 : 1);
}

// A row that is alone in its chunk is turned by attention.
void Program::run_rope(const Op& op, int64_t begin, int64_t end) {
  const int64_t heads = limits_.q_heads + 2 * limits_.kv_heads;
  while (begin < end) {
    const AttentionChunk& c = chunks_[static_cast<size_t>(row_chunk_[static_cast<size_t>(begin / heads)])];
    const int64_t base = c.row * heads, stop = std::min(end, base + (c.stop - c.start) * heads);
    if (!is_decode(c)) kernels().rope_kv(op.rope, c, begin - base, stop - base);
    begin = stop;
  }
}

Program::Stage Program::run_attention(const Op& op, int thread) {
  Stage stage;
  for (const auto& items : items_) stage.units += static_cast<int64_t>(items.size());
  if (over(thread)) return stage;
  for (int i = 0; i < limits_.threads; i++) {
    const int owner = (thread + i) % limits_.threads;
    const std::vector<Item>& items = items_[static_cast<size_t>(owner)];
    const int64_t count = static_cast<int64_t>(items.size());
    for (int64_t at; (at = claim(thread, owner, count, 1)) >= 0; stage.done++)
      attend(op, items[static_cast<size_t>(at)], at + 1 < count ? &items[static_cast<size_t>(at) + 1] : nullptr, thread);
  }
  return stage;
}

// `next`: what this thread will probably take after it.
void Program::attend(const Op& op, const Item& item, const Item* next, int thread) {
  const Kernels& k = kernels();
  const Buffer& out = buffers_[static_cast<size_t>(op.out)];
  Attention a{q_.as<bf16>(), limits_.q_heads, limits_.score_scale, limits_.window, kv(op.layer), out.data, out.columns};
  if (next) a.next = next->range;
  uint8_t* scratch = scratch_->as<uint8_t>() + scratch_bytes_ * static_cast<size_t>(thread);
  const AttentionChunk& chunk = *item.range.chunk;
  if (!is_decode(chunk)) return k.attention(a, chunk, item.range.kv_begin, item.q_begin, item.q_end, scratch);
  if (item.split < 0) return k.attention_one(a, &op.rope, item.range, nullptr, scratch);
  const Split& split = splits_[static_cast<size_t>(item.split)];
  k.attention_one(a, &op.rope, item.range, split.partial, scratch);
  if (split.left->fetch_sub(1, std::memory_order_acq_rel) == 1) {
    split.left->store(split.pieces, std::memory_order_relaxed);  // for the next layer
    k.attention_merge(a, item.range, split.partial);
  }
}

}  // namespace headrace
