// fp32 q|k|v columns -> bf16 queries, and keys and values in the cache. Plain loops over elements, which the compiler vectorises: every level gives
// the same bits, because nothing here is summed but the norm, whose 16 lanes and tree are fixed.
//
// norm (Qwen3): lane j = sum of x[16i + j]^2 (fma, i ascending); tree j + (j+8), (j+4), (j+2), (j+1); y = (x * (1 / sqrt(sum / head_dim + eps))) *
// weight rotation of (a, b) = (y[d], y[d + rotary/2]): fma(a, cos, -(b * sin)), fma(b, cos, a * sin). Then rounded to bf16.
#include "kernels.h"
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int kMaxHeadDim = 256;

inline float inverse_rms(const float* x, int n, float eps) {
  float lane[16] = {};
  for (int i = 0; i < n; i += 16)
    for (int j = 0; j < 16; j++) lane[j] = __builtin_fmaf(x[i + j], x[i + j], lane[j]);
  for (int half = 8; half; half /= 2)
    for (int j = 0; j < half; j++) lane[j] += lane[j + half];
  return 1.0f / __builtin_sqrtf(lane[0] / static_cast<float>(n) + eps);
}

inline void rotate(float* y, const float* cos_sin, int half) {
  for (int d = 0; d < half; d++) {
    const float a = y[d], b = y[d + half], c = cos_sin[2 * d], s = cos_sin[2 * d + 1];
    y[d] = __builtin_fmaf(a, c, -(b * s));
    y[d + half] = __builtin_fmaf(b, c, a * s);
  }
}

inline void round_to_bf16(bf16* out, const float* x, int n) {
  for (int d = 0; d < n; d++) out[d] = to_bf16(x[d]);
}

// q or k head: normed, rotated, rounded.
inline void turn(const RopeKv& a, const float* x, const float* norm, int64_t position, bf16* out) {
  const int n = a.kv.head_dim, half = a.rope.rotary / 2;
  float y[kMaxHeadDim];
  if (norm) {
    const float scale = inverse_rms(x, n, a.eps);
    for (int d = 0; d < n; d++) y[d] = (x[d] * scale) * norm[d];
  } else {
    for (int d = 0; d < n; d++) y[d] = x[d];
  }
  rotate(y, a.rope.cos_sin + position * half * 2, half);
  round_to_bf16(out, y, n);
}

}  // namespace

void rope_kv(const RopeKv& a, const AttentionChunk& chunk, int64_t begin, int64_t end) {
  const int n = a.kv.head_dim, kv_heads = a.kv.kv_heads, heads = a.q_heads + 2 * kv_heads;
  bf16 y[kMaxHeadDim], y2[kMaxHeadDim];
  int64_t token = begin / heads;
  int head = static_cast<int>(begin % heads);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t position = chunk.start + token, row = chunk.row + token, in_block = position % kBlock;
    const float* x = a.qkv + row * a.ld_qkv;
    if (head < a.q_heads) {
      turn(a, x + a.q_offset + static_cast<int64_t>(head) * n, a.q_norm, position, a.q + (row * a.q_heads + head) * n);
    } else {
      const bool is_key = head < a.q_heads + kv_heads;
      const int h = head - a.q_heads - (is_key ? 0 : kv_heads);
      bf16* cache = a.kv.base + (static_cast<int64_t>(chunk.table[position / kBlock]) * kv_heads + h) * kv_head_elements(n);
      if (is_key) {
        turn(a, x + a.k_offset + static_cast<int64_t>(h) * n, a.k_norm, position, y);
        for (int d = 0; d < n; d += 2) std::memcpy(cache + d * kBlock + in_block * 2, y + d, 4);
      } else {
        // A token pair shares 32-bit words. Both tokens ours: whole words. Else 16-bit stores only, because the other half may be another thread's.
        const float* v = x + a.v_offset + static_cast<int64_t>(h) * n;
        bf16* out = cache + static_cast<int64_t>(kBlock) * n + in_block / 2 * n * 2;
        const bool odd = in_block % 2;
        if (!odd && unit + heads < end) {
          round_to_bf16(y, v, n);
          round_to_bf16(y2, v + a.ld_qkv, n);
          for (int d = 0; d < n; d++) {
            const uint32_t pair = y[d] | static_cast<uint32_t>(y2[d]) << 16;
            std::memcpy(out + 2 * d, &pair, 4);
          }
        } else if (!odd || unit - heads < begin) {
          round_to_bf16(y, v, n);
          for (int d = 0; d < n; d++) out[2 * d + odd] = y[d];
        }
      }
    }
    if (++head == heads) {
      head = 0;
      token++;
    }
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace
