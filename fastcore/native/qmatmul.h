// y = x W^T + bias in float32, with W kept in its packed, quantized form. Every element is accumulated over k in
// ascending order by one chain of fused multiply-adds that starts from the bias, whatever the number of rows,
// threads or panels at work: a row's result is bitwise the same in every batch. Called through bindings.cpp;
// the kernels are in qmatmul_kernels.cpp.
#pragma once

#include <cstddef>

#include "packed_matrix.h"

namespace aioengine {

// x: [m, k] with row stride ldx, y: [m, n] with row stride ldy, bias: [n] or null; strides in elements.
void matmul(const float* x, int m, ptrdiff_t ldx, const PackedMatrix& weights, const float* bias, float* y,
            ptrdiff_t ldy);

}  // namespace aioengine
