#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

namespace headrace {
namespace {

// A row stride that keeps the rows of a tile out of each other's cache sets: never a multiple of a page.
int64_t stride(int64_t bytes) {
  bytes = round_up(bytes, 64);
  return bytes % 4096 == 0 ? bytes + 64 : bytes;
}

}  // namespace

Memory::Memory(size_t bytes, bool huge) : bytes_(bytes < 64 ? 64 : bytes) {
  base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base_ == MAP_FAILED) throw std::bad_alloc();
  if (huge) madvise(base_, bytes_, MADV_HUGEPAGE);
}
Memory::~Memory() {
  if (base_) munmap(base_, bytes_);
}

Program::Program(const ProgramLimits& limits)
    : limits_(limits),
      pool_(limits.threads),
      kv_(static_cast<size_t>(limits.num_layers) * limits.num_blocks * limits.kv_heads * kv_head_elements(limits.head_dim) * sizeof(bf16), true),
      tokens_(static_cast<size_t>(limits.max_rows) * (limits.context + 1) * sizeof(int32_t)),
      tables_(static_cast<size_t>(limits.max_rows) * limits.max_blocks * sizeof(int32_t)),
      q_(static_cast<size_t>(limits.max_tokens) * limits.q_heads * limits.head_dim * sizeof(bf16)),
      partial_(4 * static_cast<size_t>(limits.threads) * (limits.context / kKvChunk + 1) * limits.q_heads * (4 + limits.head_dim) * sizeof(float)),
      rows_(static_cast<size_t>(limits.max_rows)),
      cursors_(new Cursor[static_cast<size_t>(limits.threads)]()),
      items_(static_cast<size_t>(limits.threads)),
      pieces_left_(new std::atomic<int>[4 * static_cast<size_t>(limits.threads) * limits.kv_heads]()) {
  scratch_bytes_ = std::max(attention_scratch(limits.head_dim, limits.q_heads, limits.kv_heads), sample_scratch(limits.vocab));
}

// --- building ---

int Program::buffer(int64_t columns) {
  const int64_t ld = round_up(columns, 16);
  Memory memory(static_cast<size_t>(limits_.max_tokens) * ld * sizeof(float));
  float* data = memory.as<float>();
  buffers_.push_back({std::move(memory), data, ld});
  return static_cast<int>(buffers_.size()) - 1;
}

int Program::activations(int64_t k, bool int8, bool as_bf16) {
  const int64_t padded = round_up(k, kGroup), rows = limits_.max_tokens + kSmall * limits_.threads;
  Activations a{};
  a.ldq = stride(padded);
  a.ldg = round_up(padded / kGroup, 16);
  a.ldb = stride(padded * 2) / 2;
  const size_t q = int8 ? rows * a.ldq : 0, g = int8 ? rows * a.ldg * 4 : 0, b = as_bf16 ? rows * a.ldb * 2 : 0;
  const size_t q_end = round_up(q, 4096), g_size = round_up(g, 4096);
  Memory memory(q_end + 3 * g_size + b);
  uint8_t* base = memory.as<uint8_t>();
  if (int8) {
    a.q = reinterpret_cast<int8_t*>(base);
    a.scale = reinterpret_cast<float*>(base + q_end);
    a.corr = reinterpret_cast<int32_t*>(base + q_end + g_size);
    a.sum = reinterpret_cast<float*>(base + q_end + 2 * g_size);
  }
  if (as_bf16) a.b = reinterpret_cast<bf16*>(base + q_end + 3 * g_size);
  activations_.push_back({std::move(memory), a, padded});
  return static_cast<int>(activations_.size()) - 1;
}

Program::Op& Program::add(Kind kind, const std::string& name) {
  Op& op = ops_.emplace_back();
  op.kind = kind;
  op.name = name;
  return op;
}

void Program::embed(const Weight& weight, float scale, int out) {
  Op& op = add(Kind::embed, "embed");
  op.packed = weight;
  op.scale = scale;
  op.out = out;
}

void Program::rms_norm(int x, const float* weight, float eps, int64_t k, int out, bool selected) {
  Op& op = add(Kind::rms_norm, "norm");
  op.x = x;
  op.weight = weight;
  op.eps = eps;
  op.k = k;
  op.act = out;
  op.selected = selected;
}

void Program::quantize(int x, int64_t k, int out) {
  Op& op = add(Kind::quantize, "quantize");
  op.x = x;
  op.k = k;
  op.act = out;
}

void Program::linear(const std::string& name, const Weight& weight, int in, int out, int64_t column, Epilogue epilogue, const float* bias,
                     bool selected) {
  Op& op = add(Kind::linear, name);
  op.packed = weight;
  op.act = in;
  op.column = column;
  op.epilogue = epilogue;
  op.bias = bias;
  op.selected = selected;
  if (epilogue == Epilogue::silu_mul) {
    op.act_out = out;
    activations_[static_cast<size_t>(out)].shared = true;
  } else {
    op.out = out;
  }
}

void Program::rope_kv(int qkv, int64_t q_offset, int64_t k_offset, int64_t v_offset, const float* q_norm, const float* k_norm, float eps,
                      const float* cos_sin, int rotary, int layer) {
  Op& op = add(Kind::rope_kv, "rope_kv");
  const Buffer& in = buffers_[static_cast<size_t>(qkv)];
  op.rope = {in.data, in.columns, q_offset, k_offset, v_offset, limits_.q_heads, q_norm, k_norm, eps, {cos_sin, rotary}, q_.as<bf16>(), kv(layer)};
}

void Program::attention(int out, int layer) {
  const auto rope = std::find_if(ops_.rbegin(), ops_.rend(), [](const Op& op) { return op.kind == Kind::rope_kv; });
  if (rope == ops_.rend()) throw std::logic_error("attention before its rope_kv");
  const RopeKv turn = rope->rope;
  Op& op = add(Kind::attention, "attention");
  op.rope = turn;
  op.out = out;
  op.layer = layer;
}

void Program::finish(int logits) {
  logits_ = logits;
  const auto alone = [](const Op& a, const Op& b) { return a.kind == Kind::attention || b.kind == Kind::attention || a.selected != b.selected; };
  for (size_t i = 0; i < ops_.size(); i++) {
    if (i == 0 || alone(ops_[i - 1], ops_[i])) runs_.push_back({i, i});
    runs_.back().second = i + 1;
  }
  const Op* next = nullptr;
  for (auto op = ops_.rbegin(); op != ops_.rend(); ++op) {
    op->next = next;
    if (op->kind == Kind::linear) next = &*op;
  }
  scratch_bytes_ = static_cast<size_t>(round_up(static_cast<int64_t>(scratch_bytes_), 4096));
  scratch_ = std::make_unique<Memory>(scratch_bytes_ * static_cast<size_t>(limits_.threads));
}

KvLayer Program::kv(int layer) const {
  const int64_t elements = static_cast<int64_t>(limits_.num_blocks) * limits_.kv_heads * kv_head_elements(limits_.head_dim);
  return {kv_.as<bf16>() + layer * elements, limits_.kv_heads, limits_.head_dim};
}

size_t Program::bytes() const {
  size_t total = tokens_.bytes() + tables_.bytes() + q_.bytes() + scratch_->bytes() + partial_.bytes();
  for (const Buffer& b : buffers_) total += b.memory.bytes();
  for (const ActBuffer& a : activations_) total += a.memory.bytes();
  return total;
}

// --- rows ---

void Program::set_row(int row, const int32_t* tokens, int64_t count, int64_t num_prompt, RowParams params) {
  std::memcpy(tokens_.as<int32_t>() + row * (limits_.context + 1), tokens, static_cast<size_t>(count) * sizeof(int32_t));
  rows_[static_cast<size_t>(row)] = {static_cast<int32_t>(num_prompt), static_cast<int32_t>(count), std::move(params)};
}

void Program::set_blocks(int row, int first, const int32_t* ids, int count) {
  std::memcpy(tables_.as<int32_t>() + static_cast<int64_t>(row) * limits_.max_blocks + first, ids, static_cast<size_t>(count) * sizeof(int32_t));
}

void Program::append(int row, int32_t token) {
  Row& state = rows_[static_cast<size_t>(row)];
  if (state.num_tokens > limits_.context) return;  // the array holds one more than the context: the last token is never computed
  tokens_.as<int32_t>()[row * (limits_.context + 1) + state.num_tokens++] = token;
}

void Program::truncate(int row, int num_tokens) {
  Row& state = rows_[static_cast<size_t>(row)];
  state.num_tokens = std::min(state.num_tokens, num_tokens);
}

// --- sampling ---

struct Program::SampleCall {
  Program* self;
  const int32_t *rows, *at;
  int count;
  const uint32_t* const* masks;
  int32_t *tokens, *top_ids;
  float *logprobs, *top_logprobs;
  int top_stride;
  std::atomic<int> next{0};
};

void Program::sample(const int32_t* rows, const int32_t* at, int count, const uint32_t* const* masks, int32_t* tokens, float* logprobs,
                     int32_t* top_ids, float* top_logprobs, int top_stride) {
  SampleCall call{this, rows, at, count, masks, tokens, top_ids, logprobs, top_logprobs, top_stride, {}};
  const auto body = [](void* context, int thread) {
    SampleCall& c = *static_cast<SampleCall*>(context);
    Program& p = *c.self;
    uint8_t* scratch = p.scratch_->as<uint8_t>() + p.scratch_bytes_ * static_cast<size_t>(thread);
    const Buffer& logits = p.buffers_[static_cast<size_t>(p.logits_)];
    for (int i; (i = c.next.fetch_add(1, std::memory_order_relaxed)) < c.count;) {
      Row& row = p.rows_[static_cast<size_t>(c.rows[i])];
      const RowParams& r = row.params;
      float* values = logits.data + c.at[i] * logits.columns;
      if (row.num_tokens - row.num_prompt < r.min_tokens)
        for (int32_t id : r.end_ids) values[id] = -__builtin_inff();
      Sampling s{};
      s.temperature = r.temperature;
      s.top_p = r.top_p;
      s.min_p = r.min_p;
      s.top_k = r.top_k;
      s.repetition_penalty = r.repetition_penalty;
      s.presence_penalty = r.presence_penalty;
      s.frequency_penalty = r.frequency_penalty;
      s.seed = r.seed;
      s.sample_index = r.sample_index;
      s.num_logprobs = r.num_logprobs;
      s.num_prompt = row.num_prompt;
      s.num_tokens = row.num_tokens;
      s.tokens = p.tokens_.as<int32_t>() + c.rows[i] * (p.limits_.context + 1);
      s.num_bias = static_cast<int32_t>(r.bias_ids.size());
      s.bias_ids = r.bias_ids.data();
      s.bias_values = r.bias_values.data();
      s.mask = c.masks ? c.masks[i] : nullptr;
      const Sampled sampled = kernels().sample(values, p.limits_.vocab, s, c.top_ids + static_cast<int64_t>(i) * c.top_stride,
                                               c.top_logprobs + static_cast<int64_t>(i) * c.top_stride, scratch);
      c.tokens[i] = sampled.token;
      c.logprobs[i] = sampled.logprob;
      p.append(c.rows[i], sampled.token);
    }
  };
  // One greedy row is quicker than waking anybody.
  if (count == 1) {
    body(&call, 0);
    return;
  }
  pool_.run(body, &call);
}

struct Program::ScoreCall {
  Program* self;
  const int32_t* tokens;  // the first to be scored
  int64_t at;
  int count, tops;
  float *logprobs, *top_logprobs;
  int32_t *ranks, *top_ids;
  std::atomic<int> next{0};
};

// Sampling where one token is allowed: it is chosen, and what is told of it, as of the best, is of the logits before the mask.
void Program::score(int row, int64_t first, int64_t stop, int64_t at, int tops, float* logprobs, int32_t* ranks, int32_t* top_ids,
                    float* top_logprobs) {
  const int32_t* tokens = tokens_.as<int32_t>() + row * (limits_.context + 1) + first + 1;
  ScoreCall call{this, tokens, at, static_cast<int>(stop - first), tops, logprobs, top_logprobs, ranks, top_ids, {}};
  pool_.run(
      [](void* context, int thread) {
        ScoreCall& c = *static_cast<ScoreCall*>(context);
        Program& p = *c.self;
        uint8_t* scratch = p.scratch_->as<uint8_t>() + p.scratch_bytes_ * static_cast<size_t>(thread);
        const Buffer& logits = p.buffers_[static_cast<size_t>(p.logits_)];
        std::vector<uint32_t> mask(static_cast<size_t>(p.limits_.vocab + 31) / 32);
        for (int i; (i = c.next.fetch_add(1, std::memory_order_relaxed)) < c.count;) {
          const int32_t token = c.tokens[i];
          float* values = logits.data + (c.at + i) * logits.columns;
          int32_t rank = 1;
          for (int64_t j = 0; j < p.limits_.vocab; j++) rank += values[j] > values[token];
          c.ranks[i] = rank;
          Sampling s{};
          s.top_p = 1;
          s.repetition_penalty = 1;
          s.num_logprobs = c.tops;
          s.mask = mask.data();
          mask[static_cast<size_t>(token / 32)] = 1u << (token % 32);
          const int64_t best = static_cast<int64_t>(i) * c.tops;
          c.logprobs[i] = kernels().sample(values, p.limits_.vocab, s, c.top_ids + best, c.top_logprobs + best, scratch).logprob;
          mask[static_cast<size_t>(token / 32)] = 0;
        }
      },
      &call);
}

void Program::pool(int x, const float* weight, double eps, int64_t k, int64_t first, int64_t count, double* sum) const {
  const Buffer& buffer = buffers_[static_cast<size_t>(x)];
  for (int64_t row = first; row < first + count; row++) {
    const float* values = buffer.data + row * buffer.columns;
    double squares = 0;
    for (int64_t i = 0; i < k; i++) squares += static_cast<double>(values[i]) * values[i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(k) + eps);
    for (int64_t i = 0; i < k; i++) sum[i] += values[i] * scale * weight[i];
  }
}

void Program::profile(bool on) {
  profile_ = on;
  waited_ = 0;
  for (Op& op : ops_) op.seconds = 0;
}

std::vector<OpTime> Program::times() const {
  std::vector<OpTime> times;
  for (const Op& op : ops_) {
    auto same = std::find_if(times.begin(), times.end(), [&](const OpTime& t) { return t.name == op.name; });
    if (same == times.end())
      times.push_back({op.name, op.seconds});
    else
      same->seconds += op.seconds;
  }
  times.push_back({"wait", waited_});
  return times;
}

}  // namespace headrace
