// Every kernel, listed once. A family file defines them in namespace headrace::HEADRACE_ISA; dispatch.cpp builds one table a level.
// All kernels are single-threaded over the range they are given; program.cpp splits the ranges over the pool.
// Arithmetic order, group sizes and rounding points are the numerics version written down in docs/numerics.md.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

constexpr int kPanel = 32;    // output columns a packed panel holds
constexpr int kGroup = 32;    // k values that share one weight scale and one activation scale
constexpr int kBlock = 32;    // tokens a KV block holds
constexpr int kKvChunk = 64;  // tokens whose softmax is taken together: the canonical unit of attention (2 blocks)

using bf16 = uint16_t;

// Packed weight formats. A panel is 32 output columns over all of k; its groups (32 k) ascend, each record a multiple of 64 B:
//   q4_0  [fp16 scale[32]] [4 x 128 B nibbles]                    576 B   w = scale * (u - 8)
//   q4_1  [fp16 scale[32]] [fp16 min[32]] [4 x 128 B nibbles]     640 B   w = scale * u + min
//   q8_0  [fp16 scale[32]] [8 x 128 B bytes, u = q + 128]        1088 B   w = scale * (u - 128)
//   bf16  [16 x 128 B: 32 columns x 2 k]                         2048 B
// Nibble byte [j][c][i] (j 0..3, c 0..31, i 0..3) = u4(k = 8j+i) | u4(k = 8j+4+i) << 4, so that (v << 4) & 0xF0 and v & 0xF0 are two ready
// unsigned dot operands holding 16*u. Bytes [q][c][i] hold k = 4q+i. Columns past n and k past the tensor's own are zero weights
// (q4_0: u = 8, q8_0: u = 128, scale 0).
enum class Format : int32_t { q4_0 = 0, q4_1 = 1, q8_0 = 2, bf16 = 3 };

constexpr size_t group_bytes(Format f) { return f == Format::q4_0 ? 576 : f == Format::q4_1 ? 640 : f == Format::q8_0 ? 1088 : 2048; }
// Bytes of a packed [n, k] weight.
constexpr size_t packed_bytes(Format f, int64_t n, int64_t k) {
  return static_cast<size_t>((n + kPanel - 1) / kPanel) * static_cast<size_t>((k + kGroup - 1) / kGroup) * group_bytes(f);
}

// Source tensor types a packer reads, numbered as GGUF numbers them.
enum class Source : int32_t { f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q8_0 = 8, bf16 = 30 };

// Rows of activations, in the form the weight format wants: int8 in groups of 32 for the int formats, bf16 for bf16. Either half may be null.
// scale = absmax / 127 of the group, q = round-to-nearest-even(x * (127 / absmax)); corr = -128 * sum(q); sum = scale * float(sum(q)).
struct Activations {
  int8_t* q;      // [rows][ldq], ldq a multiple of 64, never a multiple of 4096
  float* scale;   // [rows][ldg]
  int32_t* corr;  // [rows][ldg]
  float* sum;     // [rows][ldg]
  bf16* b;        // [rows][ldb]
  int64_t ldq, ldg, ldb;
};

enum class Epilogue : int32_t {
  store = 0,     // out[row][col] = y + bias[col]
  add = 1,       // out[row][col] += y + bias[col]       (the residual stream)
  silu_mul = 2,  // panels alternate gate, up; h = silu(gate) * up goes to `act_out`, 32 columns a pair of panels: one group
};

struct Linear {
  Format format;
  const uint8_t* weight;  // packed panels, 64 B aligned
  int64_t n, k;           // columns that exist; k padded to a multiple of 32
  int64_t rows;
  Activations in;
  Epilogue epilogue;
  float* out;  // store, add
  int64_t ld_out;
  const float* bias;    // or null
  Activations act_out;  // silu_mul: whichever of q / b is not null is written
  // What this thread will probably read after these panels, or null: its first bytes are prefetched while the last panels are multiplied.
  const uint8_t* next;
};

// One request's share of a step, as attention sees it.
struct AttentionChunk {
  int32_t row;           // first of its rows in the flat batch
  int32_t start, stop;   // positions [start, stop) are this step's queries; keys are [0, stop)
  const int32_t* table;  // block ids covering [0, stop)
};

// The KV pool of one layer: [block][kv_head][K | V]; K is [head_dim/2][32 tokens][2], V is [32/2 token pairs][head_dim][2], bf16.
// head_dim is a multiple of 16, at most 256.
struct KvLayer {
  bf16* base;
  int32_t kv_heads, head_dim;
};
// The first key that a query at `position` sees; window 0: all before it.
constexpr int64_t first_key(int64_t window, int64_t position) { return window > 0 && position >= window ? position - window + 1 : 0; }
constexpr int64_t kv_chunks(int64_t tokens) { return (tokens + kKvChunk - 1) / kKvChunk; }
constexpr int64_t kv_head_elements(int head_dim) { return 2LL * kBlock * head_dim; }  // K and V of one block and head

struct Rope {
  const float* cos_sin;  // [position][rotary/2][2]
  int32_t rotary;        // rotated dimensions, even, the first of the head; pairs are (d, d + rotary/2)
};

// Turns fp32 q|k|v columns into bf16 queries and cached keys and values.
struct RopeKv {
  const float* qkv;  // [rows][ld_qkv]
  int64_t ld_qkv, q_offset, k_offset, v_offset;
  int32_t q_heads;
  const float *q_norm, *k_norm;  // [head_dim] RMSNorm before the rotation (Qwen3), or null
  float eps;
  Rope rope;
  bf16* q;  // [rows][q_heads * head_dim]
  KvLayer kv;
};

// KV chunks [c_begin, c_end) of 64 tokens of some heads of a request: read chunk by chunk, in each head by head, since the heads of a block lie
// together.
struct KvRange {
  const AttentionChunk* chunk;
  int32_t kv_begin, kv_end;
  int64_t c_begin, c_end;
};

struct Attention {
  const bf16* q;  // [rows][q_heads * head_dim]
  int32_t q_heads;
  float scale;     // of the scores, 1/sqrt(head_dim) as a rule
  int32_t window;  // keys a query sees, itself included; 0: all
  KvLayer kv;
  float* out;  // [rows][ld_out], head h at column h * head_dim
  int64_t ld_out;
  KvRange next{};  // what this thread will probably read next, or no chunk: prefetched while the last keys and values here are read
};

// What one row of logits is sampled with. Neutral values leave the distribution as it is.
struct Sampling {
  float temperature;                                              // 0: greedy (lowest id wins a tie)
  float top_p, min_p;                                             // 1, 0: off
  int32_t top_k;                                                  // 0: off
  float repetition_penalty, presence_penalty, frequency_penalty;  // 1, 0, 0: off
  uint64_t seed;
  int32_t sample_index;            // which of the n samples
  int32_t num_logprobs;            // -1: none; k >= 0: the chosen token's and the k best
  int32_t num_prompt, num_tokens;  // of `tokens`: [0, num_prompt) prompt, [num_prompt, num_tokens) generated
  const int32_t* tokens;
  int32_t num_bias;
  const int32_t* bias_ids;
  const float* bias_values;
  const uint32_t* mask;  // allowed tokens, one bit each, or null
};

struct Sampled {
  int32_t token;
  float logprob;  // of the token, under the model's own distribution after penalties and bias, before the mask, at temperature 1
};

// name, result, parameters
#define HEADRACE_KERNELS(X)                                                                                                                      \
  /* act <- rows [begin, end) of x[., ld], k values each, padded with zeros to a multiple of 32; writes q or b, whichever is not null */         \
  X(quantize, void, (const float* x, int64_t ld, int64_t k, int64_t begin, int64_t end, const Activations& act))                                 \
  /* act <- rms_norm(x) * weight, then as quantize */                                                                                            \
  X(rms_norm, void, (const float* x, int64_t ld, int64_t k, const float* weight, float eps, int64_t begin, int64_t end, const Activations& act)) \
  /* panels [begin, end) of a linear layer, all rows. silu_mul: begin and end count pairs of panels */                                           \
  X(linear, void, (const Linear& a, int64_t begin, int64_t end))                                                                                 \
  /* out[k] = row `id` of a packed [n, k] weight, times `scale` */                                                                               \
  X(embed, void, (Format format, const uint8_t* weight, int64_t k, int64_t id, float scale, float* out))                                         \
  /* positions [start, stop) of one chunk, q heads then k heads then v heads: units [begin, end) of (stop-start) * (q_heads + 2 kv_heads),       \
   * token-major */                                                                                                                              \
  X(rope_kv, void, (const RopeKv& a, const AttentionChunk& chunk, int64_t begin, int64_t end))                                                   \
  /* queries [q_begin, q_end) of one chunk (counted from chunk.start) for one kv head, all their keys; merges KV chunks in ascending order */    \
  X(attention, void, (const Attention& a, const AttentionChunk& chunk, int kv_head, int64_t q_begin, int64_t q_end, uint8_t* scratch))           \
  /* the same bits for the ONE query of a chunk and some of its KV chunks and heads. rope: q, k and v are turned first (k and v only by the      \
   * range of the last KV chunk). Into out, or, where a query's KV chunks are shared out, partial[head - kv_begin][c][group head] = {m, l, -,    \
   * -, o[head_dim]}, c from 0 to the last that is visible */                                                                                    \
  X(attention_one, void, (const Attention& a, const RopeKv* rope, const KvRange& range, float* partial, uint8_t* scratch))                       \
  /* ... and the merge of partials, ascending, into out */                                                                                       \
  X(attention_merge, void, (const Attention& a, const KvRange& range, const float* partial))                                                     \
  /* samples one row of logits (changed in place). top_ids/top_logprobs: num_logprobs each. scratch: sample_scratch(vocab) bytes */              \
  X(sample, Sampled, (float* logits, int64_t vocab, const Sampling& s, int32_t* top_ids, float* top_logprobs, uint8_t* scratch))

// Bytes of scratch a thread needs, 64 B aligned.
constexpr size_t attention_scratch(int head_dim, int q_heads, int kv_heads) {
  return static_cast<size_t>(256) * 1024 + static_cast<size_t>(head_dim) * (q_heads / kv_heads * 64 * 8 + q_heads * 16);
}
constexpr size_t sample_scratch(int64_t vocab) { return static_cast<size_t>(vocab) * 16 + 4096; }

struct Kernels {
#define HEADRACE_MEMBER(name, result, parameters) result(*name) parameters;
  HEADRACE_KERNELS(HEADRACE_MEMBER)
#undef HEADRACE_MEMBER
};

// dispatch.cpp: the only place that knows levels.
const Kernels& kernels();
const char* kernels_level();
bool use_level(const char* name);  // false: unknown here or not supported by this CPU and operating system
int num_levels();
const char* level_name(int i);  // best first, only those that run here

// pack.cpp (baseline code). Reads `rows` rows of k values of type `source` at `src` (src_bytes long, checked) and writes them as columns of a
// packed [n, k] weight of `format`: row i becomes column map[i] (map null: column first + i). Exact where source and format agree, else
// through fp32. Returns null, or a static message that says what is wrong (too short, non-finite scale or value, bad column).
const char* pack(Format format, uint8_t* dst, size_t dst_bytes, int64_t n, int64_t k, const uint8_t* src, size_t src_bytes, Source source,
                 int64_t rows, int64_t first, const int64_t* map);
// Fills a packed weight with zero weights (before pack, where columns or k are padded).
void pack_zero(Format format, uint8_t* dst, int64_t n, int64_t k);
// out[rows, k] fp32 <- source values. Same errors.
const char* dequantize(float* out, const uint8_t* src, size_t src_bytes, Source source, int64_t rows, int64_t k);

}  // namespace headrace

#ifdef HEADRACE_ISA
namespace headrace {
namespace HEADRACE_ISA {
#define HEADRACE_DECLARE(name, result, parameters) result name parameters;
HEADRACE_KERNELS(HEADRACE_DECLARE)
#undef HEADRACE_DECLARE
}  // namespace HEADRACE_ISA
}  // namespace headrace
#endif
