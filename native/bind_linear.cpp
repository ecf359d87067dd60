// One linear layer on numpy buffers, for tests: every size is checked here, the kernels check nothing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "bind.h"
#include "kernels.h"

void bind_bench(nanobind::module_& m);  // bench.cpp

namespace nb = nanobind;

namespace headrace {
namespace {

template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;
template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& name, const std::string& expected, const std::string& got) {
  throw nb::value_error(("[linear] " + name + ": expected " + expected + ", got " + got).c_str());
}

// Pointer to a matrix of at least rows x columns whose rows are contiguous; `ld` receives their stride, or checks it where already set.
template <typename T>
T* take(const std::optional<Matrix<T>>& m, const std::string& name, int64_t rows, int64_t columns, int64_t& ld) {
  if (!m) refuse(name, "an array", "None");
  const int64_t have_rows = static_cast<int64_t>(m->shape(0)), have_columns = static_cast<int64_t>(m->shape(1));
  if (have_rows < rows || have_columns < columns)
    refuse(name, "at least [" + std::to_string(rows) + ", " + std::to_string(columns) + "]",
           "[" + std::to_string(have_rows) + ", " + std::to_string(have_columns) + "]");
  if (have_columns > 1 && m->stride(1) != 1) refuse(name, "contiguous rows", "a column stride of " + std::to_string(m->stride(1)));
  const int64_t stride = have_rows > 1 ? m->stride(0) : have_columns;
  if (stride < columns) refuse(name, "a row stride of at least " + std::to_string(columns), std::to_string(stride));
  if (ld && ld != stride) refuse(name, "the row stride of scale, " + std::to_string(ld), std::to_string(stride));
  ld = stride;
  return m->data();
}

using Q = std::optional<Matrix<int8_t>>;
using F = std::optional<Matrix<float>>;
using I = std::optional<Matrix<int32_t>>;
using B = std::optional<Matrix<uint16_t>>;

void take_int(Activations& act, const std::string& prefix, int64_t rows, int64_t k, const Q& q, const F& scale, const I& corr, const F& sum) {
  const int64_t groups = (k + kGroup - 1) / kGroup;
  act.q = take(q, prefix + "q", rows, k, act.ldq);
  act.scale = take(scale, prefix + "scale", rows, groups, act.ldg);
  act.corr = take(corr, prefix + "corr", rows, groups, act.ldg);
  act.sum = take(sum, prefix + "sum", rows, groups, act.ldg);
}

void run_linear(int format, const Vector<const uint8_t>& weight, int64_t n, int64_t k, int64_t rows, int epilogue, const Q& q, const F& scale,
                const I& corr, const F& sum, const B& b, const F& out, const std::optional<Vector<const float>>& bias, const Q& out_q,
                const F& out_scale, const I& out_corr, const F& out_sum, const B& out_b, std::optional<int64_t> begin, std::optional<int64_t> end) {
  if (format < 0 || format > 3) refuse("format", "0 (q4_0), 1 (q4_1), 2 (q8_0) or 3 (bf16)", std::to_string(format));
  if (epilogue < 0 || epilogue > 2) refuse("epilogue", "0 (store), 1 (add) or 2 (silu_mul)", std::to_string(epilogue));
  if (k <= 0 || k % kGroup || k > (int64_t{1} << 24)) refuse("k", "a positive multiple of 32, at most 2^24", std::to_string(k));
  if (n <= 0 || n > (int64_t{1} << 31)) refuse("n", "1 to 2^31", std::to_string(n));
  if (rows < 0) refuse("rows", "0 or more", std::to_string(rows));
  Linear a = {};
  a.format = static_cast<Format>(format);
  a.epilogue = static_cast<Epilogue>(epilogue);
  a.n = n, a.k = k, a.rows = rows;
  const bool pairs = a.epilogue == Epilogue::silu_mul;
  if (pairs && n % (2 * kPanel)) refuse("n", "a multiple of 64 under silu_mul", std::to_string(n));
  if (weight.size() != packed_bytes(a.format, n, k))
    refuse("weight", std::to_string(packed_bytes(a.format, n, k)) + " bytes", std::to_string(weight.size()));
  a.weight = weight.data();
  if (reinterpret_cast<uintptr_t>(a.weight) % 64)
    refuse("weight", "an address that is a multiple of 64", std::to_string(reinterpret_cast<uintptr_t>(a.weight) % 64) + " past one");
  if (a.format == Format::bf16) {
    a.in.b = take(b, "b", rows, k, a.in.ldb);
  } else {
    take_int(a.in, "", rows, k, q, scale, corr, sum);
  }
  if (pairs) {
    if (!out_q && !out_b) refuse("out_q", "out_q or out_b", "None");
    if (out_q) take_int(a.act_out, "out_", rows, n / 2, out_q, out_scale, out_corr, out_sum);
    if (out_b) a.act_out.b = take(out_b, "out_b", rows, n / 2, a.act_out.ldb);
  } else {
    a.out = take(out, "out", rows, n, a.ld_out);
  }
  if (bias) {
    if (static_cast<int64_t>(bias->size()) != n) refuse("bias", std::to_string(n) + " values", std::to_string(bias->size()));
    a.bias = bias->data();
  }
  const int64_t units = pairs ? n / (2 * kPanel) : (n + kPanel - 1) / kPanel, first = begin.value_or(0), last = end.value_or(units);
  if (first < 0 || last > units || first > last)
    refuse("begin, end", "0 <= begin <= end <= " + std::to_string(units), std::to_string(first) + ", " + std::to_string(last));
  nb::gil_scoped_release release;
  if (rows > 0) kernels().linear(a, first, last);
}

}  // namespace
}  // namespace headrace

void bind_linear(nb::module_& m) {
  const nb::object none = nb::none();
  m.def(
      "linear", &headrace::run_linear, nb::arg("format"), nb::arg("weight").noconvert(), nb::arg("n"), nb::arg("k"), nb::arg("rows"),
      nb::arg("epilogue"), nb::arg("q").noconvert() = none, nb::arg("scale").noconvert() = none, nb::arg("corr").noconvert() = none,
      nb::arg("sum").noconvert() = none, nb::arg("b").noconvert() = none, nb::arg("out").noconvert() = none, nb::arg("bias").noconvert() = none,
      nb::arg("out_q").noconvert() = none, nb::arg("out_scale").noconvert() = none, nb::arg("out_corr").noconvert() = none,
      nb::arg("out_sum").noconvert() = none, nb::arg("out_b").noconvert() = none, nb::arg("begin") = none, nb::arg("end") = none,
      "One linear layer, one thread, at the level in use: panels [begin, end) of 32 columns (pairs of panels under silu_mul), all by default.\n\n"
      "weight: uint8, packed [n, k]. q int8, scale, corr, sum [rows, k / 32] or b (bfloat16 bits) [rows, k]: the activations. out float32 [rows, n]\n"
      "for store (0) and add (1); out_q, out_scale, out_corr, out_sum and/or out_b [rows, n / 2] for silu_mul (2). Raises ValueError on any "
      "mismatch.");
  bind_bench(m);
}
