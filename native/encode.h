// fp32 -> one column of a packed group: the rounding part of the packers. Each group of 32 on its own:
//   bf16  round to nearest even
//   q8_0  scale = fp16(absmax / 127); q = rne(x / scale), clamped to +-127
//   q4_1  min = fp16(min x), scale = fp16((max x - min x) / 15); u = rne((x - min) / scale), clamped to 0..15
//   q4_0  the usual rule, scale = extreme / -8 (the extreme keeps its sign and gets code 0), against least-squares scales from the codes that
//         a few other divisors give; whichever has the smaller squared error, the usual rule on a tie, so that what is q4_0 stays exact
// Scales are rounded to fp16 before the codes are chosen. A group of zeros has scale 0 and decodes to exact zeros.
// Where k ends inside a group the rest are zero weights; for q4_1 u = 0, which is `min` and not zero: activations are zero there.
#pragma once
#include "kernels.h"

// The scalar conversions of simd.h, under a name of their own.
#define HEADRACE_ISA packing
#define HEADRACE_LEVEL 0
#include "simd.h"

namespace headrace {
namespace {

using packing::bits_to_float;
using packing::float_to_bits;

constexpr const char* kLarge = "a value is too large for the format";

uint16_t load_u16(const uint8_t* p) {
  uint16_t u;
  std::memcpy(&u, p, 2);
  return u;
}
uint32_t load_u32(const uint8_t* p) {
  uint32_t u;
  std::memcpy(&u, p, 4);
  return u;
}
void store_u16(uint8_t* p, uint16_t u) { std::memcpy(p, &u, 2); }
void store_u32(uint8_t* p, uint32_t u) { std::memcpy(p, &u, 4); }
bool finite_fp16(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

// A mask instead of a branch, so that loops over it vectorize; exact also where subnormals are flushed.
inline float fp16_value(uint16_t h) {
  const uint32_t magnitude = h & 0x7fffu, sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t special = 0u - static_cast<uint32_t>(magnitude > 0x7bffu), small = 0u - static_cast<uint32_t>(magnitude < 0x400u);
  const uint32_t normal = (magnitude << 13) + 0x38000000u + (special & 0x38000000u);
  const uint32_t subnormal = float_to_bits(bits_to_float(magnitude | 0x3f000000u) - 0.5f);  // units of 2^-24
  return bits_to_float((normal & ~small) | (subnormal & small) | sign);
}

// Round to nearest even; 65520 and more become Inf.
uint16_t to_fp16(float f) {
  const uint32_t u = float_to_bits(f), a = u & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  if (a >= 0x47800000u) return static_cast<uint16_t>(sign | (a > 0x7f800000u ? 0x7e00u : 0x7c00u));
  if (a < 0x38800000u) return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000u));
  return static_cast<uint16_t>(sign | ((a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13));
}

// Four lanes in the compiler's own vectors: baseline instructions, whatever they are.
using Lanes = float __attribute__((vector_size(16)));
using Codes = int32_t __attribute__((vector_size(16)));

inline Lanes load(const float* v) {
  Lanes x;
  std::memcpy(&x, v, sizeof(x));
  return x;
}
// rint(x), which must lie in (-2^22, 2^22), held inside [lo, hi]: integers.
inline Lanes round_clamped(Lanes x, float lo, float hi) {
  x = (x + 12582912.0f) - 12582912.0f;
  const Lanes low = Lanes{} + lo, high = Lanes{} + hi;
  x = x < low ? low : x;
  return x > high ? high : x;
}
// Integers in lanes -> bytes.
inline void store_codes(Lanes x, int32_t zero, uint8_t* u) {
  const Codes c = __builtin_convertvector(x, Codes) + zero;
  for (int j = 0; j < 4; j++) u[j] = static_cast<uint8_t>(c[j]);
}
// Always in this order.
inline float total(Lanes x) { return (x[0] + x[2]) + (x[1] + x[3]); }

uint32_t absmax_bits(const float* v) {
  int32_t most = 0;
  for (int i = 0; i < kGroup; i++) {
    const int32_t a = static_cast<int32_t>(float_to_bits(v[i]) & 0x7fffffffu);
    most = a > most ? a : most;
  }
  return static_cast<uint32_t>(most);
}

using Encode = const char* (*)(const float* v, int count, uint8_t* record, int column);

void store_bytes(const uint8_t* u, uint8_t* body) {
  for (int q = 0; q < 8; q++) store_u32(body + 128 * q, load_u32(u + 4 * q));
}
void store_nibbles(const uint8_t* u, uint8_t* body) {
  for (int j = 0; j < 4; j++) store_u32(body + 128 * j, load_u32(u + 8 * j) | load_u32(u + 8 * j + 4) << 4);
}

const char* encode_bf16(const float* v, int, uint8_t* record, int column) {
  uint32_t h[kGroup], overflow = 0;
  for (int i = 0; i < kGroup; i++) {
    const uint32_t u = float_to_bits(v[i]);
    h[i] = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    overflow |= (h[i] & 0x7fffu) + 0x80u;  // carries into bit 15 where the exponent is all ones
  }
  if (overflow & 0x8000u) return kLarge;
  for (int p = 0; p < kGroup / 2; p++) store_u32(record + 128 * p + 4 * column, h[2 * p] | h[2 * p + 1] << 16);
  return nullptr;
}

const char* encode_q8_0(const float* v, int, uint8_t* record, int column) {
  const float absmax = bits_to_float(absmax_bits(v));
  uint16_t h = to_fp16(absmax / 127.0f);
  if (!finite_fp16(h)) return kLarge;
  if (h > 0 && absmax > 127.5f * fp16_value(h)) h++;  // a subnormal scale rounded down so far that the extreme would be clamped
  alignas(16) uint8_t u[kGroup];
  if (h) {
    const float scale = fp16_value(h);
    for (int i = 0; i < kGroup; i += 4) store_codes(round_clamped(load(v + i) / scale, -127.0f, 127.0f), 128, u + i);
  } else {
    std::memset(u, 128, kGroup);
  }
  store_u16(record + 2 * column, h);
  store_bytes(u, record + 64 + 4 * column);
  return nullptr;
}

const char* encode_q4_1(const float* v, int count, uint8_t* record, int column) {
  float x[kGroup];
  std::memcpy(x, v, sizeof(x));
  for (int i = count; i < kGroup; i++) x[i] = x[0];  // what pads the group does not widen its range
  Lanes low = load(x), high = low;
  for (int i = 4; i < kGroup; i += 4) {
    const Lanes y = load(x + i);
    low = y < low ? y : low;
    high = y > high ? y : high;
  }
  float lo = low[0], hi = high[0];
  for (int j = 1; j < 4; j++) {
    lo = low[j] < lo ? low[j] : lo;
    hi = high[j] > hi ? high[j] : hi;
  }
  const uint16_t h = to_fp16((hi - lo) / 15.0f), m = to_fp16(lo);
  if (!finite_fp16(h) || !finite_fp16(m)) return kLarge;
  alignas(16) uint8_t u[kGroup] = {};
  if (h) {
    const float scale = fp16_value(h), min = fp16_value(m);
    for (int i = 0; i < kGroup; i += 4) store_codes(round_clamped((load(x + i) - min) / scale, 0.0f, 15.0f), 0, u + i);
    std::memset(u + count, 0, static_cast<size_t>(kGroup - count));
  }
  store_u16(record + 2 * column, h);
  store_u16(record + 64 + 2 * column, m);
  store_nibbles(u, record + 128 + 4 * column);
  return nullptr;
}

inline Lanes q4_0_code(Lanes x, float inverse) { return round_clamped(x * inverse, -8.0f, 7.0f); }

float q4_0_error(const float* v, float scale, float inverse) {
  Lanes sum = {};
  for (int i = 0; i < kGroup; i += 4) {
    const Lanes x = load(v + i), e = x - q4_0_code(x, inverse) * scale;
    sum += e * e;
  }
  return total(sum);
}

// The scale that least squares gives the codes of x * inverse, and by how much those codes explain x.
float q4_0_fit(const float* v, float inverse, float* explained) {
  Lanes xq = {}, qq = {};
  for (int i = 0; i < kGroup; i += 4) {
    const Lanes x = load(v + i), q = q4_0_code(x, inverse);
    xq += x * q;
    qq += q * q;
  }
  const float product = total(xq), squares = total(qq);  // squares >= 49: the extreme has a code of -7 or -8
  *explained = product * (product / squares);
  return product / squares;
}

const char* encode_q4_0(const float* v, int, uint8_t* record, int column) {
  const uint32_t bits = absmax_bits(v);
  float extreme = 0;
  for (int i = 0; i < kGroup; i++)
    if ((float_to_bits(v[i]) & 0x7fffffffu) == bits) extreme = v[i];
  uint16_t h = to_fp16(extreme / -8.0f);
  if (!finite_fp16(h)) return kLarge;
  // Of a group below 1e-3 the fp16 scale is about to be subnormal: rounding it matters more than the choice.
  if (bits_to_float(bits) > 1e-3f) {
    float most = 0, scale = 0;
    for (float divisor = -9.0f; divisor <= -7.0f; divisor += 0.5f) {
      float explained;
      const float fitted = q4_0_fit(v, divisor / extreme, &explained);
      if (explained > most) {
        most = explained;
        scale = fitted;
      }
    }
    const uint16_t fitted = to_fp16(scale);
    const float usual = fp16_value(h), other = fp16_value(fitted);
    if (finite_fp16(fitted) && q4_0_error(v, other, 1.0f / other) < q4_0_error(v, usual, 1.0f / usual)) h = fitted;
  }
  const float scale = fp16_value(h);
  if (scale == 0) h = 0;  // not -0
  const float inverse = h ? 1.0f / scale : 0.0f;
  alignas(16) uint8_t u[kGroup];
  for (int i = 0; i < kGroup; i += 4) store_codes(q4_0_code(load(v + i), inverse), 8, u + i);
  store_u16(record + 2 * column, h);
  store_nibbles(u, record + 64 + 4 * column);
  return nullptr;
}

Encode encode_of(Format format) {
  switch (format) {
    case Format::q4_0:
      return encode_q4_0;
    case Format::q4_1:
      return encode_q4_1;
    case Format::q8_0:
      return encode_q8_0;
    case Format::bf16:
      return encode_bf16;
  }
  return nullptr;
}

}  // namespace
}  // namespace headrace
