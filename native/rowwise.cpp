#include "kernels.h"

namespace headrace {
namespace HEADRACE_ISA {
void quantize(const float*, int64_t, int64_t, int64_t, int64_t, const Activations&) { __builtin_trap(); }
void rms_norm(const float*, int64_t, int64_t, const float*, float, int64_t, int64_t, const Activations&) { __builtin_trap(); }
void embed(Format, const uint8_t*, int64_t, int64_t, float, float*) { __builtin_trap(); }
}  // namespace HEADRACE_ISA
}  // namespace headrace
