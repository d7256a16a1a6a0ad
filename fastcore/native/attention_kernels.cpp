// Paged attention of one instruction-set level (see kernels.h and attention.h).
//
// A segment of keys is worked through in tiles of 64 keys at absolute positions. For each tile the keys are
// transposed once, K^T [head_dim][64], and shared by all rows; a tile of ROWS rows makes its scores, the online
// softmax rescales what it has, and the values are added key by key. A key that a row does not see has weight
// zero, which changes no bit of that row; keys that no row of the item sees are never read, since their slots may
// hold anything.
#include "kernels.h"
#include "simd.h"

namespace aioengine {
namespace AIO_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVecs = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTileVecs = 2;
#else
constexpr int kTileRows = 2, kTileVecs = 4;
#endif

constexpr int kTileKeys = 64;
constexpr int kKeyVecs = kTileKeys / kWidth;
static_assert(kSegmentKeys % kTileKeys == 0, "segments end where tiles end");
static_assert(kKeyVecs % kTileVecs == 0, "scores are made kTileVecs vectors at a time");

constexpr float kMinusInfinity = -__builtin_inff();

const float kLanes[kTileKeys] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
                                 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

AIO_INLINE int lesser(int a, int b) { return a < b ? a : b; }
AIO_INLINE int greater(int a, int b) { return a > b ? a : b; }
AIO_INLINE int padded(int dim) { return (dim + kWidth - 1) / kWidth * kWidth; }

// What one item works on.
struct View {
    const AttentionArgs* args;
    int group, rows, row_dim;  // row_dim: head_dim in whole vectors
    int first_query;           // in the packed queries
    int first_position;        // of the item's first query
    int first_head;
    int kv_head;
    const int32_t* blocks;

    // Keys [begin, end) that a row sees.
    AIO_MEMBER int key_end(int row) const { return first_position + row / group + 1; }
    AIO_MEMBER int key_begin(int row) const {
        return args->window > 0 ? greater(0, key_end(row) - args->window) : 0;
    }
    // Offset of a key's row in the cache, in elements.
    AIO_MEMBER size_t cache_row(int key) const {
        const size_t block = size_t(blocks[key / args->block_size]);
        const size_t slot = (block * args->num_kv_heads + kv_head) * args->block_size + key % args->block_size;
        return slot * 2 * args->head_dim;
    }
};

View make_view(const AttentionArgs& args, const AttentionItem& item) {
    View view;
    view.args = &args;
    view.group = args.num_heads / args.num_kv_heads;
    view.rows = (item.query_end - item.query_begin) * view.group;
    view.row_dim = padded(args.head_dim);
    const int start = args.query_start[item.seq];
    const int queries = args.query_start[item.seq + 1] - start;
    view.first_query = start + item.query_begin;
    view.first_position = args.seq_lens[item.seq] - queries + item.query_begin;
    view.first_head = item.kv_head * view.group;
    view.kv_head = item.kv_head;
    view.blocks = args.block_table + item.seq * args.block_table_stride;
    return view;
}

AIO_INLINE const float* query_row(const View& view, int row) {
    const ptrdiff_t query = view.first_query + row / view.group;
    const int head = view.first_head + row % view.group;
    return view.args->q + (query * view.args->num_heads + head) * view.args->head_dim;
}

// Tile after tile [row_dim][rows of the tile], scaled.
void pack_queries(const View& view, float* packed) {
    for (int first = 0; first < view.rows; first += kTileRows) {
        const int rows = lesser(kTileRows, view.rows - first);
        float* tile = packed + size_t(first) * view.row_dim;
        for (int r = 0; r < rows; ++r) {
            const float* q = query_row(view, first + r);
            for (int d = 0; d < view.args->head_dim; ++d) tile[d * rows + r] = q[d] * view.args->scale;
            for (int d = view.args->head_dim; d < view.row_dim; ++d) tile[d * rows + r] = 0.0f;
        }
    }
}

// ---- cache rows to float32 -----------------------------------------------------------------------------

template <KvType TYPE>
AIO_INLINE VF load_cached(const void* cache, size_t at, int count) {
    if (TYPE == KvType::kFloat32) {
        const float* p = (const float*)cache + at;
        return count == kWidth ? vload(p) : vload_some(p, count);
    }
    const uint16_t* p = (const uint16_t*)cache + at;
    uint16_t some[kWidth];
    if (count < kWidth) {
        for (int i = 0; i < kWidth; ++i) some[i] = i < count ? p[i] : uint16_t(0);
        p = some;
    }
    return TYPE == KvType::kFloat16 ? vload_f16(p) : vload_bf16(p);
}

struct Tile {
    int base;          // absolute position of its first key
    int begin, end;    // keys that some row sees, relative to base
    size_t at[kTileKeys];  // their cache rows
};

// keys [row_dim][64]; keys outside [begin, end) are zero.
template <KvType TYPE>
void load_keys(const View& view, const Tile& tile, float* keys) {
    const int dim = view.args->head_dim;
    for (int first = 0; first < kTileKeys; first += kWidth) {
        for (int d = 0; d < view.row_dim; d += kWidth) {
            const int count = lesser(kWidth, dim - d);
            VF block[kWidth];
            for (int i = 0; i < kWidth; ++i) {
                const int key = first + i;
                block[i] = key >= tile.begin && key < tile.end
                               ? load_cached<TYPE>(view.args->kv_cache, tile.at[key] + d, count)
                               : vzero();
            }
            transpose(block);
            for (int i = 0; i < kWidth; ++i) vstore(keys + size_t(d + i) * kTileKeys + first, block[i]);
        }
    }
}

// Points each key of the tile to its value row: in the cache where it can be used as it is, else to a copy.
template <KvType TYPE>
void load_values(const View& view, const Tile& tile, float* copies, const float** values) {
    const int dim = view.args->head_dim;
    const bool in_place = TYPE == KvType::kFloat32 && dim == view.row_dim;
    for (int key = tile.begin; key < tile.end; ++key) {
        const size_t at = tile.at[key] + dim;
        if (in_place) {
            values[key] = (const float*)view.args->kv_cache + at;
            continue;
        }
        float* copy = copies + size_t(key) * view.row_dim;
        for (int d = 0; d < dim; d += kWidth) {
            vstore(copy + d, load_cached<TYPE>(view.args->kv_cache, at + d, lesser(kWidth, dim - d)));
        }
        values[key] = copy;
    }
}

// ---- the two products ----------------------------------------------------------------------------------

// scores[ROWS][64] = q k, for the first `vectors` vectors of keys (rounded up to kTileVecs).
template <int ROWS>
void make_scores(const float* q, const float* keys, int dim, int vectors, float* scores) {
    for (int first = 0; first < vectors; first += kTileVecs) {
        VF sums[ROWS][kTileVecs];
        for (int r = 0; r < ROWS; ++r) {
            for (int c = 0; c < kTileVecs; ++c) sums[r][c] = vzero();
        }
        const float* key = keys + first * kWidth;
        for (int d = 0; d < dim; ++d) {
            VF k[kTileVecs];
            for (int c = 0; c < kTileVecs; ++c) k[c] = vload(key + size_t(d) * kTileKeys + c * kWidth);
            for (int r = 0; r < ROWS; ++r) {
                const VF qr = vset1(q[d * ROWS + r]);
                for (int c = 0; c < kTileVecs; ++c) sums[r][c] = vfma(qr, k[c], sums[r][c]);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            for (int c = 0; c < kTileVecs; ++c) vstore(scores + r * kTileKeys + (first + c) * kWidth, sums[r][c]);
        }
    }
}

// out = out * rescale + weights values, for VECS vectors of columns.
template <int ROWS, int VECS>
AIO_INLINE void add_values_columns(const float* weights, const float* rescale, const float* const* values, int begin,
                                   int end, int column, float* out, int row_dim) {
    VF sums[ROWS][VECS];
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < VECS; ++c) {
            sums[r][c] = vload(out + size_t(r) * row_dim + column + c * kWidth) * vset1(rescale[r]);
        }
    }
    for (int key = begin; key < end; ++key) {
        VF v[VECS];
        for (int c = 0; c < VECS; ++c) v[c] = vload(values[key] + column + c * kWidth);
        for (int r = 0; r < ROWS; ++r) {
            const VF w = vset1(weights[r * kTileKeys + key]);
            for (int c = 0; c < VECS; ++c) sums[r][c] = vfma(w, v[c], sums[r][c]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < VECS; ++c) vstore(out + size_t(r) * row_dim + column + c * kWidth, sums[r][c]);
    }
}

template <int ROWS>
void add_values(const float* weights, const float* rescale, const float* const* values, int begin, int end, float* out,
                int row_dim) {
    int column = 0;
    for (; column + kTileVecs * kWidth <= row_dim; column += kTileVecs * kWidth) {
        add_values_columns<ROWS, kTileVecs>(weights, rescale, values, begin, end, column, out, row_dim);
    }
    for (; column < row_dim; column += kWidth) {
        add_values_columns<ROWS, 1>(weights, rescale, values, begin, end, column, out, row_dim);
    }
}

// ---- softmax -------------------------------------------------------------------------------------------

// Turns a row's scores into weights relative to its new maximum; returns the factor for what it had.
float soften(const View& view, const Tile& tile, int row, int vectors, float* scores, float* maximum, float* sum) {
    const VF first_seen = vset1(float(view.key_begin(row) - tile.base));
    const VF first_unseen = vset1(float(view.key_end(row) - tile.base));
    const VF nothing = vset1(kMinusInfinity);
    const float cap = view.args->softcap;
    VF largest = nothing;
    for (int c = 0; c < vectors; ++c) {
        VF s = vload(scores + c * kWidth);
        if (cap > 0.0f) s = vset1(cap) * vtanh(s / vset1(cap));
        const VF lane = vload(kLanes + c * kWidth);
        s = vselect_less(lane, first_seen, nothing, vselect_less(lane, first_unseen, s, nothing));
        vstore(scores + c * kWidth, s);
        largest = vmax(largest, s);
    }
    const float tile_maximum = vmax_lanes(largest);
    const float before = *maximum;
    const float now = tile_maximum > before ? tile_maximum : before;
    const float reference = now == kMinusInfinity ? 0.0f : now;  // a row that has seen no key yet
    const VF shift = vset1(reference);
    VF sums = vzero();
    for (int c = 0; c < vectors; ++c) {
        const VF w = vexp(vload(scores + c * kWidth) - shift);
        vstore(scores + c * kWidth, w);
        sums = sums + w;
    }
    float factors[kWidth];
    vstore(factors, vexp(vset1(before) - shift));
    *maximum = now;
    *sum = *sum * factors[0] + vsum(sums);
    return factors[0];
}

// ---- a tile of rows against a tile of keys ---------------------------------------------------------------

struct State {
    float *maxima, *sums, *out;
};

State state_at(float* floats, int rows) { return {floats, floats + rows, floats + 2 * size_t(rows)}; }

template <int ROWS>
void attend_tile(const View& view, const Tile& tile, const float* queries, const float* keys,
                 const float* const* values, float* scores, const State& state, int row) {
    const int begin = greater(view.key_begin(row) - tile.base, tile.begin);
    const int end = lesser(view.key_end(row + ROWS - 1) - tile.base, tile.end);
    if (begin >= end) return;
    const int vectors = (end + kWidth - 1) / kWidth;
    make_scores<ROWS>(queries + size_t(row) * view.row_dim, keys, view.args->head_dim, vectors, scores);
    float rescale[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        rescale[r] = soften(view, tile, row + r, vectors, scores + r * kTileKeys, &state.maxima[row + r],
                            &state.sums[row + r]);
    }
    add_values<ROWS>(scores, rescale, values, begin, end, state.out + size_t(row) * view.row_dim, view.row_dim);
}

template <int ROWS = 1>
void attend_rows(const View& view, const Tile& tile, const float* queries, const float* keys,
                 const float* const* values, float* scores, const State& state, int row, int rows) {
    if (rows == ROWS) return attend_tile<ROWS>(view, tile, queries, keys, values, scores, state, row);
    if constexpr (ROWS < kTileRows) {
        attend_rows<ROWS + 1>(view, tile, queries, keys, values, scores, state, row, rows);
    }
}

// ---- the table's functions -----------------------------------------------------------------------------

size_t state_floats(int rows, int head_dim) { return size_t(rows) * (2 + padded(head_dim)); }

size_t scratch_floats(int rows, int head_dim) {
    return size_t(padded(head_dim)) * (rows + 2 * kTileKeys) + kTileRows * kTileKeys;
}

template <KvType TYPE>
void run_segment_typed(const AttentionArgs& args, const AttentionItem& item, int segment, float* floats,
                       float* scratch) {
    const View view = make_view(args, item);
    const State state = state_at(floats, view.rows);
    for (int r = 0; r < view.rows; ++r) {
        state.maxima[r] = kMinusInfinity;
        state.sums[r] = 0.0f;
    }
    for (size_t i = 0; i < size_t(view.rows) * view.row_dim; ++i) state.out[i] = 0.0f;

    float* queries = scratch;
    float* keys = queries + size_t(view.rows) * view.row_dim;
    float* copies = keys + size_t(view.row_dim) * kTileKeys;
    float* scores = copies + size_t(view.row_dim) * kTileKeys;
    if (view.row_dim != args.head_dim) {
        for (size_t i = 0; i < size_t(view.row_dim) * kTileKeys; ++i) copies[i] = 0.0f;
    }
    pack_queries(view, queries);

    const int first_key = view.key_begin(0), end_key = view.key_end(view.rows - 1);
    const float* values[kTileKeys];
    for (int base = segment * kSegmentKeys; base < (segment + 1) * kSegmentKeys; base += kTileKeys) {
        Tile tile;
        tile.base = base;
        tile.begin = greater(first_key - base, 0);
        tile.end = lesser(end_key - base, kTileKeys);
        if (tile.begin >= tile.end) continue;
        for (int key = tile.begin; key < tile.end; ++key) tile.at[key] = view.cache_row(base + key);
        load_keys<TYPE>(view, tile, keys);
        load_values<TYPE>(view, tile, copies, values);
        for (int row = 0; row < view.rows; row += kTileRows) {
            attend_rows(view, tile, queries, keys, values, scores, state, row, lesser(kTileRows, view.rows - row));
        }
    }
}

void run_segment(const AttentionArgs& args, const AttentionItem& item, int segment, float* state, float* scratch) {
    switch (args.kv_type) {
        case KvType::kFloat32: return run_segment_typed<KvType::kFloat32>(args, item, segment, state, scratch);
        case KvType::kFloat16: return run_segment_typed<KvType::kFloat16>(args, item, segment, state, scratch);
        case KvType::kBfloat16: return run_segment_typed<KvType::kBfloat16>(args, item, segment, state, scratch);
    }
}

// total becomes the state of both ranges of keys. A side that has seen no key changes no bit of the other.
void merge(float* total_floats, const float* state_floats, int rows, int head_dim) {
    const int row_dim = padded(head_dim);
    const State total = state_at(total_floats, rows);
    const State state = state_at(const_cast<float*>(state_floats), rows);
    for (int r = 0; r < rows; ++r) {
        const float a = total.maxima[r], b = state.maxima[r];
        const float now = a > b ? a : b;
        const VF shift = vset1(now == kMinusInfinity ? 0.0f : now);
        const VF fa = vexp(vset1(a) - shift), fb = vexp(vset1(b) - shift);
        float factors[2][kWidth];
        vstore(factors[0], fa);
        vstore(factors[1], fb);
        total.maxima[r] = now;
        total.sums[r] = total.sums[r] * factors[0][0] + state.sums[r] * factors[1][0];
        float* to = total.out + size_t(r) * row_dim;
        const float* from = state.out + size_t(r) * row_dim;
        for (int d = 0; d < row_dim; d += kWidth) vstore(to + d, vload(to + d) * fa + vload(from + d) * fb);
    }
}

void finish(const AttentionArgs& args, const AttentionItem& item, const float* floats) {
    const View view = make_view(args, item);
    const State state = state_at(const_cast<float*>(floats), view.rows);
    for (int r = 0; r < view.rows; ++r) {
        float* to = args.out + (query_row(view, r) - args.q);
        const float* from = state.out + size_t(r) * view.row_dim;
        const VF sum = vset1(state.sums[r]);
        for (int d = 0; d < args.head_dim; d += kWidth) {
            const int count = lesser(kWidth, args.head_dim - d);
            if (count == kWidth) {
                vstore(to + d, vload(from + d) / sum);
            } else {
                vstore_some(to + d, vload(from + d) / sum, count);
            }
        }
    }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {state_floats, scratch_floats, run_segment, merge, finish};

}  // namespace AIO_ISA
}  // namespace aioengine
