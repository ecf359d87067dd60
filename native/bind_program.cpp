// Program as Python sees it. Addresses travel as integers: the buffers belong to the arena and to numpy arrays that executors/native.py keeps alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "bind.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using headrace::Epilogue;
using headrace::Format;
using headrace::Program;
using headrace::RowParams;
using headrace::Weight;

Weight weight(int format, uintptr_t address, int64_t n, int64_t k) {
  return {static_cast<Format>(format), reinterpret_cast<const uint8_t*>(address), n, k};
}
const float* floats(uintptr_t address) { return reinterpret_cast<const float*>(address); }

void check(bool good, const char* message) {
  if (!good) throw nb::value_error(message);
}

// Samples rows; returns token ids, log-probabilities and the best alternatives [n][stride].
nb::tuple sample(Program& p, const std::vector<int32_t>& rows, const std::vector<int32_t>& at, const std::vector<nb::bytes>& masks, int tops) {
  const size_t n = rows.size(), words = static_cast<size_t>((p.vocab() + 31) / 32);
  check(at.size() == n, "[Program.sample] at: expected one logits row a sampled row");
  check(masks.empty() || masks.size() == n, "[Program.sample] masks: expected none, or one a row");
  std::vector<int32_t> tokens(n), ids(n * static_cast<size_t>(tops));
  std::vector<float> logprobs(n), values(n * static_cast<size_t>(tops));
  std::vector<const uint32_t*> pointers;
  std::vector<std::vector<uint32_t>> copies;  // aligned
  for (const nb::bytes& mask : masks) {
    copies.emplace_back();
    if (mask.size()) {
      check(mask.size() >= words * 4, "[Program.sample] masks: too short for the vocabulary");
      copies.back().assign(words, 0);
      std::memcpy(copies.back().data(), mask.c_str(), words * 4);
    }
  }
  for (const auto& copy : copies) pointers.push_back(copy.empty() ? nullptr : copy.data());
  {
    nb::gil_scoped_release release;
    p.sample(rows.data(), at.data(), static_cast<int>(n), pointers.empty() ? nullptr : pointers.data(), tokens.data(), logprobs.data(), ids.data(),
             values.data(), tops);
  }
  return nb::make_tuple(tokens, logprobs, ids, values);
}

template <class T>
nb::bytes bytes_of(const std::vector<T>& values) {
  return nb::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Scores the tokens after positions [first, stop) of a row; returns float32 [n], int32 [n], int32 [n][tops], float32 [n][tops].
nb::tuple score(Program& p, int row, int64_t first, int64_t stop, int64_t at, int tops) {
  check(row >= 0 && row < p.limits().max_rows, "[Program.score] row: out of range");
  check(first >= 0 && first < stop && stop < p.num_tokens(row), "[Program.score] first, stop: out of the row's tokens");
  check(at >= 0 && at + stop - first <= p.num_logits(), "[Program.score] at: out of the step's rows of logits");
  check(tops >= 0 && tops <= p.vocab(), "[Program.score] tops: expected 0 to the vocabulary's size");
  const size_t n = static_cast<size_t>(stop - first);
  std::vector<float> logprobs(n), values(n * static_cast<size_t>(tops));
  std::vector<int32_t> ranks(n), ids(n * static_cast<size_t>(tops));
  {
    nb::gil_scoped_release release;
    p.score(row, first, stop, at, tops, logprobs.data(), ranks.data(), ids.data(), values.data());
  }
  return nb::make_tuple(bytes_of(logprobs), bytes_of(ranks), bytes_of(ids), bytes_of(values));
}

}  // namespace

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program", "A network lowered to operations; see native/program.h.")
      .def(
          "__init__",
          [](Program* self, int threads, int max_tokens, int max_rows, int max_blocks, int64_t context, int64_t vocab, int num_blocks, int num_layers,
             int q_heads, int kv_heads, int head_dim, int window, float score_scale) {
            check(threads >= 1 && threads <= 256, "[Program] threads: expected 1 to 256");
            check(max_tokens >= 1 && max_rows >= 1 && max_blocks >= 1 && context >= 1 && vocab >= 1 && num_blocks >= 1 && num_layers >= 1,
                  "[Program] every size must be positive");
            check(kv_heads >= 1 && q_heads >= kv_heads && q_heads % kv_heads == 0, "[Program] q_heads: expected a multiple of kv_heads");
            check(head_dim >= 16 && head_dim <= 256 && head_dim % 16 == 0, "[Program] head_dim: expected a multiple of 16 up to 256");
            new (self) Program({threads, max_tokens, max_rows, max_blocks, context, vocab, num_blocks, num_layers, q_heads, kv_heads, head_dim,
                                window, score_scale});
          },
          "threads"_a, "max_tokens"_a, "max_rows"_a, "max_blocks"_a, "context"_a, "vocab"_a, "num_blocks"_a, "num_layers"_a, "q_heads"_a,
          "kv_heads"_a, "head_dim"_a, "window"_a, "score_scale"_a)
      .def("buffer", &Program::buffer, "columns"_a)
      .def("activations", &Program::activations, "k"_a, "int8"_a, "as_bf16"_a)
      .def(
          "embed", [](Program& p, int f, uintptr_t w, int64_t n, int64_t k, float scale, int out) { p.embed(weight(f, w, n, k), scale, out); },
          "format"_a, "address"_a, "n"_a, "k"_a, "scale"_a, "out"_a)
      .def(
          "rms_norm",
          [](Program& p, int x, uintptr_t w, float eps, int64_t k, int out, bool selected) { p.rms_norm(x, floats(w), eps, k, out, selected); },
          "x"_a, "weight"_a, "eps"_a, "k"_a, "out"_a, "selected"_a)
      .def("quantize", &Program::quantize, "x"_a, "k"_a, "out"_a)
      .def(
          "linear",
          [](Program& p, const std::string& name, int f, uintptr_t w, int64_t n, int64_t k, int in, int out, int64_t column, int epilogue,
             uintptr_t bias,
             bool selected) { p.linear(name, weight(f, w, n, k), in, out, column, static_cast<Epilogue>(epilogue), floats(bias), selected); },
          "name"_a, "format"_a, "address"_a, "n"_a, "k"_a, "in_"_a, "out"_a, "column"_a, "epilogue"_a, "bias"_a, "selected"_a)
      .def(
          "rope_kv",
          [](Program& p, int qkv, int64_t q, int64_t k, int64_t v, uintptr_t q_norm, uintptr_t k_norm, float eps, uintptr_t table, int rotary,
             int layer) { p.rope_kv(qkv, q, k, v, floats(q_norm), floats(k_norm), eps, floats(table), rotary, layer); },
          "qkv"_a, "q"_a, "k"_a, "v"_a, "q_norm"_a, "k_norm"_a, "eps"_a, "table"_a, "rotary"_a, "layer"_a)
      .def("attention", &Program::attention, "out"_a, "layer"_a)
      .def("finish", &Program::finish, "logits"_a)
      .def(
          "set_row",
          [](Program& p, int row, nb::bytes tokens, int64_t num_prompt, float temperature, float top_p, float min_p, int top_k, float repetition,
             float presence, float frequency, uint64_t seed, int sample_index, int num_logprobs, int min_tokens, std::vector<int32_t> bias_ids,
             std::vector<float> bias_values, std::vector<int32_t> end_ids) {
            const int64_t count = static_cast<int64_t>(tokens.size() / 4);
            check(row >= 0 && row < p.limits().max_rows, "[Program.set_row] row: out of range");
            check(count >= 1 && count <= p.limits().context, "[Program.set_row] tokens: expected 1 to the context's length");
            check(num_prompt >= 0 && num_prompt <= count, "[Program.set_row] num_prompt: out of range");
            check(bias_ids.size() == bias_values.size(), "[Program.set_row] bias: ids and values differ in number");
            const int32_t* ids = reinterpret_cast<const int32_t*>(tokens.c_str());
            for (int64_t i = 0; i < count; i++) check(ids[i] >= 0 && ids[i] < p.vocab(), "[Program.set_row] tokens: an id outside the vocabulary");
            for (int32_t id : end_ids) check(id >= 0 && id < p.vocab(), "[Program.set_row] end_ids: an id outside the vocabulary");
            for (int32_t id : bias_ids) check(id >= 0 && id < p.vocab(), "[Program.set_row] bias: an id outside the vocabulary");
            p.set_row(row, ids, count, num_prompt,
                      {temperature, top_p, min_p, top_k, repetition, presence, frequency, seed, sample_index, num_logprobs, min_tokens,
                       std::move(bias_ids), std::move(end_ids), std::move(bias_values)});
          },
          "row"_a, "tokens"_a, "num_prompt"_a, "temperature"_a, "top_p"_a, "min_p"_a, "top_k"_a, "repetition"_a, "presence"_a, "frequency"_a,
          "seed"_a, "sample_index"_a, "num_logprobs"_a, "min_tokens"_a, "bias_ids"_a, "bias_values"_a, "end_ids"_a)
      .def(
          "set_blocks",
          [](Program& p, int row, int first, const std::vector<int32_t>& ids) {
            const auto& l = p.limits();
            check(row >= 0 && row < l.max_rows && first >= 0 && first + static_cast<int64_t>(ids.size()) <= l.max_blocks,
                  "[Program.set_blocks] out of the table");
            for (int32_t id : ids) check(id >= 0 && id < l.num_blocks, "[Program.set_blocks] ids: outside the pool");
            p.set_blocks(row, first, ids.data(), static_cast<int>(ids.size()));
          },
          "row"_a, "first"_a, "ids"_a)
      .def(
          "append",
          [](Program& p, int row, int32_t token) {
            check(row >= 0 && row < p.limits().max_rows && token >= 0 && token < p.vocab(), "[Program.append] out of range");
            p.append(row, token);
          },
          "row"_a, "token"_a)
      .def(
          "truncate",
          [](Program& p, int row, int num_tokens) {
            check(row >= 0 && row < p.limits().max_rows && num_tokens >= 1, "[Program.truncate] out of range");
            p.truncate(row, num_tokens);
          },
          "row"_a, "num_tokens"_a)
      .def(
          "forward",
          [](Program& p, const std::vector<int32_t>& chunks, const std::vector<int32_t>& copies) {
            const auto& l = p.limits();
            int64_t rows = 0;
            check(chunks.size() % 4 == 0 && copies.size() % 2 == 0, "[Program.forward] chunks: expected four numbers each, copies two");
            for (size_t i = 0; i < chunks.size(); i += 4) {
              const int32_t row = chunks[i], start = chunks[i + 1], stop = chunks[i + 2], logits = chunks[i + 3];
              check(row >= 0 && row < l.max_rows && start >= 0 && start < stop && stop <= l.context && logits >= start && logits <= stop,
                    "[Program.forward] chunks: out of range");
              rows += stop - start;
            }
            check(rows >= 1 && rows <= l.max_tokens, "[Program.forward] chunks: more tokens than a step may hold, or none");
            for (int32_t id : copies) check(id >= 0 && id < l.num_blocks, "[Program.forward] copies: outside the pool");
            nb::gil_scoped_release release;
            return p.forward(chunks.data(), static_cast<int>(chunks.size() / 4), copies.data(), static_cast<int>(copies.size() / 2));
          },
          "chunks"_a, "copies"_a, "One step; returns the rows of logits.")
      .def("sample", &sample, "rows"_a, "at"_a, "masks"_a, "tops"_a)
      .def("score", &score, "row"_a, "first"_a, "stop"_a, "at"_a, "tops"_a)
      .def(
          "pool",
          [](const Program& p, int x, uintptr_t w, double eps, int64_t k, int64_t first, int64_t count, uintptr_t sum) {
            check(first >= 0 && count >= 0 && first + count <= p.num_rows(), "[Program.pool] first, count: out of the step's rows");
            nb::gil_scoped_release release;
            p.pool(x, floats(w), eps, k, first, count, reinterpret_cast<double*>(sum));
          },
          "x"_a, "weight"_a, "eps"_a, "k"_a, "first"_a, "count"_a, "sum"_a)
      .def("logits_address", [](Program& p) { return reinterpret_cast<uintptr_t>(p.logits()); })
      .def("profile", &Program::profile, "on"_a)
      .def(
          "times",
          [](const Program& p) {
            std::vector<std::tuple<std::string, double>> out;
            for (const auto& t : p.times()) out.emplace_back(t.name, t.seconds);
            return out;
          },
          "Per kind of operation: name and seconds of the first thread, since profile(True).")
      .def_prop_ro("bytes", &Program::bytes)
      .def_prop_ro("kv_bytes", &Program::kv_bytes);
}
