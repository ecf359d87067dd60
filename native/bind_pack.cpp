// The packers' Python front: names and sizes are checked here, the data by the packers themselves; the GIL is free while they run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bind.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

struct Name {
  const char* name;
  int64_t number;
};
constexpr Name kFormats[] = {{"q4_0", 0}, {"q4_1", 1}, {"q8_0", 2}, {"bf16", 3}};
constexpr Name kSources[] = {{"f32", 0}, {"f16", 1}, {"q4_0", 2}, {"q4_1", 3}, {"q8_0", 8}, {"bf16", 30}};
constexpr int64_t kMaxSize = int64_t{1} << 40;  // of n, k, rows

[[noreturn]] void fail(const char* where, const std::string& what) { throw nb::value_error(("[" + std::string(where) + "] " + what).c_str()); }

// A format or source type by name or number.
template <typename T, size_t N>
T named(const char* where, const char* what, const Name (&names)[N], nb::handle value) {
  std::string name, known;
  int64_t number = 0;
  const bool is_name = nb::try_cast(value, name), is_number = !is_name && nb::try_cast(value, number);
  for (const Name& n : names) {
    if ((is_name && name == n.name) || (is_number && number == n.number)) return static_cast<T>(n.number);
    known += std::string(known.empty() ? "" : ", ") + n.name + " (" + std::to_string(n.number) + ")";
  }
  fail(where, std::string(what) + ": expected one of " + known + ", got " + nb::repr(value).c_str());
}

headrace::Format format_of(const char* where, nb::handle value) { return named<headrace::Format>(where, "format", kFormats, value); }
headrace::Source source_of(const char* where, nb::handle value) { return named<headrace::Source>(where, "source", kSources, value); }

void check_shape(const char* where, int64_t n, int64_t k) {
  if (n < 1 || k < 1 || n > kMaxSize || k > kMaxSize || n > kMaxSize / k)
    fail(where, "shape: expected positive numbers of at most 2^40 weights in all, got [" + std::to_string(n) + ", " + std::to_string(k) + "]");
}

// Contiguous bytes for the time of a call: any object with a buffer, or a pair (address, number of bytes).
class Memory {
 public:
  Memory(const char* where, const char* what, nb::handle object, bool writable) {
    if (nb::isinstance<nb::tuple>(object)) {
      uint64_t address = 0;
      int64_t bytes = 0;
      const nb::tuple pair = nb::borrow<nb::tuple>(object);
      if (pair.size() != 2 || !nb::try_cast(pair[0], address) || !nb::try_cast(pair[1], bytes) || address == 0 || bytes < 0)
        fail(where, std::string(what) + ": expected (address, number of bytes), got " + nb::repr(object).c_str());
      data_ = reinterpret_cast<uint8_t*>(address);
      size_ = static_cast<size_t>(bytes);
      return;
    }
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      nb::python_error reason;
      fail(where, std::string(what) + ": expected contiguous " + (writable ? "writable " : "") + "bytes: " + reason.what());
    }
    held_ = true;
    data_ = static_cast<uint8_t*>(view_.buf);
    size_ = static_cast<size_t>(view_.len);
  }
  ~Memory() {
    if (held_) PyBuffer_Release(&view_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  Py_buffer view_ = {};
  bool held_ = false;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

using Map = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void pack(nb::handle format, nb::handle dst, int64_t n, int64_t k, nb::handle src, nb::handle source, int64_t rows, int64_t first,
          const std::optional<Map>& map) {
  const headrace::Format f = format_of("pack", format);
  const headrace::Source s = source_of("pack", source);
  check_shape("pack", n, k);
  if (map && static_cast<int64_t>(map->shape(0)) != rows)
    fail("pack", "map: expected " + std::to_string(rows) + " columns, got " + std::to_string(map->shape(0)));
  const Memory to("pack", "dst", dst, true), from("pack", "src", src, false);
  const char* error;
  {
    nb::gil_scoped_release unlocked;
    error = headrace::pack(f, to.data(), to.size(), n, k, from.data(), from.size(), s, rows, first, map ? map->data() : nullptr);
  }
  if (error)
    fail("pack", std::string(error) + " (" + std::to_string(rows) + " rows of " + std::to_string(k) + " in " + std::to_string(from.size()) +
                     " bytes into [" + std::to_string(n) + ", " + std::to_string(k) + "] in " + std::to_string(to.size()) + " bytes)");
}

void pack_zero(nb::handle format, nb::handle dst, int64_t n, int64_t k) {
  const headrace::Format f = format_of("pack_zero", format);
  check_shape("pack_zero", n, k);
  const Memory to("pack_zero", "dst", dst, true);
  if (to.size() < headrace::packed_bytes(f, n, k))
    fail("pack_zero", "dst: expected " + std::to_string(headrace::packed_bytes(f, n, k)) + " bytes, got " + std::to_string(to.size()));
  nb::gil_scoped_release unlocked;
  headrace::pack_zero(f, to.data(), n, k);
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> dequantize(nb::handle src, nb::handle source, int64_t rows, int64_t k) {
  const headrace::Source s = source_of("dequantize", source);
  if (rows < 0 || k < 1 || k > kMaxSize || rows > kMaxSize / k)
    fail("dequantize",
         "shape: expected positive numbers of at most 2^40 values in all, got [" + std::to_string(rows) + ", " + std::to_string(k) + "]");
  const Memory from("dequantize", "src", src, false);
  // Every source type takes at least half a byte a value: this bounds the allocation by what the caller has.
  if (rows && static_cast<uint64_t>(rows) > from.size() * 2 / static_cast<uint64_t>(k)) fail("dequantize", "the source is too short");
  float* out = new float[static_cast<size_t>(rows) * static_cast<size_t>(k)];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  const char* error;
  {
    nb::gil_scoped_release unlocked;
    error = headrace::dequantize(out, from.data(), from.size(), s, rows, k);
  }
  if (error) fail("dequantize", error);
  return {out, {static_cast<size_t>(rows), static_cast<size_t>(k)}, owner};
}

size_t packed_bytes(nb::handle format, int64_t n, int64_t k) {
  const headrace::Format f = format_of("packed_bytes", format);
  check_shape("packed_bytes", n, k);
  return headrace::packed_bytes(f, n, k);
}

}  // namespace

void bind_pack(nb::module_& m) {
  m.def("packed_bytes", packed_bytes, "format"_a, "n"_a, "k"_a, "Bytes of a packed [n, k] weight.");
  m.def("pack", pack, "format"_a, "dst"_a, "n"_a, "k"_a, "src"_a, "source"_a, "rows"_a, "first"_a = 0, "map"_a.noconvert() = nb::none(),
        "Pack `rows` rows of k values of type `source` (a name or GGUF's number) as columns of a packed [n, k] weight: row i becomes column\n"
        "map[i] (int64), or first + i without a map. dst and src are buffers or pairs (address, bytes). Calls that write different columns may\n"
        "run at the same time. Raises ValueError; dst may then hold part of the rows.");
  m.def("pack_zero", pack_zero, "format"_a, "dst"_a, "n"_a, "k"_a, "Fill a packed weight with zero weights.");
  m.def("dequantize", dequantize, "src"_a, "source"_a, "rows"_a, "k"_a, "Source values as a float32 array [rows, k]. Raises ValueError.");
}
