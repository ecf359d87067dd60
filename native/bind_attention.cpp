// Attention's kernels over numpy arrays, for tests and benchmarks: every size is checked here, so that a wrong call raises instead of reading beyond.
#include <immintrin.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bind.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace headrace;

namespace {

template <typename T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void fail(const char* function, const std::string& name, const std::string& expected, const std::string& got) {
  throw nb::value_error(("[" + std::string(function) + "] " + name + ": expected " + expected + ", got " + got).c_str());
}
void expect(bool ok, const char* function, const char* name, const std::string& expected, int64_t got) {
  if (!ok) fail(function, name, expected, std::to_string(got));
}

struct Aligned {
  uint8_t* data;
  explicit Aligned(size_t bytes) : data(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {
    if (!data) throw std::bad_alloc();
  }
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
};

// pool: [blocks, kv_heads, 2 * 32 * head_dim] of one layer.
using Pool1 = Array<uint16_t, 3>;
KvLayer kv_layer(const char* fn, const Pool1& pool) {
  const int64_t head = static_cast<int64_t>(pool.shape(2)), dim = head / (2 * kBlock);
  expect(head % (2 * kBlock) == 0 && dim % 16 == 0 && dim >= 16 && dim <= 256, fn, "pool.shape[2]",
         "64 * head_dim, head_dim a multiple of 16 up to 256", head);
  expect(pool.shape(1) > 0, fn, "pool.shape[1]", "at least one kv head", static_cast<int64_t>(pool.shape(1)));
  return {pool.data(), static_cast<int32_t>(pool.shape(1)), static_cast<int32_t>(dim)};
}

// Entries for positions [first, stop) must be blocks of the pool.
void check_table(const char* fn, const int32_t* table, int64_t entries, int64_t first, int64_t stop, int64_t blocks) {
  expect(entries * kBlock >= stop, fn, "table", "block ids for " + std::to_string(stop) + " positions", entries);
  for (int64_t i = first / kBlock; i * kBlock < stop; i++)
    expect(table[i] >= 0 && table[i] < blocks, fn, "table", "block ids below " + std::to_string(blocks), table[i]);
}

AttentionChunk attention_chunk(const char* fn, const Array<const int32_t, 1>& table, int64_t row, int64_t start, int64_t stop, int64_t rows) {
  expect(start >= 0 && stop > start && stop < INT32_MAX, fn, "stop", "start < stop", stop);
  expect(row >= 0 && row + stop - start <= rows, fn, "row", "room for " + std::to_string(stop - start) + " of " + std::to_string(rows) + " rows",
         row);
  return {static_cast<int32_t>(row), static_cast<int32_t>(start), static_cast<int32_t>(stop), table.data()};
}

struct Call {
  Attention a;
  AttentionChunk chunk;
  int group;
};

Call attention_call(const char* fn, const Array<const uint16_t, 3>& q, const Pool1& pool, const Array<const int32_t, 1>& table, int64_t row,
                    int64_t start, int64_t stop, int kv_head, float scale, int window, float* out, int64_t out_rows, int64_t ld_out) {
  const KvLayer kv = kv_layer(fn, pool);
  const int64_t heads = static_cast<int64_t>(q.shape(1)), rows = static_cast<int64_t>(q.shape(0));
  expect(static_cast<int64_t>(q.shape(2)) == kv.head_dim, fn, "q.shape[2]", "head_dim " + std::to_string(kv.head_dim),
         static_cast<int64_t>(q.shape(2)));
  expect(heads > 0 && heads % kv.kv_heads == 0 && heads / kv.kv_heads <= 16, fn, "q.shape[1]",
         "1 to 16 times kv_heads " + std::to_string(kv.kv_heads), heads);
  expect(kv_head >= 0 && kv_head < kv.kv_heads, fn, "kv_head", "one of " + std::to_string(kv.kv_heads), kv_head);
  expect(window >= 0, fn, "window", "0 or more", window);
  if (!(scale > 0)) fail(fn, "scale", "a positive number", std::to_string(scale));
  const AttentionChunk chunk = attention_chunk(fn, table, row, start, stop, rows);
  if (out) {
    expect(out_rows == rows, fn, "out.shape[0]", std::to_string(rows), out_rows);
    expect(ld_out >= heads * kv.head_dim, fn, "out.shape[1]", "at least " + std::to_string(heads * kv.head_dim), ld_out);
  }
  check_table(fn, table.data(), static_cast<int64_t>(table.shape(0)), first_key(window, start), stop, static_cast<int64_t>(pool.shape(0)));
  return {{q.data(), static_cast<int32_t>(heads), scale, window, kv, out, ld_out}, chunk, static_cast<int>(heads / kv.kv_heads)};
}

size_t scratch_of(const Call& call) { return attention_scratch(call.a.kv.head_dim, call.a.q_heads, call.a.kv.kv_heads); }

void check_partial(const char* fn, const Call& call, const Array<float, 3>& partial) {
  expect(call.chunk.stop - call.chunk.start == 1, fn, "stop", "one query, start + 1", call.chunk.stop);
  const int64_t chunks = (call.chunk.stop + kKvChunk - 1) / kKvChunk;
  expect(static_cast<int64_t>(partial.shape(0)) >= chunks, fn, "partial.shape[0]", "at least " + std::to_string(chunks) + " KV chunks",
         static_cast<int64_t>(partial.shape(0)));
  expect(static_cast<int64_t>(partial.shape(1)) == call.group, fn, "partial.shape[1]", "group " + std::to_string(call.group),
         static_cast<int64_t>(partial.shape(1)));
  expect(static_cast<int64_t>(partial.shape(2)) == 4 + call.a.kv.head_dim, fn, "partial.shape[2]",
         "4 + head_dim " + std::to_string(call.a.kv.head_dim), static_cast<int64_t>(partial.shape(2)));
}

void attention_py(const Array<const uint16_t, 3>& q, const Pool1& pool, const Array<const int32_t, 1>& table, int64_t row, int64_t start,
                  int64_t stop, int kv_head, int64_t q_begin, int64_t q_end, float scale, int window, const Array<float, 2>& out) {
  const Call call = attention_call("attention", q, pool, table, row, start, stop, kv_head, scale, window, out.data(),
                                   static_cast<int64_t>(out.shape(0)), static_cast<int64_t>(out.shape(1)));
  expect(q_begin >= 0 && q_begin <= q_end && q_end <= stop - start, "attention", "q_end", "q_begin <= q_end <= " + std::to_string(stop - start),
         q_end);
  const Aligned scratch(scratch_of(call));
  kernels().attention(call.a, call.chunk, kv_head, q_begin, q_end, scratch.data);
}

void attention_partial_py(const Array<const uint16_t, 3>& q, const Pool1& pool, const Array<const int32_t, 1>& table, int64_t row, int64_t start,
                          int kv_head, int64_t c_begin, int64_t c_end, float scale, int window, const Array<float, 3>& partial) {
  const Call call = attention_call("attention_partial", q, pool, table, row, start, start + 1, kv_head, scale, window, nullptr, 0, 0);
  check_partial("attention_partial", call, partial);
  expect(c_begin >= 0 && c_begin <= c_end && c_end <= static_cast<int64_t>(partial.shape(0)), "attention_partial", "c_end",
         "c_begin <= c_end <= chunks", c_end);
  const Aligned scratch(scratch_of(call));
  const int64_t first = std::max(c_begin, first_key(window, start) / kKvChunk);  // chunks before it are not the query's
  const KvRange range{&call.chunk, kv_head, kv_head + 1, first, std::min(c_end, kv_chunks(call.chunk.stop))};
  kernels().attention_one(call.a, nullptr, range, partial.data(), scratch.data);
}

void attention_merge_py(const Array<const uint16_t, 3>& q, const Pool1& pool, const Array<const int32_t, 1>& table, int64_t row, int64_t start,
                        int kv_head, float scale, int window, const Array<float, 3>& partial, const Array<float, 2>& out) {
  const Call call = attention_call("attention_merge", q, pool, table, row, start, start + 1, kv_head, scale, window, out.data(),
                                   static_cast<int64_t>(out.shape(0)), static_cast<int64_t>(out.shape(1)));
  check_partial("attention_merge", call, partial);
  kernels().attention_merge(call.a, {&call.chunk, kv_head, kv_head + 1, 0, 0}, partial.data());
}

void rope_kv_py(const Array<const float, 2>& qkv, const Array<const float, 3>& cos_sin, const Array<uint16_t, 3>& q, const Pool1& pool,
                const Array<const int32_t, 1>& table, int64_t row, int64_t start, int64_t stop, int64_t begin, int64_t end, nb::object q_norm,
                nb::object k_norm, float eps) {
  const char* fn = "rope_kv";
  const KvLayer kv = kv_layer(fn, pool);
  const int64_t rows = static_cast<int64_t>(qkv.shape(0)), heads = static_cast<int64_t>(q.shape(1)), dim = kv.head_dim;
  expect(static_cast<int64_t>(q.shape(0)) == rows, fn, "q.shape[0]", std::to_string(rows), static_cast<int64_t>(q.shape(0)));
  expect(static_cast<int64_t>(q.shape(2)) == dim, fn, "q.shape[2]", "head_dim " + std::to_string(dim), static_cast<int64_t>(q.shape(2)));
  const int64_t units = heads + 2 * kv.kv_heads, width = units * dim;
  expect(static_cast<int64_t>(qkv.shape(1)) >= width, fn, "qkv.shape[1]", "at least " + std::to_string(width), static_cast<int64_t>(qkv.shape(1)));
  expect(static_cast<int64_t>(cos_sin.shape(0)) >= stop, fn, "cos_sin.shape[0]", "at least " + std::to_string(stop),
         static_cast<int64_t>(cos_sin.shape(0)));
  expect(static_cast<int64_t>(cos_sin.shape(1)) * 2 <= dim, fn, "cos_sin.shape[1]", "at most head_dim / 2", static_cast<int64_t>(cos_sin.shape(1)));
  expect(cos_sin.shape(2) == 2, fn, "cos_sin.shape[2]", "2", static_cast<int64_t>(cos_sin.shape(2)));
  const AttentionChunk chunk = attention_chunk(fn, table, row, start, stop, rows);
  check_table(fn, table.data(), static_cast<int64_t>(table.shape(0)), start, stop, static_cast<int64_t>(pool.shape(0)));
  const int64_t count = (stop - start) * units;
  expect(begin >= 0 && begin <= end && end <= count, fn, "end", "begin <= end <= " + std::to_string(count), end);
  const auto norm = [&](const nb::object& object, const char* name) -> const float* {
    if (object.is_none()) return nullptr;
    const auto weight = nb::cast<Array<const float, 1>>(object);
    expect(static_cast<int64_t>(weight.shape(0)) == dim, fn, name, "head_dim " + std::to_string(dim), static_cast<int64_t>(weight.shape(0)));
    return weight.data();
  };
  const RopeKv a{qkv.data(),
                 static_cast<int64_t>(qkv.shape(1)),
                 0,
                 heads * dim,
                 (heads + kv.kv_heads) * dim,
                 static_cast<int32_t>(heads),
                 norm(q_norm, "q_norm"),
                 norm(k_norm, "k_norm"),
                 eps,
                 {cos_sin.data(), static_cast<int32_t>(cos_sin.shape(1) * 2)},
                 q.data(),
                 kv};
  kernels().rope_kv(a, chunk, begin, end);
}

// Runs body(thread) on `threads` threads and returns the seconds from first start to last end.
template <typename F>
double timed(int threads, const F& body) {
  std::atomic<int> ready{0};
  std::vector<std::thread> others;
  const auto go = [&](int thread) {
    ready++;
    while (ready.load() < threads) _mm_pause();
    body(thread);
  };
  for (int i = 1; i < threads; i++) others.emplace_back(go, i);
  while (ready.load() < threads - 1) _mm_pause();
  const auto start = std::chrono::steady_clock::now();
  go(0);
  for (std::thread& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A whole step's attention much as the program runs it: every layer and request, a single query with all its heads or each kv head and tile of 32
// queries, handed out in that order.
double attention_step(const Array<const uint16_t, 3>& q, const Array<uint16_t, 4>& pool, const Array<const int32_t, 2>& tables,
                      const Array<const int32_t, 1>& starts, const Array<const int32_t, 1>& stops, float scale, int window,
                      const Array<float, 2>& out, int threads) {
  const char* fn = "attention_step";
  const int64_t requests = static_cast<int64_t>(tables.shape(0)), width = static_cast<int64_t>(tables.shape(1)),
                layers = static_cast<int64_t>(pool.shape(0));
  expect(threads >= 1 && threads <= 256, fn, "threads", "1 to 256", threads);
  expect(static_cast<int64_t>(starts.shape(0)) == requests, fn, "starts.shape[0]", std::to_string(requests), static_cast<int64_t>(starts.shape(0)));
  expect(static_cast<int64_t>(stops.shape(0)) == requests, fn, "stops.shape[0]", std::to_string(requests), static_cast<int64_t>(stops.shape(0)));
  std::vector<Call> calls;
  for (int64_t layer = 0; layer < layers; layer++) {
    const size_t shape[3] = {pool.shape(1), pool.shape(2), pool.shape(3)};
    const Pool1 one(pool.data() + layer * static_cast<int64_t>(shape[0] * shape[1] * shape[2]), 3, shape, nb::handle());
    int64_t row = 0;
    for (int64_t i = 0; i < requests; i++) {
      const size_t entries[1] = {static_cast<size_t>(width)};
      const Array<const int32_t, 1> table(tables.data() + i * width, 1, entries, nb::handle());
      calls.push_back(attention_call(fn, q, one, table, row, starts.data()[i], stops.data()[i], 0, scale, window, out.data(),
                                     static_cast<int64_t>(out.shape(0)), static_cast<int64_t>(out.shape(1))));
      row += stops.data()[i] - starts.data()[i];
    }
  }
  struct Item {
    const Call* call;
    KvRange range;
    int64_t begin, end;
  };
  std::vector<Item> items;
  for (const Call& call : calls) {
    const int64_t queries = call.chunk.stop - call.chunk.start;
    const auto first = [&](int64_t query) { return first_key(window, call.chunk.start + query) / kKvChunk; };
    if (queries == 1) items.push_back({&call, {&call.chunk, 0, call.a.kv.kv_heads, first(0), kv_chunks(call.chunk.stop)}, 0, 1});
    for (int h = 0; queries > 1 && h < call.a.kv.kv_heads; h++)
      for (int64_t end = queries; end > 0; end -= 32) {  // longest first
        const int64_t begin = end > 32 ? end - 32 : 0;
        items.push_back({&call, {&call.chunk, h, h + 1, first(begin), kv_chunks(call.chunk.start + end)}, begin, end});
      }
  }
  const Kernels& k = kernels();
  const size_t bytes = scratch_of(calls[0]);
  std::vector<std::unique_ptr<Aligned>> scratch;
  for (int i = 0; i < threads; i++) scratch.push_back(std::make_unique<Aligned>(bytes));
  std::atomic<size_t> next{0};
  nb::gil_scoped_release release;
  return timed(threads, [&](int thread) {
    for (size_t i; (i = next.fetch_add(1)) < items.size();) {
      const Item& item = items[i];
      Attention a = item.call->a;
      if (const size_t next_item = i + static_cast<size_t>(threads); next_item < items.size() && items[next_item].call->a.kv.base == a.kv.base)
        a.next = items[next_item].range;
      uint8_t* const mine = scratch[static_cast<size_t>(thread)]->data;
      if (item.call->chunk.stop - item.call->chunk.start == 1)
        k.attention_one(a, nullptr, item.range, nullptr, mine);
      else
        k.attention(a, item.call->chunk, item.range.kv_begin, item.begin, item.end, mine);
    }
  });
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attention_scratch", &attention_scratch, nb::arg("head_dim"), nb::arg("q_heads"), nb::arg("kv_heads"), "Bytes of scratch a thread needs.");
  m.def("rope_kv", &rope_kv_py, nb::arg("qkv").noconvert(), nb::arg("cos_sin").noconvert(), nb::arg("q").noconvert(), nb::arg("pool").noconvert(),
        nb::arg("table").noconvert(), nb::arg("row"), nb::arg("start"), nb::arg("stop"), nb::arg("begin"), nb::arg("end"), nb::arg("q_norm").none(),
        nb::arg("k_norm").none(), nb::arg("eps"),
        "qkv fp32 [rows, (q_heads + 2 kv_heads) * head_dim] -> q bf16 [rows, q_heads, head_dim] and the pool's blocks, units [begin, end).\n"
        "cos_sin is fp32 [positions, rotary / 2, 2]. ValueError if a size does not fit.");
  m.def("attention", &attention_py, nb::arg("q").noconvert(), nb::arg("pool").noconvert(), nb::arg("table").noconvert(), nb::arg("row"),
        nb::arg("start"), nb::arg("stop"), nb::arg("kv_head"), nb::arg("q_begin"), nb::arg("q_end"), nb::arg("scale"), nb::arg("window"),
        nb::arg("out").noconvert(),
        "out fp32 [rows, >= q_heads * head_dim] of queries [q_begin, q_end) of the chunk [start, stop), for the q heads of one kv head.\n"
        "q is bf16 [rows, q_heads, head_dim], pool bf16 [blocks, kv_heads, 64 * head_dim]. ValueError if a size does not fit.");
  m.def("attention_partial", &attention_partial_py, nb::arg("q").noconvert(), nb::arg("pool").noconvert(), nb::arg("table").noconvert(),
        nb::arg("row"), nb::arg("start"), nb::arg("kv_head"), nb::arg("c_begin"), nb::arg("c_end"), nb::arg("scale"), nb::arg("window"),
        nb::arg("partial").noconvert(),
        "partial fp32 [chunks, group, 4 + head_dim] of the query at `start`: {m, l, -, -, o} of KV chunks [c_begin, c_end).");
  m.def("attention_merge", &attention_merge_py, nb::arg("q").noconvert(), nb::arg("pool").noconvert(), nb::arg("table").noconvert(), nb::arg("row"),
        nb::arg("start"), nb::arg("kv_head"), nb::arg("scale"), nb::arg("window"), nb::arg("partial").noconvert(), nb::arg("out").noconvert(),
        "out of the query at `start` from its partials.");
  m.def("attention_step", &attention_step, nb::arg("q").noconvert(), nb::arg("pool").noconvert(), nb::arg("tables").noconvert(),
        nb::arg("starts").noconvert(), nb::arg("stops").noconvert(), nb::arg("scale"), nb::arg("window"), nb::arg("out").noconvert(),
        nb::arg("threads"),
        "Seconds for the attention of a step: pool bf16 [layers, blocks, kv_heads, 64 * head_dim], tables int32 [requests, blocks], rows in request "
        "order.");
}
