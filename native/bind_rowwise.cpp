// numpy front of the row-wise kernels and of sampling: sizes are checked here, the kernels trust them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "bind.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;
template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void fail(const std::string& message) { throw nb::value_error(message.c_str()); }

std::string shape_of(size_t rows, size_t columns) { return "(" + std::to_string(rows) + ", " + std::to_string(columns) + ")"; }

// A row-major matrix of at least rows x columns whose rows may lie further apart. Returns the distance.
template <typename T>
int64_t rows_of(const char* where, const char* name, const Matrix<T>& a, size_t rows, size_t columns) {
  if (a.shape(0) < rows || a.shape(1) < columns)
    fail(std::string("[") + where + "] " + name + ": expected at least " + shape_of(rows, columns) + ", got " + shape_of(a.shape(0), a.shape(1)));
  if (a.shape(1) > 1 && a.stride(1) != 1) fail(std::string("[") + where + "] " + name + ": expected rows without gaps between their elements");
  if (a.shape(0) > 1 && a.stride(0) < static_cast<int64_t>(a.shape(1)))
    fail(std::string("[") + where + "] " + name + ": expected rows that ascend and do not overlap");
  return a.shape(0) > 1 ? a.stride(0) : static_cast<int64_t>(a.shape(1));
}

using Bytes = std::optional<Matrix<int8_t>>;
using Floats = std::optional<Matrix<float>>;
using Ints = std::optional<Matrix<int32_t>>;
using Halves = std::optional<Matrix<uint16_t>>;

headrace::Activations activations(const char* where, size_t rows, size_t k, const Bytes& q, const Floats& scale, const Ints& corr, const Floats& sum,
                                  const Halves& b) {
  const size_t groups = (k + headrace::kGroup - 1) / headrace::kGroup, padded = groups * headrace::kGroup;
  headrace::Activations act = {};
  if (!q && !b) fail(std::string("[") + where + "] expected q or b to write to");
  if (q) {
    if (!scale || !corr || !sum) fail(std::string("[") + where + "] q: expected scale, corr and sum with it");
    act.ldq = rows_of(where, "q", *q, rows, padded);
    act.ldg = rows_of(where, "scale", *scale, rows, groups);
    if (rows_of(where, "corr", *corr, rows, groups) != act.ldg || rows_of(where, "sum", *sum, rows, groups) != act.ldg)
      fail(std::string("[") + where + "] scale, corr, sum: expected the same distance between rows");
    act.q = q->data();
    act.scale = scale->data();
    act.corr = corr->data();
    act.sum = sum->data();
  }
  if (b) {
    act.ldb = rows_of(where, "b", *b, rows, padded);
    act.b = b->data();
  }
  return act;
}

struct Range {
  int64_t begin, end;
};

Range range_of(const char* where, int64_t begin, int64_t end, size_t rows) {
  const int64_t last = end < 0 ? static_cast<int64_t>(rows) : end;
  if (begin < 0 || begin > last || last > static_cast<int64_t>(rows))
    fail(std::string("[") + where + "] rows: expected a range inside [0, " + std::to_string(rows) + "), got [" + std::to_string(begin) + ", " +
         std::to_string(last) + ")");
  return {begin, last};
}

void quantize(const Matrix<const float>& x, const Bytes& q, const Floats& scale, const Ints& corr, const Floats& sum, const Halves& b, int64_t begin,
              int64_t end) {
  const size_t rows = x.shape(0), k = x.shape(1);
  const int64_t ld = rows_of("quantize", "x", x, rows, k);
  const headrace::Activations act = activations("quantize", rows, k, q, scale, corr, sum, b);
  const Range range = range_of("quantize", begin, end, rows);
  nb::gil_scoped_release unlocked;
  headrace::kernels().quantize(x.data(), ld, static_cast<int64_t>(k), range.begin, range.end, act);
}

void rms_norm(const Matrix<const float>& x, const Vector<const float>& weight, float eps, const Bytes& q, const Floats& scale, const Ints& corr,
              const Floats& sum, const Halves& b, int64_t begin, int64_t end) {
  const size_t rows = x.shape(0), k = x.shape(1);
  const int64_t ld = rows_of("rms_norm", "x", x, rows, k);
  if (weight.shape(0) != k) fail("[rms_norm] weight: expected shape (" + std::to_string(k) + ",), got (" + std::to_string(weight.shape(0)) + ",)");
  const headrace::Activations act = activations("rms_norm", rows, k, q, scale, corr, sum, b);
  const Range range = range_of("rms_norm", begin, end, rows);
  nb::gil_scoped_release unlocked;
  headrace::kernels().rms_norm(x.data(), ld, static_cast<int64_t>(k), weight.data(), eps, range.begin, range.end, act);
}

void embed(int format, const Vector<const uint8_t>& weight, int64_t n, int64_t id, float scale, const Vector<float>& out) {
  if (format < 0 || format > 3) fail("[embed] format: expected 0 to 3, got " + std::to_string(format));
  const headrace::Format f = static_cast<headrace::Format>(format);
  const size_t k = out.shape(0), groups = (k + headrace::kGroup - 1) / headrace::kGroup, record = headrace::group_bytes(f);
  if (n < 1 || id < 0 || id >= n) fail("[embed] id: expected one of " + std::to_string(n) + " rows, got " + std::to_string(id));
  const size_t panels = (static_cast<size_t>(n) - 1) / headrace::kPanel + 1;
  if (groups && weight.shape(0) / record / groups < panels)
    fail("[embed] weight: too short for [" + std::to_string(n) + ", " + std::to_string(k) + "], got " + std::to_string(weight.shape(0)) + " bytes");
  headrace::kernels().embed(f, weight.data(), static_cast<int64_t>(k), id, scale, out.data());
}

using OptionalInts = std::optional<Vector<const int32_t>>;

nb::tuple sample(const Vector<float>& logits, float temperature, float top_p, float min_p, int top_k, float repetition_penalty,
                 float presence_penalty, float frequency_penalty, uint64_t seed, int sample_index, int num_logprobs, const OptionalInts& tokens,
                 int num_prompt, const OptionalInts& bias_ids, const std::optional<Vector<const float>>& bias_values,
                 const std::optional<Vector<const uint32_t>>& mask) {
  const size_t vocab = logits.shape(0);
  if (vocab < 1 || vocab > size_t{1} << 30) fail("[sample] logits: expected 1 to 2^30, got " + std::to_string(vocab));
  headrace::Sampling s = {};
  s.temperature = temperature;
  s.top_p = top_p;
  s.min_p = min_p;
  s.top_k = top_k;
  s.repetition_penalty = repetition_penalty;
  s.presence_penalty = presence_penalty;
  s.frequency_penalty = frequency_penalty;
  s.seed = seed;
  s.sample_index = sample_index;
  s.num_logprobs = num_logprobs;
  if (num_logprobs < -1 || num_logprobs > static_cast<int64_t>(vocab))
    fail("[sample] num_logprobs: expected -1 to " + std::to_string(vocab) + ", got " + std::to_string(num_logprobs));
  if (tokens) {
    s.tokens = tokens->data();
    s.num_tokens = static_cast<int32_t>(tokens->shape(0));
  }
  s.num_prompt = num_prompt;
  if (num_prompt < 0 || num_prompt > s.num_tokens)
    fail("[sample] num_prompt: expected 0 to " + std::to_string(s.num_tokens) + ", got " + std::to_string(num_prompt));
  if (bias_ids.has_value() != bias_values.has_value() || (bias_ids && bias_ids->shape(0) != bias_values->shape(0)))
    fail("[sample] bias_ids, bias_values: expected as many values as ids");
  if (bias_ids) {
    s.num_bias = static_cast<int32_t>(bias_ids->shape(0));
    s.bias_ids = bias_ids->data();
    s.bias_values = bias_values->data();
  }
  if (mask) {
    if (mask->shape(0) < (vocab + 31) / 32)
      fail("[sample] mask: expected " + std::to_string((vocab + 31) / 32) + " words, got " + std::to_string(mask->shape(0)));
    s.mask = mask->data();
  }
  const size_t bytes = (headrace::sample_scratch(static_cast<int64_t>(vocab)) + 63) / 64 * 64;
  const std::unique_ptr<uint8_t, decltype(&std::free)> scratch(static_cast<uint8_t*>(std::aligned_alloc(64, bytes)), &std::free);
  if (!scratch) throw std::bad_alloc();
  std::vector<int32_t> top_ids(num_logprobs > 0 ? num_logprobs : 0);
  std::vector<float> top_logprobs(top_ids.size());
  const headrace::Sampled out =
      headrace::kernels().sample(logits.data(), static_cast<int64_t>(vocab), s, top_ids.data(), top_logprobs.data(), scratch.get());
  return nb::make_tuple(out.token, out.logprob, top_ids, top_logprobs);
}

}  // namespace

void bind_rowwise(nb::module_& m) {
  m.def("quantize", quantize, "x"_a.noconvert(), "q"_a.noconvert() = nb::none(), "scale"_a.noconvert() = nb::none(),
        "corr"_a.noconvert() = nb::none(), "sum"_a.noconvert() = nb::none(), "b"_a.noconvert() = nb::none(), "begin"_a = 0, "end"_a = -1,
        "Write rows [begin, end) of x [rows, k] (fp32) as int8 groups (q, scale, corr, sum) and/or bf16 (b, as uint16), zero padded to 32 columns.");
  m.def("rms_norm", rms_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "q"_a.noconvert() = nb::none(), "scale"_a.noconvert() = nb::none(),
        "corr"_a.noconvert() = nb::none(), "sum"_a.noconvert() = nb::none(), "b"_a.noconvert() = nb::none(), "begin"_a = 0, "end"_a = -1,
        "RMSNorm of each row times weight [k], written as `quantize` does.");
  m.def("embed", embed, "format"_a, "weight"_a.noconvert(), "n"_a, "id"_a, "scale"_a, "out"_a.noconvert(),
        "out[k] = row `id` of a packed [n, k] weight, times scale.");
  m.def("sample", sample, "logits"_a.noconvert(), "temperature"_a = 1.0f, "top_p"_a = 1.0f, "min_p"_a = 0.0f, "top_k"_a = 0,
        "repetition_penalty"_a = 1.0f, "presence_penalty"_a = 0.0f, "frequency_penalty"_a = 0.0f, "seed"_a = 0, "sample_index"_a = 0,
        "num_logprobs"_a = -1, "tokens"_a.noconvert() = nb::none(), "num_prompt"_a = 0, "bias_ids"_a.noconvert() = nb::none(),
        "bias_values"_a.noconvert() = nb::none(), "mask"_a.noconvert() = nb::none(),
        "Sample one row of logits, which is changed: (token, log-probability, ids of the best, their log-probabilities). tokens: prompt, then\n"
        "generated, int32; mask: uint32, a bit a token. Log-probabilities only with num_logprobs >= 0.");
}
