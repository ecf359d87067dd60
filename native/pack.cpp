// Weights of a file -> packed panels. Baseline code: the compiler vectorizes the loops over a group, the rest is moving bytes.
//
// Exact: q4_0 -> q4_0, q4_1, q8_0; q4_1 -> q4_1; q8_0 -> q8_0; bf16 -> bf16. Everything else goes through fp32 and is rounded (encode.h).
#include "encode.h"

namespace headrace {
namespace {

constexpr const char* kShape = "the shape is not positive or too large";
constexpr const char* kWholeBlocks = "k is not a multiple of the 32 values a block holds";
constexpr const char* kShortSource = "the source is too short";
constexpr const char* kShortTarget = "the packed weight is too short";
constexpr const char* kColumn = "a column lies outside the packed weight";
constexpr const char* kUnknown = "unknown format or source type";
constexpr const char* kValue = "a value is not finite";
constexpr const char* kScale = "a scale is not finite";

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
