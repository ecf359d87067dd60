// What the GEMM families share: where a finished tile of 32 columns goes. Owned by linear.cpp; the families only compute tiles.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {

constexpr float kNibbleScale = 1.0f / 16;  // the unsigned weight of the int families is 16 * nibble

// One family: columns of panels [begin, end) (pairs of panels under silu_mul) for all rows; calls finish_tile / finish_pair.
void linear_int(const Linear& a, int64_t begin, int64_t end);
void linear_amx(const Linear& a, int64_t begin, int64_t end);  // as linear_int, to the bit; only at the level of that name
void linear_bf16(const Linear& a, int64_t begin, int64_t end);

// tile: [rows][32] fp32, 64 B aligned: the products of `panel` for rows [row, row + rows). Applies bias, then stores or adds; masks columns past n.
void finish_tile(const Linear& a, int64_t row, int rows, int64_t panel, const float* tile);
// The pair of tiles of gate and up, panels 2 * pair and 2 * pair + 1 (n is a multiple of 64, bias is indexed by packed column):
// h = silu(gate + bias) * (up + bias), 32 columns, written to act_out as group `pair` (quantized) and/or bf16. Both 64 B aligned.
void finish_pair(const Linear& a, int64_t row, int rows, int64_t pair, const float* gate, const float* up);

#if HEADRACE_LEVEL >= 1
// A tile's place in the output is far from the last one's: ask for it before it is needed, else the stores wait on one another. 2 % at K = 2048.
inline void want_to_write(const void* p) { __asm__ volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p))); }
inline void want_tile(const Linear& a, int64_t row, int rows, int64_t panel) {
  for (int r = 0; r < 2 * rows; r++) want_to_write(a.out + (row + r / 2) * a.ld_out + panel * kPanel + r % 2 * 16);
}
inline void want_pair(const Activations& act, int64_t row, int rows, int64_t pair) {
  if (!act.q) return;
  for (int r = 0; r < rows; r++) {
    const int64_t at = (row + r) * act.ldg + pair;
    want_to_write(act.q + (row + r) * act.ldq + pair * kGroup);
    want_to_write(act.scale + at);
    want_to_write(act.corr + at);
    want_to_write(act.sum + at);
  }
}
#endif

}  // namespace HEADRACE_ISA
}  // namespace headrace
