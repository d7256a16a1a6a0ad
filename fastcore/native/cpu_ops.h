// The float32 operations of a transformer layer around its matmuls and attention: norms, rotary embedding with
// the write into the paged KV cache, gated activations. Row by row: a row's result does not depend on the others.
// Called through bindings.cpp; the kernels are in cpu_ops_kernels.cpp.
#pragma once

#include "kernels.h"

namespace aioengine {

// y = x / sqrt(mean(x^2) + eps) * w, over rows of dim. y may be x.
void rms_norm(const float* x, const float* w, float eps, float* y, int rows, int dim);

// residual += x; y = rms_norm(residual). y may be x.
void add_rms_norm(const float* x, float* residual, const float* w, float eps, float* y, int rows, int dim);

// Per token: q and k heads are normalized (if the norms are given) and rotated; q goes to q_out, k and v go to
// the token's cache slot (none if the slot is -1).
void rope_and_cache(const RopeArgs& args, int num_tokens);

// y = silu(gate) * up and y = gelu_tanh(gate) * up, with gate_up rows of [dim gates, dim ups].
void silu_mul(const float* gate_up, float* y, int rows, int dim);
void gelu_tanh_mul(const float* gate_up, float* y, int rows, int dim);

}  // namespace aioengine
