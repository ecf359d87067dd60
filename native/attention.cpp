#include "kernels.h"

namespace headrace {
namespace HEADRACE_ISA {
void rope_kv(const RopeKv&, const AttentionChunk&, int64_t, int64_t) { __builtin_trap(); }
void attention(const Attention&, const AttentionChunk&, int, int64_t, int64_t, uint8_t*) { __builtin_trap(); }
void attention_partial(const Attention&, const AttentionChunk&, int, int64_t, int64_t, float*, uint8_t*) { __builtin_trap(); }
void attention_merge(const Attention&, const AttentionChunk&, int, const float*) { __builtin_trap(); }
}  // namespace HEADRACE_ISA
}  // namespace headrace
