// See cpu_ops.h. This file decides into how many chunks an operation is cut.
#include "cpu_ops.h"

#include <algorithm>

#include "isa.h"
#include "threads.h"

namespace aioengine {
namespace {

// Below about this many floats a second thread costs more than it saves.
constexpr int64_t kChunkFloats = 8192;

template <class Body>
void for_row_ranges(int rows, int64_t floats_per_row, Body&& body) {
    if (rows <= 0) return;
    const int64_t useful = rows * floats_per_row / kChunkFloats;
    const int chunks = int(std::max<int64_t>(1, std::min<int64_t>({useful, rows, 4 * num_threads()})));
    parallel_for(chunks, [&](int chunk) {
        const Range part = split_range(rows, chunks, chunk);
        body(part.begin, part.end);
    });
}

}  // namespace

void rms_norm(const float* x, const float* w, float eps, float* y, int rows, int dim) {
    const OpKernels& kernels = *current_isa().ops;
    for_row_ranges(rows, dim, [&](int begin, int end) {
        const ptrdiff_t at = ptrdiff_t(begin) * dim;
        kernels.rms_norm(x + at, w, eps, y + at, end - begin, dim);
    });
}

void add_rms_norm(const float* x, float* residual, const float* w, float eps, float* y, int rows, int dim) {
    const OpKernels& kernels = *current_isa().ops;
    for_row_ranges(rows, dim, [&](int begin, int end) {
        const ptrdiff_t at = ptrdiff_t(begin) * dim;
        kernels.add_rms_norm(x + at, residual + at, w, eps, y + at, end - begin, dim);
    });
}

void rope_and_cache(const RopeArgs& args, int num_tokens) {
    const OpKernels& kernels = *current_isa().ops;
    const int64_t floats = int64_t(args.num_heads + 2 * args.num_kv_heads) * args.head_dim;
    for_row_ranges(num_tokens, floats, [&](int begin, int end) { kernels.rope_and_cache(args, begin, end); });
}

void silu_mul(const float* gate_up, float* y, int rows, int dim) {
    const OpKernels& kernels = *current_isa().ops;
    for_row_ranges(rows, 4 * int64_t(dim), [&](int begin, int end) {
        kernels.silu_mul(gate_up + 2 * ptrdiff_t(begin) * dim, y + ptrdiff_t(begin) * dim, end - begin, dim);
    });
}

void gelu_tanh_mul(const float* gate_up, float* y, int rows, int dim) {
    const OpKernels& kernels = *current_isa().ops;
    for_row_ranges(rows, 6 * int64_t(dim), [&](int begin, int end) {
        kernels.gelu_tanh_mul(gate_up + 2 * ptrdiff_t(begin) * dim, y + ptrdiff_t(begin) * dim, end - begin, dim);
    });
}

}  // namespace aioengine
