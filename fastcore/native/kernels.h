// What the *_kernels.cpp files offer and what the drivers hand them. Each of those files is compiled once per
// instruction-set level and fills a table for it; isa.h chooses the level, the drivers (qmatmul, cpu_ops,
// attention) split the work and call through the table. Plain data only: code for one level must not share
// an inline function with code for another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace aioengine {

// ---- packed weights (see packed_matrix.h) --------------------------------------------------------------

enum class Format : uint8_t {
    kFloat32,
    kFloat16,
    kBfloat16,
    kNibbleHalf,     // q - 8, float16 scale                (Q4_0)
    kNibbleHalfMin,  // float16 scale and minimum           (Q4_1)
    kNibbleMin,      // float32 scale and minimum           (Q4_K)
    kByteHalf,       // float16 scale                       (Q8_0, Q5_0)
    kByteHalfMin,    // float16 scale and minimum           (Q5_1)
    kByteMin,        // float32 scale and minimum           (Q5_K)
    kByte16,         // groups of 16, float32 scale         (Q6_K)
};

constexpr int kPanelOutputs = 16;

struct Panels {
    Format format;
    int n, k;              // outputs, inputs
    int count;             // ceil(n / 16)
    size_t panel_bytes;    // a multiple of 64
    size_t scales_offset;  // of the scales plane in a panel
    const uint8_t* data;
};

// ---- matmul --------------------------------------------------------------------------------------------

// How m rows are cut into tiles of at most `max_rows`, as evenly as possible.
struct RowTiles {
    int count, base, extra;
    static RowTiles cut(int rows, int max_rows) {
        const int count = (rows + max_rows - 1) / max_rows;
        return {count, count ? rows / count : 0, count ? rows % count : 0};
    }
    __attribute__((always_inline)) int begin(int tile) const { return tile * base + (tile < extra ? tile : extra); }
    __attribute__((always_inline)) int rows(int tile) const { return base + (tile < extra ? 1 : 0); }
};

// A block of y = x W^T: panels [panel_begin, panel_end) for tiles [tile_begin, tile_end) of x.
struct MatmulBlock {
    const Panels* panels;
    int panel_begin, panel_end;
    RowTiles tiles;
    int tile_begin, tile_end;
    const float* x;     // tile after tile, each [k][rows of the tile]
    const float* bias;  // of the segment's outputs, or null
    float* y;           // row 0, the segment's first output
    ptrdiff_t ldy;
};

struct MatmulKernels {
    int direct_rows;  // up to so many rows, one tile dequantizes in registers
    int tile_rows;    // rows of a full tile otherwise
    int tile_panels;  // panels such a tile works on at once
    void (*pack_tile)(const float* x, ptrdiff_t ldx, int rows, int k, float* packed);
    void (*multiply)(const MatmulBlock& block);
};

// ---- layer operations ----------------------------------------------------------------------------------

enum class KvType : int { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

struct RopeArgs {
    const float* qkv;  // [T, (H + 2 KH) D]
    const int32_t* positions;
    const float* cos_sin;  // [max_positions, rotary_dim]: cosines, then sines
    const int32_t* slot_mapping;
    void* kv_cache;  // [blocks, KH, block_size, 2 D]
    KvType kv_type;
    const float* q_norm;  // [D] or null
    const float* k_norm;
    float eps;
    float* q_out;  // [T, H D]
    int num_heads, num_kv_heads, head_dim, rotary_dim, block_size;
};

struct OpKernels {
    void (*rms_norm)(const float* x, const float* w, float eps, float* y, int rows, int dim);
    void (*add_rms_norm)(const float* x, float* residual, const float* w, float eps, float* y, int rows, int dim);
    void (*rope_and_cache)(const RopeArgs& args, int token_begin, int token_end);
    void (*silu_mul)(const float* gate_up, float* y, int rows, int dim);
    void (*gelu_tanh_mul)(const float* gate_up, float* y, int rows, int dim);
};

// ---- attention -----------------------------------------------------------------------------------------

struct AttentionArgs {
    const float* q;  // [T, H, D]
    const void* kv_cache;
    KvType kv_type;
    const int32_t* block_table;  // row s at block_table + s * block_table_stride
    ptrdiff_t block_table_stride;
    const int32_t* query_start;  // [S + 1]
    const int32_t* seq_lens;     // [S]
    int num_heads, num_kv_heads, head_dim, block_size;
    float scale;
    int window;     // 0: no window
    float softcap;  // 0: none
    float* out;     // [T, H, D]
};

// Queries [query_begin, query_end) of one sequence, for the query heads that share one kv head: a row for each
// query and head, heads running fastest. The state of a row is its running maximum, its sum and its output before
// the division: [rows] maxima, [rows] sums, [rows][head_dim padded to whole vectors].
struct AttentionItem {
    int seq, kv_head, query_begin, query_end;
};

// Keys are worked through in segments with boundaries at absolute positions, so that the order of summation
// knows nothing of chunks and batches; segments of one item may run in parallel and are merged in order.
constexpr int kSegmentKeys = 256;

struct AttentionKernels {
    size_t (*state_floats)(int rows, int head_dim);
    size_t (*scratch_floats)(int rows, int head_dim);
    void (*run_segment)(const AttentionArgs& args, const AttentionItem& item, int segment, float* state,
                        float* scratch);
    void (*merge)(float* total, const float* state, int rows, int head_dim);
    void (*finish)(const AttentionArgs& args, const AttentionItem& item, const float* state);
};

}  // namespace aioengine
