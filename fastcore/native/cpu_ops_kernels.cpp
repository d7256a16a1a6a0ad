// The layer operations of one instruction-set level (see kernels.h and cpu_ops.h).
#include "kernels.h"
#include "simd.h"

namespace aioengine {
namespace AIO_ISA {
namespace {

// Applies body(offset, count) to whole vectors of a row, then once to what is left.
template <class Body>
AIO_INLINE void for_vectors(int dim, Body&& body) {
    int i = 0;
    for (; i + kWidth <= dim; i += kWidth) body(i, kWidth);
    if (i < dim) body(i, dim - i);
}

AIO_INLINE VF get(const float* p, int count) { return count == kWidth ? vload(p) : vload_some(p, count); }
AIO_INLINE void put(float* p, VF x, int count) {
    if (count == kWidth) {
        vstore(p, x);
    } else {
        vstore_some(p, x, count);
    }
}

// 1 / sqrt(mean(x^2) + eps)
AIO_INLINE float inverse_rms(const float* x, float eps, int dim) {
    VF sums[4] = {vzero(), vzero(), vzero(), vzero()};
    int i = 0;
    for (; i + 4 * kWidth <= dim; i += 4 * kWidth) {
        for (int j = 0; j < 4; ++j) {
            const VF v = vload(x + i + j * kWidth);
            sums[j] = vfma(v, v, sums[j]);
        }
    }
    for_vectors(dim - i, [&](int at, int count) {
        const VF v = get(x + i + at, count);
        sums[0] = vfma(v, v, sums[0]);
    });
    return 1.0f / __builtin_sqrtf(vsum((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(dim) + eps);
}

AIO_INLINE void norm_row(const float* x, const float* w, float eps, float* y, int dim) {
    const VF scale = vset1(inverse_rms(x, eps, dim));
    for_vectors(dim, [&](int i, int count) { put(y + i, get(x + i, count) * scale * get(w + i, count), count); });
}

void rms_norm(const float* x, const float* w, float eps, float* y, int rows, int dim) {
    for (ptrdiff_t r = 0; r < rows; ++r) norm_row(x + r * dim, w, eps, y + r * dim, dim);
}

void add_rms_norm(const float* x, float* residual, const float* w, float eps, float* y, int rows, int dim) {
    for (ptrdiff_t r = 0; r < rows; ++r) {
        float* sum = residual + r * dim;
        const float* add = x + r * dim;
        for_vectors(dim, [&](int i, int count) { put(sum + i, get(sum + i, count) + get(add + i, count), count); });
        norm_row(sum, w, eps, y + r * dim, dim);
    }
}

// Pair (i, i + rotary_dim / 2) turns by the token's angle i; the rest of the head is copied.
AIO_INLINE void rotate_head(const float* x, const float* cos, int head_dim, int rotary_dim, float* y) {
    const int half = rotary_dim / 2;
    const float* sin = cos + half;
    for_vectors(half, [&](int i, int count) {
        const VF a = get(x + i, count), b = get(x + half + i, count);
        const VF c = get(cos + i, count), s = get(sin + i, count);
        put(y + i, a * c - b * s, count);
        put(y + half + i, b * c + a * s, count);
    });
    for (int i = rotary_dim; i < head_dim; ++i) y[i] = x[i];
}

// float32 values to a cache row, rounded to nearest even.
void store_kv(const float* x, int dim, KvType type, void* cache, size_t at) {
    if (type == KvType::kFloat32) {
        float* to = (float*)cache + at;
        for (int i = 0; i < dim; ++i) to[i] = x[i];
    } else if (type == KvType::kFloat16) {
        uint16_t* to = (uint16_t*)cache + at;
        for (int i = 0; i < dim; ++i) to[i] = f16_from_float(x[i]);
    } else {
        uint16_t* to = (uint16_t*)cache + at;
        for (int i = 0; i < dim; ++i) to[i] = bf16_from_float(x[i]);
    }
}

constexpr int kMaxHeadDim = 1024;  // checked by the caller

void rope_and_cache(const RopeArgs& a, int token_begin, int token_end) {
    const int dim = a.head_dim;
    const ptrdiff_t row_floats = ptrdiff_t(a.num_heads + 2 * a.num_kv_heads) * dim;
    float head[kMaxHeadDim], rotated[kMaxHeadDim];
    for (ptrdiff_t t = token_begin; t < token_end; ++t) {
        const float* row = a.qkv + t * row_floats;
        const float* cos = a.cos_sin + ptrdiff_t(a.positions[t]) * a.rotary_dim;
        for (int h = 0; h < a.num_heads; ++h) {
            const float* q = row + h * dim;
            if (a.q_norm != nullptr) {
                norm_row(q, a.q_norm, a.eps, head, dim);
                q = head;
            }
            rotate_head(q, cos, dim, a.rotary_dim, a.q_out + (t * a.num_heads + h) * dim);
        }
        const int32_t slot = a.slot_mapping[t];
        if (slot < 0) continue;
        for (int h = 0; h < a.num_kv_heads; ++h) {
            const float* k = row + (a.num_heads + h) * dim;
            const float* v = row + (a.num_heads + a.num_kv_heads + h) * dim;
            if (a.k_norm != nullptr) {
                norm_row(k, a.k_norm, a.eps, head, dim);
                k = head;
            }
            rotate_head(k, cos, dim, a.rotary_dim, rotated);
            const size_t block = slot / a.block_size, offset = slot % a.block_size;
            const size_t at = ((block * a.num_kv_heads + h) * a.block_size + offset) * 2 * dim;
            store_kv(rotated, dim, a.kv_type, a.kv_cache, at);
            store_kv(v, dim, a.kv_type, a.kv_cache, at + dim);
        }
    }
}

template <class Activation>
AIO_INLINE void gated(const float* gate_up, float* y, int rows, int dim, Activation&& activation) {
    for (ptrdiff_t r = 0; r < rows; ++r) {
        const float* gate = gate_up + 2 * r * dim;
        float* to = y + r * dim;
        for_vectors(dim, [&](int i, int count) {
            put(to + i, activation(get(gate + i, count)) * get(gate + dim + i, count), count);
        });
    }
}

void silu_mul(const float* gate_up, float* y, int rows, int dim) {
    gated(gate_up, y, rows, dim, [](VF x) { return x / (vset1(1.0f) + vexp(vzero() - x)); });
}

void gelu_tanh_mul(const float* gate_up, float* y, int rows, int dim) {
    gated(gate_up, y, rows, dim, [](VF x) {
        const VF inner = vset1(0.7978845608f) * vfma(x * x * x, vset1(0.044715f), x);
        return vset1(0.5f) * x * (vset1(1.0f) + vtanh(inner));
    });
}

}  // namespace

extern const OpKernels op_kernels;
const OpKernels op_kernels = {rms_norm, add_rms_norm, rope_and_cache, silu_mul, gelu_tanh_mul};

}  // namespace AIO_ISA
}  // namespace aioengine
