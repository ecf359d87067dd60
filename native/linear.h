// What the GEMM families share: where a finished tile of 32 columns goes. Owned by linear.cpp; the families only compute tiles.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {

// One family: columns of panels [begin, end) (pairs of panels under silu_mul) for all rows; calls finish_tile / finish_pair.
void linear_int(const Linear& a, int64_t begin, int64_t end);
void linear_bf16(const Linear& a, int64_t begin, int64_t end);

// tile: [rows][32] fp32, 64 B aligned: the products of `panel` for rows [row, row + rows). Applies bias, then stores or adds; masks columns past n.
void finish_tile(const Linear& a, int64_t row, int rows, int64_t panel, const float* tile);
// The pair of tiles of gate and up, panels 2 * pair and 2 * pair + 1 (n is a multiple of 64, bias is indexed by packed column):
// h = silu(gate + bias) * (up + bias), 32 columns, written to act_out as group `pair` (quantized) and/or bf16. Both 64 B aligned.
void finish_pair(const Linear& a, int64_t row, int rows, int64_t pair, const float* gate, const float* up);

}  // namespace HEADRACE_ISA
}  // namespace headrace
