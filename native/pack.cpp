// Weights of a file -> packed panels. Baseline code: the compiler vectorizes the loops over a group, the rest is moving bytes.
//
// Exact: q4_0 -> q4_0, q4_1, q8_0; q4_1 -> q4_1; q8_0 -> q8_0; bf16 -> bf16. Everything else goes through fp32 and is rounded here, each group
// of 32 on its own:
//   bf16  round to nearest even
//   q8_0  scale = fp16(absmax / 127); q = rne(x / scale), clamped to +-127
//   q4_1  min = fp16(min x), scale = fp16((max x - min x) / 15); u = rne((x - min) / scale), clamped to 0..15
//   q4_0  the usual rule, scale = extreme / -8 (the extreme keeps its sign and gets code 0), against least-squares scales from the codes that
//         a few other divisors give; whichever has the smaller squared error, the usual rule on a tie, so that what is q4_0 stays exact
// Scales are rounded to fp16 before the codes are chosen. A group of zeros has scale 0 and decodes to exact zeros.
// Where k ends inside a group the rest are zero weights; for q4_1 u = 0, which is `min` and not zero: activations are zero there.
#include "kernels.h"

// The scalar conversions of simd.h, under a name of their own.
#define HEADRACE_ISA packing
#define HEADRACE_LEVEL 0
#include "simd.h"

namespace headrace {
namespace {

using packing::bits_to_float;
using packing::float_to_bits;
using packing::to_bf16;

constexpr const char* kShape = "the shape is not positive or too large";
constexpr const char* kWholeBlocks = "k is not a multiple of the 32 values a block holds";
constexpr const char* kShortSource = "the source is too short";
constexpr const char* kShortTarget = "the packed weight is too short";
constexpr const char* kColumn = "a column lies outside the packed weight";
constexpr const char* kUnknown = "unknown format or source type";
constexpr const char* kValue = "a value is not finite";
constexpr const char* kScale = "a scale is not finite";
constexpr const char* kLarge = "a value is too large for the format";

constexpr int64_t kMaxSize = int64_t{1} << 40;  // of n, k and rows: a row of any format stays below 2^48 bytes

struct Block {
  int values;
  size_t bytes;
};

Block block_of(Source source) {
  switch (source) {
    case Source::f32:
      return {1, 4};
    case Source::f16:
      return {1, 2};
    case Source::bf16:
      return {1, 2};
    case Source::q4_0:
      return {32, 18};
    case Source::q4_1:
      return {32, 20};
    case Source::q8_0:
      return {32, 34};
  }
  return {0, 0};
}

bool is_format(Format f) { return f == Format::q4_0 || f == Format::q4_1 || f == Format::q8_0 || f == Format::bf16; }

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

// ---- one group of a source as fp32: `count` values (32 but at the end of a row), zeros after them --------------------------------------

using Decode = void (*)(const uint8_t* block, int count, float* v);

void decode_f32(const uint8_t* block, int count, float* v) {
  std::memset(v + count, 0, sizeof(float) * static_cast<size_t>(kGroup - count));
  std::memcpy(v, block, sizeof(float) * static_cast<size_t>(count));
}
void decode_f16(const uint8_t* block, int count, float* v) {
  uint16_t h[kGroup] = {};
  std::memcpy(h, block, 2 * static_cast<size_t>(count));
  for (int i = 0; i < kGroup; i++) v[i] = fp16_value(h[i]);
}
void decode_bf16(const uint8_t* block, int count, float* v) {
  uint16_t h[kGroup] = {};
  std::memcpy(h, block, 2 * static_cast<size_t>(count));
  for (int i = 0; i < kGroup; i++) v[i] = bits_to_float(static_cast<uint32_t>(h[i]) << 16);
}
void decode_q4_0(const uint8_t* block, int, float* v) {
  const float scale = fp16_value(load_u16(block));
  for (int i = 0; i < 16; i++) {
    v[i] = scale * static_cast<float>((block[2 + i] & 15) - 8);
    v[16 + i] = scale * static_cast<float>((block[2 + i] >> 4) - 8);
  }
}
void decode_q4_1(const uint8_t* block, int, float* v) {
  const float scale = fp16_value(load_u16(block)), min = fp16_value(load_u16(block + 2));
  for (int i = 0; i < 16; i++) {
    v[i] = scale * static_cast<float>(block[4 + i] & 15) + min;
    v[16 + i] = scale * static_cast<float>(block[4 + i] >> 4) + min;
  }
}
void decode_q8_0(const uint8_t* block, int, float* v) {
  const float scale = fp16_value(load_u16(block));
  int8_t q[kGroup];
  std::memcpy(q, block + 2, kGroup);
  for (int i = 0; i < kGroup; i++) v[i] = scale * static_cast<float>(q[i]);
}

Decode decode_of(Source source) {
  switch (source) {
    case Source::f32:
      return decode_f32;
    case Source::f16:
      return decode_f16;
    case Source::bf16:
      return decode_bf16;
    case Source::q4_0:
      return decode_q4_0;
    case Source::q4_1:
      return decode_q4_1;
    case Source::q8_0:
      return decode_q8_0;
  }
  return nullptr;
}

// ---- fp32 -> one column of a packed group -------------------------------------------------------------------------------------------

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

// ---- exact moves: one source block -> one column of a packed group -------------------------------------------------------------------

using Move = const char* (*)(const uint8_t* block, int count, uint8_t* record, int column);

// A file's byte i holds k = i (low) and k = 16 + i (high); ours k = 8j + i and k = 8j + 4 + i.
void move_nibbles(const uint8_t* from, uint8_t* body) {
  constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
  const uint32_t a = load_u32(from), b = load_u32(from + 4), c = load_u32(from + 8), d = load_u32(from + 12);
  store_u32(body, (a & kLow) | (b & kLow) << 4);
  store_u32(body + 128, (c & kLow) | (d & kLow) << 4);
  store_u32(body + 256, ((a >> 4) & kLow) | (b & kHigh));
  store_u32(body + 384, ((c >> 4) & kLow) | (d & kHigh));
}

const char* move_q4_0(const uint8_t* block, int, uint8_t* record, int column) {
  const uint16_t scale = load_u16(block);
  if (!finite_fp16(scale)) return kScale;
  store_u16(record + 2 * column, scale);
  move_nibbles(block + 2, record + 64 + 4 * column);
  return nullptr;
}
const char* move_q4_1(const uint8_t* block, int, uint8_t* record, int column) {
  const uint16_t scale = load_u16(block), min = load_u16(block + 2);
  if (!finite_fp16(scale) || !finite_fp16(min)) return kScale;
  store_u16(record + 2 * column, scale);
  store_u16(record + 64 + 2 * column, min);
  move_nibbles(block + 4, record + 128 + 4 * column);
  return nullptr;
}
const char* move_q8_0(const uint8_t* block, int, uint8_t* record, int column) {
  const uint16_t scale = load_u16(block);
  if (!finite_fp16(scale)) return kScale;
  store_u16(record + 2 * column, scale);
  for (int q = 0; q < 8; q++) store_u32(record + 64 + 128 * q + 4 * column, load_u32(block + 2 + 4 * q) ^ 0x80808080u);
  return nullptr;
}
const char* move_bf16(const uint8_t* block, int count, uint8_t* record, int column) {
  uint32_t pair[kGroup / 2] = {};
  std::memcpy(pair, block, 2 * static_cast<size_t>(count));
  uint32_t hit = 0;  // the carry out of an exponent of all ones
  for (int p = 0; p < kGroup / 2; p++) hit |= ((pair[p] & 0x7fff7fffu) + 0x00800080u) & 0x80008000u;
  if (hit) return kValue;
  for (int p = 0; p < kGroup / 2; p++) store_u32(record + 128 * p + 4 * column, pair[p]);
  return nullptr;
}
const char* move_q4_0_to_q8_0(const uint8_t* block, int, uint8_t* record, int column) {
  const uint16_t scale = load_u16(block);
  if (!finite_fp16(scale)) return kScale;
  alignas(16) uint8_t u[kGroup];
  for (int i = 0; i < 16; i++) {
    u[i] = static_cast<uint8_t>((block[2 + i] & 15) + 120);
    u[16 + i] = static_cast<uint8_t>((block[2 + i] >> 4) + 120);
  }
  store_u16(record + 2 * column, scale);
  store_bytes(u, record + 64 + 4 * column);
  return nullptr;
}
const char* move_q4_0_to_q4_1(const uint8_t* block, int, uint8_t* record, int column) {
  const uint16_t scale = load_u16(block), min = to_fp16(-8.0f * fp16_value(scale));
  if (!finite_fp16(scale)) return kScale;
  if (!finite_fp16(min)) return kLarge;
  store_u16(record + 2 * column, scale);
  store_u16(record + 64 + 2 * column, min);
  move_nibbles(block + 2, record + 128 + 4 * column);
  return nullptr;
}

Move move_of(Format format, Source source) {
  if (format == Format::bf16 && source == Source::bf16) return move_bf16;
  if (format == Format::q8_0 && source == Source::q8_0) return move_q8_0;
  if (format == Format::q4_1 && source == Source::q4_1) return move_q4_1;
  if (source == Source::q4_0)
    return format == Format::q4_0 ? move_q4_0 : format == Format::q4_1 ? move_q4_0_to_q4_1 : format == Format::q8_0 ? move_q4_0_to_q8_0 : nullptr;
  return nullptr;
}

// Bytes of a source row of k values, or what is wrong with it. k <= 2^40: no overflow.
const char* row_bytes(Source source, int64_t rows, int64_t k, size_t src_bytes, size_t* bytes) {
  const Block block = block_of(source);
  if (!block.values) return kUnknown;
  if (rows < 0 || k < 1 || rows > kMaxSize || k > kMaxSize) return kShape;
  if (k % block.values) return kWholeBlocks;
  *bytes = static_cast<size_t>(k / block.values) * block.bytes;
  return static_cast<size_t>(rows) > src_bytes / *bytes ? kShortSource : nullptr;
}

}  // namespace

const char* pack(Format format, uint8_t* dst, size_t dst_bytes, int64_t n, int64_t k, const uint8_t* src, size_t src_bytes, Source source,
                 int64_t rows, int64_t first, const int64_t* map) {
  if (!is_format(format)) return kUnknown;
  size_t source_row = 0;
  if (const char* error = row_bytes(source, rows, k, src_bytes, &source_row)) return error;
  if (n < 1 || n > kMaxSize) return kShape;
  const int64_t groups = (k - 1) / kGroup + 1;
  const size_t panel_bytes = static_cast<size_t>(groups) * group_bytes(format);
  if (static_cast<size_t>((n - 1) / kPanel + 1) > dst_bytes / panel_bytes) return kShortTarget;
  if (map) {
    for (int64_t i = 0; i < rows; i++)
      if (map[i] < 0 || map[i] >= n) return kColumn;
  } else if (first < 0 || first > n || rows > n - first) {
    return kColumn;
  }

  const Move move = move_of(format, source);
  const Decode decode = decode_of(source);
  const Encode encode = encode_of(format);
  const size_t group_source = kGroup / static_cast<size_t>(block_of(source).values) * block_of(source).bytes;
  // Rows of one panel are packed together, a few groups at a time: the lines they share stay in the first-level cache.
  constexpr int64_t kStride = 8;
  for (int64_t begin = 0, end; begin < rows; begin = end) {
    const int64_t panel = (map ? map[begin] : first + begin) / kPanel;
    for (end = begin + 1; end < rows && end - begin < kPanel && (map ? map[end] : first + end) / kPanel == panel;) end++;
    uint8_t* base = dst + static_cast<size_t>(panel) * panel_bytes;
    for (int64_t start = 0; start < groups; start += kStride) {
      const int64_t stop = groups - start < kStride ? groups : start + kStride;
      for (int64_t i = begin; i < end; i++) {
        const int column = static_cast<int>((map ? map[i] : first + i) % kPanel);
        const uint8_t* block = src + static_cast<size_t>(i) * source_row + static_cast<size_t>(start) * group_source;
        uint8_t* record = base + static_cast<size_t>(start) * group_bytes(format);
        for (int64_t g = start; g < stop; g++, block += group_source, record += group_bytes(format)) {
          const int count = k - g * kGroup < kGroup ? static_cast<int>(k - g * kGroup) : kGroup;
          const char* error = nullptr;
          if (move) {
            error = move(block, count, record, column);
          } else {
            alignas(16) float v[kGroup];
            decode(block, count, v);
            error = absmax_bits(v) >= 0x7f800000u ? kValue : encode(v, count, record, column);
          }
          if (error) return error;
        }
      }
    }
  }
  return nullptr;
}

void pack_zero(Format format, uint8_t* dst, int64_t n, int64_t k) {
  if (!is_format(format)) return;
  const size_t bytes = packed_bytes(format, n, k), record = group_bytes(format);
  std::memset(dst, 0, bytes);
  if (format != Format::q4_0 && format != Format::q8_0) return;
  for (size_t at = 0; at < bytes; at += record) std::memset(dst + at + 64, format == Format::q4_0 ? 0x88 : 0x80, record - 64);
}

const char* dequantize(float* out, const uint8_t* src, size_t src_bytes, Source source, int64_t rows, int64_t k) {
  size_t source_row = 0;
  if (const char* error = row_bytes(source, rows, k, src_bytes, &source_row)) return error;
  const Decode decode = decode_of(source);
  const size_t group_source = kGroup / static_cast<size_t>(block_of(source).values) * block_of(source).bytes;
  for (int64_t i = 0; i < rows; i++, src += source_row, out += k)
    for (int64_t at = 0; at < k; at += kGroup) {
      const int count = k - at < kGroup ? static_cast<int>(k - at) : kGroup;
      alignas(16) float v[kGroup];
      decode(src + static_cast<size_t>(at / kGroup) * group_source, count, v);
      if (absmax_bits(v) >= 0x7f800000u) return kValue;
      std::memcpy(out + at, v, sizeof(float) * static_cast<size_t>(count));
    }
  return nullptr;
}

}  // namespace headrace
