// A linear layer: dispatch on the weight format, and the epilogues every GEMM family ends in.
//
// Arithmetic, the same bits at every level:
//   store  t = y + bias (without a bias: y); out = t
//   add    t = y + bias;                     out = out + t
//   silu   g = gate + bias; u = up + bias;   h = (g / (1 + 2^(g * -log2 e))) * u, every operation rounded to fp32; then quantize.h
#include "linear.h"

#include "quantize.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

#if HEADRACE_LEVEL >= 2
inline Group biased(const float* tile, const float* bias) {
  const Group y = {{_mm512_load_ps(tile), _mm512_load_ps(tile + 16)}};
  if (!bias) return y;
  return {{_mm512_add_ps(y.v[0], _mm512_loadu_ps(bias)), _mm512_add_ps(y.v[1], _mm512_loadu_ps(bias + 16))}};
}
inline Group silu_mul(const Group& g, const Group& u) { return {{_mm512_mul_ps(silu_ps(g.v[0]), u.v[0]), _mm512_mul_ps(silu_ps(g.v[1]), u.v[1])}}; }
inline Group plus(const Group& x, const Group& y) { return {{_mm512_add_ps(x.v[0], y.v[0]), _mm512_add_ps(x.v[1], y.v[1])}}; }
inline void store(const Group& x, float* out) {
  _mm512_storeu_ps(out, x.v[0]);
  _mm512_storeu_ps(out + 16, x.v[1]);
}
#elif HEADRACE_LEVEL == 1
inline Group plus(const Group& x, const Group& y) {
  Group z;
  for (int i = 0; i < 4; i++) z.v[i] = _mm256_add_ps(x.v[i], y.v[i]);
  return z;
}
inline Group biased(const float* tile, const float* bias) { return bias ? plus(load_group(tile), load_group(bias)) : load_group(tile); }
inline Group silu_mul(const Group& g, const Group& u) {
  Group h;
  for (int i = 0; i < 4; i++) h.v[i] = _mm256_mul_ps(silu_ps(g.v[i]), u.v[i]);
  return h;
}
inline void store(const Group& x, float* out) {
  for (int i = 0; i < 4; i++) _mm256_storeu_ps(out + 8 * i, x.v[i]);
}
#else
inline Group plus(const Group& x, const Group& y) {
  Group z;
  for (int i = 0; i < kPanel; i++) z.v[i] = x.v[i] + y.v[i];
  return z;
}
inline Group biased(const float* tile, const float* bias) { return bias ? plus(load_group(tile), load_group(bias)) : load_group(tile); }
inline Group silu_mul(const Group& g, const Group& u) {
  Group h;
  for (int i = 0; i < kPanel; i++) h.v[i] = silu_f32(g.v[i]) * u.v[i];
  return h;
}
inline void store(const Group& x, float* out) { std::memcpy(out, x.v, sizeof(x.v)); }
#endif

// The last panel of a layer whose n is no multiple of 32: nothing past `columns` is touched.
void finish_columns(bool add, float* out, const float* bias, const float* y, int columns) {
  for (int c = 0; c < columns; c++) {
    const float t = bias ? y[c] + bias[c] : y[c];
    out[c] = add ? out[c] + t : t;
  }
}

#if HEADRACE_AMX
// Fewer rows leave too much of a tile empty. Bytes need no unpacking elsewhere, so they gain less and later.
inline bool tiles_pay(const Linear& a) { return a.rows >= (a.format == Format::q8_0 ? 128 : 24); }
#endif

}  // namespace

void linear(const Linear& a, int64_t begin, int64_t end) {
  if (a.format == Format::bf16) {
    linear_bf16(a, begin, end);
#if HEADRACE_AMX
  } else if (tiles_pay(a)) {
    linear_amx(a, begin, end);
#endif
  } else {
    linear_int(a, begin, end);
  }
}

void finish_tile(const Linear& a, int64_t row, int rows, int64_t panel, const float* tile) {
  const int64_t first = panel * kPanel, columns = a.n - first;
  const bool add = a.epilogue == Epilogue::add;
  float* out = a.out + row * a.ld_out + first;
  const float* bias = a.bias ? a.bias + first : nullptr;
  for (int r = 0; r < rows; r++, out += a.ld_out, tile += kPanel) {
    if (columns < kPanel) {
      finish_columns(add, out, bias, tile, static_cast<int>(columns));
    } else if (add) {
      store(plus(load_group(out), biased(tile, bias)), out);
    } else {
      store(biased(tile, bias), out);
    }
  }
}

void finish_pair(const Linear& a, int64_t row, int rows, int64_t pair, const float* gate, const float* up) {
  const float* gate_bias = a.bias ? a.bias + 2 * pair * kPanel : nullptr;
  const float* up_bias = a.bias ? gate_bias + kPanel : nullptr;
  const auto h = [&](int r) { return silu_mul(biased(gate + r * kPanel, gate_bias), biased(up + r * kPanel, up_bias)); };
  int r = 0;
  for (; r + 3 <= rows; r += 3) {
    const Group x[3] = {h(r), h(r + 1), h(r + 2)};
    store_rows(a.act_out, row + r, pair, x);
  }
  for (; r < rows; r++) store_group(a.act_out, row + r, pair, h(r));
}

}  // namespace HEADRACE_ISA
}  // namespace headrace
