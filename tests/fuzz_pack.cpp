// Mutation fuzz of the packers: hostile shapes, sizes, maps and bytes, in buffers of exactly the size that is claimed, so that the address
// sanitizer sees any access past them. Built and run by test_pack.py: fuzz_pack SEED ROUNDS.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels.h"

using headrace::Format;
using headrace::Source;

namespace {

std::mt19937_64 rng;

int64_t below(int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); }

template <typename T, size_t N>
T one_of(const T (&items)[N]) {
  return items[below(N)];
}

// Usually what fits, sometimes anything.
int64_t size(int64_t usual) {
  const int64_t wild[] = {0, -1, INT64_MIN, INT64_MAX, INT64_MAX - 31, int64_t{1} << 62, (int64_t{1} << 40) + 1, int64_t{1} << 40, int64_t{1} << 32};
  return below(12) ? 1 + below(usual) : one_of(wild);
}

struct Buffer {
  explicit Buffer(size_t bytes) : data(static_cast<uint8_t*>(std::malloc(bytes ? bytes : 1))), bytes(bytes) {}
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  uint8_t* data;
  size_t bytes;
};

void fill(Buffer& b) {
  const int64_t style = below(4);
  for (size_t i = 0; i < b.bytes; i++) b.data[i] = static_cast<uint8_t>(style == 0 ? 0 : style == 1 ? 0xff : rng());
  if (style == 2)  // exponents that are finite in every type: the encoders get past the check of values
    for (size_t i = 1; i < b.bytes; i += 2) b.data[i] = static_cast<uint8_t>(0x20 + below(24) + 128 * below(2));
}

size_t source_row(Source s, int64_t k) {
  if (k < 1 || k > 4096) return 0;
  const size_t n = static_cast<size_t>(k);
  switch (s) {
    case Source::f32:
      return 4 * n;
    case Source::f16:
    case Source::bf16:
      return 2 * n;
    case Source::q4_0:
      return n / 32 * 18;
    case Source::q4_1:
      return n / 32 * 20;
    case Source::q8_0:
      return n / 32 * 34;
  }
  return 0;
}

[[noreturn]] void wrong(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  rng.seed(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0);
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 1000;
  const Format formats[] = {Format::q4_0, Format::q4_1, Format::q8_0, Format::bf16, static_cast<Format>(7)};
  const Source sources[] = {Source::f32, Source::f16, Source::q4_0, Source::q4_1, Source::q8_0, Source::bf16, static_cast<Source>(5)};
  long accepted = 0, refused = 0;
  for (int round = 0; round < rounds; round++) {
    const Format format = formats[below(20) ? below(4) : 4];
    const Source source = sources[below(20) ? below(6) : 6];
    const int64_t n = size(100), k = below(2) ? size(300) : 32 * (1 + below(10)), rows = size(80), first = below(3) ? 0 : size(100);
    const bool sane = n > 0 && n < 1000 && k > 0 && k < 4096 && rows > 0 && rows < 1000;
    size_t source_bytes = sane ? static_cast<size_t>(rows) * source_row(source, k) : static_cast<size_t>(below(4096));
    size_t packed = sane ? headrace::packed_bytes(format, n, k) : static_cast<size_t>(below(65536));
    if (!below(10)) source_bytes -= source_bytes ? 1 : 0;
    if (!below(10)) packed -= packed ? 1 : 0;
    Buffer src(source_bytes), dst(packed);
    fill(src);
    std::memset(dst.data, 0, dst.bytes);
    if (sane && dst.bytes == headrace::packed_bytes(format, n, k)) headrace::pack_zero(format, dst.data, n, k);
    std::vector<int64_t> map;
    const bool mapped = rows > 0 && rows < 1000 && below(3) == 0;
    if (mapped) {
      map.resize(static_cast<size_t>(rows));
      for (int64_t& column : map) column = sane ? below(n) : below(100);
      if (!below(6)) map[static_cast<size_t>(below(rows))] = below(2) ? n : -1;
      map.shrink_to_fit();
    }
    const char* error = headrace::pack(format, dst.data, dst.bytes, n, k, src.data, src.bytes, source, rows, first, mapped ? map.data() : nullptr);
    error ? refused++ : accepted++;
    if (rows > 0 && rows <= 80 && k > 0 && k < 4096) {
      const size_t values = static_cast<size_t>(rows) * static_cast<size_t>(k);
      std::unique_ptr<float[]> out(new float[values]);
      error = headrace::dequantize(out.get(), src.data, src.bytes, source, rows, k);
      for (size_t i = 0; !error && i < values; i++)
        if (!std::isfinite(out[i])) wrong("dequantize accepted a value that is not finite");
    } else {
      float none[1];
      if (!headrace::dequantize(none, src.data, src.bytes, source, rows, k) && rows > 0) wrong("dequantize accepted a shape the source cannot hold");
    }
  }
  std::printf("%ld accepted, %ld refused\n", accepted, refused);
  return accepted > rounds / 10 && refused > rounds / 10 ? 0 : 1;
}
