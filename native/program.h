// A network lowered to a list of operations, and the state of a step. Built once by executors/native.py; forward() is one call.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace headrace {

// Zeroed memory of the operating system's, touched lazily.
class Memory {
 public:
  explicit Memory(size_t bytes, bool huge = false);
  ~Memory();
  Memory(Memory&& other) noexcept : base_(other.base_), bytes_(other.bytes_) { other.base_ = nullptr; }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(base_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* base_;
  size_t bytes_;
};

constexpr int64_t kSmall = 4;  // up to this many rows every thread norms and quantizes for itself: cheaper than a barrier
constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct Weight {
  Format format;
  const uint8_t* data;
  int64_t n, k;
};

struct ProgramLimits {
  int threads;
  int max_tokens;   // rows of a step
  int max_rows;     // samples that hold state
  int max_blocks;   // of one sample: the block table's width
  int64_t context;  // tokens of one sample
  int64_t vocab;
  int num_blocks;  // in the pool
  int num_layers, q_heads, kv_heads, head_dim;
  int window;  // keys a query sees; 0: all
  float score_scale;
};

// What a sample is drawn with; see kernels.h `Sampling` for the meaning of each field.
struct RowParams {
  float temperature = 0, top_p = 1, min_p = 0;
  int top_k = 0;
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  uint64_t seed = 0;
  int sample_index = 0, num_logprobs = -1, min_tokens = 0;
  std::vector<int32_t> bias_ids, end_ids;
  std::vector<float> bias_values;
};

struct OpTime {
  std::string name;
  double seconds;  // of thread 0
};

class Program {
 public:
  explicit Program(const ProgramLimits& limits);

  // --- building, in the order of execution; a buffer is named by the number it was given ---
  int buffer(int64_t columns);                          // fp32 [max_tokens][columns]
  int activations(int64_t k, bool int8, bool as_bf16);  // rows for the linear layers
  void embed(const Weight& weight, float scale, int out);
  // `selected`: only the rows whose logits are wanted, closed up.
  void rms_norm(int x, const float* weight, float eps, int64_t k, int out_activations, bool selected);
  void quantize(int x, int64_t k, int out_activations);
  void linear(const std::string& name, const Weight& weight, int in_activations, int out, int64_t column, Epilogue epilogue, const float* bias,
              bool selected);
  void rope_kv(int qkv, int64_t q_offset, int64_t k_offset, int64_t v_offset, const float* q_norm, const float* k_norm, float eps,
               const float* cos_sin, int rotary, int layer);
  void attention(int out, int layer);  // after its rope_kv
  void finish(int logits);             // the buffer the head writes

  // --- rows ---
  void set_row(int row, const int32_t* tokens, int64_t count, int64_t num_prompt, RowParams params);
  void set_blocks(int row, int first, const int32_t* ids, int count);
  void append(int row, int32_t token);
  void truncate(int row, int num_tokens);  // forgets the tokens after

  // --- a step: chunks [n][4] = row, start, stop, logits_start; copies [m][2] = block from, to. Returns rows of logits. ---
  int64_t forward(const int32_t* chunks, int num_chunks, const int32_t* copies, int num_copies);
  // Samples rows[i] on logits row at[i]; appends the token. tops: [n][max num_logprobs].
  void sample(const int32_t* rows, const int32_t* at, int count, const uint32_t* const* masks, int32_t* tokens, float* logprobs, int32_t* top_ids,
              float* top_logprobs, int top_stride);
  // Of the tokens after positions [first, stop) of a row, whose logits are rows at.. of the step: log-probabilities, and how many were more likely
  // plus one; the `tops` best: [n][tops].
  void score(int row, int64_t first, int64_t stop, int64_t at, int tops, float* logprobs, int32_t* ranks, int32_t* top_ids, float* top_logprobs);

  // Adds rms_norm(x) * weight of rows [first, first + count) of the step to sum[columns of the norm]: rows one by one, so that the bits do not
  // depend on how a prompt is cut.
  void pool(int x, const float* weight, double eps, int64_t k, int64_t first, int64_t count, double* sum) const;

  float* logits() const { return buffers_[static_cast<size_t>(logits_)].data; }
  int num_tokens(int row) const { return rows_[static_cast<size_t>(row)].num_tokens; }
  int64_t num_rows() const { return num_rows_; }        // tokens of the last step
  int64_t num_logits() const { return num_selected_; }  // rows of the last step
  int64_t vocab() const { return limits_.vocab; }
  const ProgramLimits& limits() const { return limits_; }
  size_t bytes() const;  // of buffers, without the KV pool
  size_t kv_bytes() const { return kv_.bytes(); }
  void profile(bool on);
  std::vector<OpTime> times() const;

 private:
  enum class Kind { embed, rms_norm, quantize, linear, rope_kv, attention };
  struct Op {
    Kind kind;
    std::string name;
    int x = -1, out = -1, act = -1, act_out = -1;
    bool selected = false;
    int64_t k = 0, column = 0;
    float eps = 0, scale = 0;
    const float *weight = nullptr, *bias = nullptr;
    Weight packed{};
    Epilogue epilogue = Epilogue::store;
    RopeKv rope{};
    int layer = 0;
    double seconds = 0;
    const Op* next = nullptr;  // the linear layer whose weights are read after this one's
  };
  struct Buffer {
    Memory memory;
    float* data;
    int64_t columns;
  };
  struct ActBuffer {
    Memory memory;
    Activations all;
    int64_t k;
    bool shared = false;  // written by all threads together, so never a private copy
  };
  struct Row {
    int32_t num_prompt = 0, num_tokens = 0;
    RowParams params;
  };
  struct Item {  // attention work: a tile of queries of one head, or a single query
    KvRange range;
    int q_begin, q_end;
    int split;  // which of splits_, or -1: all its KV chunks
    int64_t cost;
  };
  struct Split {  // one query and some heads whose KV chunks are shared out; whoever finishes the last piece merges
    float* partial;
    int pieces;
    std::atomic<int>* left;
  };
  // A step is stages, numbered from first_stage_ on by every thread alike. The units of a stage are claimed one by one, of a thread's own share
  // first, and the stage is over when all are done, whoever did them: a thread that comes late, because the system ran something else on its core,
  // finds it over and goes on. A claim is made on the stage's number, so what a thread has prepared from inputs that have changed since is never
  // used.
  struct alignas(128) Cursor {
    std::atomic<uint64_t> claimed;  // stage << 32 | how many of this thread's share
    uint32_t stage;                 // where this thread is
  };
  struct Stage {
    int64_t units = 0, done = 0;  // in all, and by this thread; no units: nothing to wait for
  };
  struct SampleCall;
  struct ScoreCall;

  Op& add(Kind kind, const std::string& name);
  int64_t rows_of(const Op& op) const { return op.selected ? num_selected_ : num_rows_; }
  Activations view(int act, int64_t rows, int thread, int64_t from = 0) const;
  Linear layer(const Op& op, int thread, int64_t begin, int64_t end) const;
  static int64_t panels(const Op& op);
  static int64_t panel_bytes(const Op& op);
  KvLayer kv(int layer) const;
  void plan_attention();
  void run(int thread);
  Stage run_op(const Op& op, int thread);
  void run_rows(const Op& op, int thread, int64_t begin, int64_t end);
  void run_rope(const Op& op, int64_t begin, int64_t end);
  Stage run_attention(const Op& op, int thread);
  void attend(const Op& op, const Item& item, const Item* next, int thread);
  bool is_decode(const AttentionChunk& c) const { return c.stop - c.start == 1; }
  bool over(int thread) const;
  int64_t claim(int thread, int owner, int64_t count, int64_t grain);
  template <class F>
  Stage share(int thread, int64_t units, int64_t grain, F f);
  void end_stage(int thread, Stage stage);
  template <class F>
  void timed(double& seconds, int thread, F f);

  ProgramLimits limits_;
  Pool pool_;
  std::vector<Op> ops_;
  std::vector<std::pair<size_t, size_t>> runs_;  // [first, last) of ops_: attention alone, or operations that compute each row from the same row
  std::vector<Buffer> buffers_;
  std::vector<ActBuffer> activations_;
  int logits_ = -1;
  Memory kv_, tokens_, tables_, q_, partial_;
  std::unique_ptr<Memory> scratch_;
  size_t scratch_bytes_ = 0;  // of one thread
  std::vector<Row> rows_;
  std::unique_ptr<Cursor[]> cursors_;
  uint32_t first_stage_ = 0;                         // of this step
  alignas(128) std::atomic<uint32_t> stage_{0};      // the one that is open
  alignas(128) std::atomic<int64_t> units_done_{0};  // of it

  // the step
  int64_t num_rows_ = 0, num_selected_ = 0;
  std::vector<AttentionChunk> chunks_;
  std::vector<int32_t> row_tokens_, row_chunk_, selected_;
  int64_t turned_rows_ = 0;               // by rope_kv: those of chunks of several; a single query is turned where it attends
  std::vector<std::vector<Item>> items_;  // of each thread, longest first; the others take what it has not begun
  std::vector<Split> splits_;
  std::unique_ptr<std::atomic<int>[]> pieces_left_;
  std::vector<std::pair<int32_t, int32_t>> copies_;
  bool profile_ = false;
  double waited_ = 0;  // by thread 0, for the others
};

}  // namespace headrace
