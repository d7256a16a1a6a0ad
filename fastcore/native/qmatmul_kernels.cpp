// The matmul kernels of one instruction-set level (see kernels.h, qmatmul.h, and packed_matrix.h for the layouts).
//
// One loop does all the work: run_pass keeps a tile of ROWS rows x PANELS panels of y in registers and walks
// over k, adding x[k] * w[k] with one fused multiply-add per element. With few rows the weights are dequantized
// in registers on the way; with many, blocks of panels are first dequantized to float32 in the cache and the
// same loop runs over those. Both see the same weights and add in the same order (bitwise batch invariance).
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace aioengine {
namespace AIO_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kDirectRows = 16, kTileRows = 14, kTilePanels = 2;
constexpr int max_panels(int rows) { return rows <= 3 ? 4 : rows <= 10 ? 2 : 1; }
constexpr int max_float_panels(int rows) { return rows <= 6 ? 4 : rows <= 14 ? 2 : 1; }
#elif defined(__AVX2__)
constexpr int kDirectRows = 6, kTileRows = 6, kTilePanels = 1;
constexpr int max_panels(int rows) { return rows <= 2 ? 2 : 1; }
constexpr int max_float_panels(int rows) { return rows <= 2 ? 2 : 1; }
#else
constexpr int kDirectRows = 3, kTileRows = 3, kTilePanels = 1;
constexpr int max_panels(int) { return 1; }
constexpr int max_float_panels(int) { return 1; }
#endif

constexpr int kMaxTile = kDirectRows > kTileRows ? kDirectRows : kTileRows;

// Inputs of a panel that are dequantized at a time; a multiple of every group.
constexpr int kBlockInputs = 1024;

// ---- weight formats: open a group, load raw bits for kStep inputs, make a vector of weights ---------------

AIO_INLINE VF load_scale(const float* p) { return vload(p); }
AIO_INLINE VF load_scale(const uint16_t* p) { return vload_f16(p); }

struct Float32 {
    static constexpr int kGroup = 1, kStep = 1;
    static constexpr bool kIsFloat32 = true;
    struct Group {
        const float* w;
    };
    struct Raw {};
    AIO_INLINE Group open(const uint8_t* panel, size_t, int k) { return {(const float*)panel + size_t(k) * kPanel}; }
    AIO_INLINE Raw load(const Group&, int) { return {}; }
    template <int J> AIO_INLINE VF weight(const Group& g, const Raw&, int, int v) { return vload(g.w + v * kWidth); }
};

struct Float16 {
    static constexpr int kGroup = 1, kStep = 1;
    static constexpr bool kIsFloat32 = false;
    struct Group {
        const uint16_t* w;
    };
    struct Raw {};
    AIO_INLINE Group open(const uint8_t* panel, size_t, int k) { return {(const uint16_t*)panel + size_t(k) * kPanel}; }
    AIO_INLINE Raw load(const Group&, int) { return {}; }
    template <int J> AIO_INLINE VF weight(const Group& g, const Raw&, int, int v) { return vload_f16(g.w + v * kWidth); }
};

struct Bfloat16 : Float16 {
    template <int J> AIO_INLINE VF weight(const Group& g, const Raw&, int, int v) { return vload_bf16(g.w + v * kWidth); }
};

template <class Scale, bool HasMin>
struct Nibble {
    static constexpr int kGroup = 32, kStep = 8;
    static constexpr bool kIsFloat32 = false;
    struct Group {
        const uint32_t* words;
        VF scale[kPanelVecs], minimum[kPanelVecs];
    };
    struct Raw {
        VI words[kPanelVecs];
    };
    AIO_INLINE Group open(const uint8_t* panel, size_t scales_offset, int g) {
        Group group;
        group.words = (const uint32_t*)panel + size_t(g) * (kGroup / 8) * kPanel;
        const Scale* scales = (const Scale*)(panel + scales_offset) + size_t(g) * (HasMin ? 2 : 1) * kPanel;
        for (int v = 0; v < kPanelVecs; ++v) {
            group.scale[v] = load_scale(scales + v * kWidth);
            // Without a stored minimum it is -8 * scale, which is exact, as is the sum below.
            group.minimum[v] = HasMin ? load_scale(scales + kPanel + v * kWidth) : group.scale[v] * vset1(-8.0f);
        }
        return group;
    }
    AIO_INLINE Raw load(const Group& group, int step) {
        Raw raw;
        for (int v = 0; v < kPanelVecs; ++v) raw.words[v] = vload_int(group.words + step * kPanel + v * kWidth);
        return raw;
    }
    template <int J>
    AIO_INLINE VF weight(const Group& group, const Raw& raw, int, int v) {
        return vfma(nibble_float<J>(raw.words[v]), group.scale[v], group.minimum[v]);
    }
    template <int J>
    AIO_INLINE VF nibble_float(VI words) {
#if defined(__AVX512F__)
        // The permutation looks at the low four bits of each lane only: a table of 16 floats.
        const VF table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_permutexvar_ps(vshift_right<4 * J>(words), table);
#elif defined(__AVX2__)
        return vfloat(_mm256_and_si256(vshift_right<4 * J>(words), vset1_int(15)));
#else
        return vfloat(vshift_right<4 * J>(words) & vset1_int(15));
#endif
    }
};

template <class Scale, bool HasMin, int GroupInputs>
struct Byte {
    static constexpr int kGroup = GroupInputs, kStep = 4;
    static constexpr bool kIsFloat32 = false;
    struct Group {
        const int8_t* q;
        VF scale[kPanelVecs], minimum[kPanelVecs];
    };
    struct Raw {};
    AIO_INLINE Group open(const uint8_t* panel, size_t scales_offset, int g) {
        Group group;
        group.q = (const int8_t*)panel + size_t(g) * kGroup * kPanel;
        const Scale* scales = (const Scale*)(panel + scales_offset) + size_t(g) * (HasMin ? 2 : 1) * kPanel;
        for (int v = 0; v < kPanelVecs; ++v) {
            group.scale[v] = load_scale(scales + v * kWidth);
            if (HasMin) group.minimum[v] = load_scale(scales + kPanel + v * kWidth);
        }
        return group;
    }
    AIO_INLINE Raw load(const Group&, int) { return {}; }
    template <int J>
    AIO_INLINE VF weight(const Group& group, const Raw&, int step, int v) {
        const VF q = vload_i8(group.q + (step * kStep + J) * kPanel + v * kWidth);
        return HasMin ? vfma(q, group.scale[v], group.minimum[v]) : q * group.scale[v];
    }
};

// ---- the loop over k -----------------------------------------------------------------------------------

// A run of panels for one tile of rows.
struct Run {
    const uint8_t* panels;
    size_t panel_bytes, scales_offset;
    int count;         // panels
    int last_width;    // outputs in the last panel
    int k;
    const float* x;    // [k][rows]
    const float* init; // what the sums start from: bias (stride 0), y itself, or null for zero
    ptrdiff_t init_stride;
    float* y;
    ptrdiff_t ldy;
};

template <class F, int ROWS, int PANELS, int J>
AIO_INLINE void add_products(const typename F::Group (&groups)[PANELS], const typename F::Raw (&raw)[PANELS], int step,
                             const float* x, VF (&sums)[ROWS][PANELS * kPanelVecs]) {
    VF weights[PANELS * kPanelVecs];
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVecs; ++v) {
            weights[p * kPanelVecs + v] = F::template weight<J>(groups[p], raw[p], step, v);
        }
    }
#pragma GCC unroll 32
    for (int r = 0; r < ROWS; ++r) {
        const VF xr = vset1(x[J * ROWS + r]);
#pragma GCC unroll 16
        for (int c = 0; c < PANELS * kPanelVecs; ++c) sums[r][c] = vfma(xr, weights[c], sums[r][c]);
    }
}

template <class F, int ROWS, int PANELS>
AIO_INLINE void accumulate(const uint8_t* panels, size_t panel_bytes, size_t scales_offset, int k, const float* x,
                           VF (&sums)[ROWS][PANELS * kPanelVecs]) {
#pragma GCC unroll 2
    for (int g = 0; g < k / F::kGroup; ++g) {
        typename F::Group groups[PANELS];
        for (int p = 0; p < PANELS; ++p) groups[p] = F::open(panels + p * panel_bytes, scales_offset, g);
        for (int step = 0; step < F::kGroup / F::kStep; ++step) {
            typename F::Raw raw[PANELS];
            for (int p = 0; p < PANELS; ++p) raw[p] = F::load(groups[p], step);
            add_products<F, ROWS, PANELS, 0>(groups, raw, step, x, sums);
            if constexpr (F::kStep >= 4) {
                add_products<F, ROWS, PANELS, 1>(groups, raw, step, x, sums);
                add_products<F, ROWS, PANELS, 2>(groups, raw, step, x, sums);
                add_products<F, ROWS, PANELS, 3>(groups, raw, step, x, sums);
            }
            if constexpr (F::kStep == 8) {
                add_products<F, ROWS, PANELS, 4>(groups, raw, step, x, sums);
                add_products<F, ROWS, PANELS, 5>(groups, raw, step, x, sums);
                add_products<F, ROWS, PANELS, 6>(groups, raw, step, x, sums);
                add_products<F, ROWS, PANELS, 7>(groups, raw, step, x, sums);
            }
            x += F::kStep * ROWS;
        }
    }
}

template <class F, int ROWS, int PANELS>
void run_pass(const Run& run, int first) {
    constexpr int kVecs = PANELS * kPanelVecs;
    const int width = first + PANELS == run.count ? (PANELS - 1) * kPanel + run.last_width : PANELS * kPanel;
    const bool full = width == PANELS * kPanel;
    VF sums[ROWS][kVecs];
    for (int r = 0; r < ROWS; ++r) {
        const float* init = run.init + r * run.init_stride + first * kPanel;
        for (int c = 0; c < kVecs; ++c) {
            const int left = width - c * kWidth;
            if (run.init == nullptr || left <= 0) {
                sums[r][c] = vzero();
            } else {
                sums[r][c] = full || left >= kWidth ? vload(init + c * kWidth) : vload_some(init + c * kWidth, left);
            }
        }
    }
    accumulate<F, ROWS, PANELS>(run.panels + first * run.panel_bytes, run.panel_bytes, run.scales_offset, run.k, run.x,
                                sums);
    for (int r = 0; r < ROWS; ++r) {
        float* y = run.y + r * run.ldy + first * kPanel;
        for (int c = 0; c < kVecs; ++c) {
            const int left = width - c * kWidth;
            if (full || left >= kWidth) {
                vstore(y + c * kWidth, sums[r][c]);
            } else if (left > 0) {
                vstore_some(y + c * kWidth, sums[r][c], left);
            }
        }
    }
}

template <class F, int ROWS>
void run_tile(const Run& run) {
    constexpr int kMax = F::kIsFloat32 ? max_float_panels(ROWS) : max_panels(ROWS);
    const int passes = (run.count + kMax - 1) / kMax;
    int first = 0;
    for (int pass = 0; pass < passes; ++pass) {
        const int panels = run.count / passes + (pass < run.count % passes ? 1 : 0);
        if constexpr (kMax >= 4) {
            if (panels == 4) run_pass<F, ROWS, 4>(run, first);
            if (panels == 3) run_pass<F, ROWS, 3>(run, first);
        }
        if constexpr (kMax >= 2) {
            if (panels == 2) run_pass<F, ROWS, 2>(run, first);
        }
        if (panels == 1) run_pass<F, ROWS, 1>(run, first);
        first += panels;
    }
}

template <class F, int ROWS = 1>
void run_rows(const Run& run, int rows) {
    if (rows == ROWS) return run_tile<F, ROWS>(run);
    if constexpr (ROWS < kMaxTile) run_rows<F, ROWS + 1>(run, rows);
}

// ---- dequantized blocks --------------------------------------------------------------------------------

template <class F, int J>
AIO_INLINE void store_weights(const typename F::Group& group, const typename F::Raw& raw, int step, float* out) {
    for (int v = 0; v < kPanelVecs; ++v) {
        vstore(out + J * kPanel + v * kWidth, F::template weight<J>(group, raw, step, v));
    }
}

// Inputs [begin, end) of one panel as float32 [inputs][16].
template <class F>
void dequantize(const uint8_t* panel, size_t scales_offset, int begin, int end, float* out) {
    for (int g = begin / F::kGroup; g < end / F::kGroup; ++g) {
        const typename F::Group group = F::open(panel, scales_offset, g);
        for (int step = 0; step < F::kGroup / F::kStep; ++step) {
            const typename F::Raw raw = F::load(group, step);
            store_weights<F, 0>(group, raw, step, out);
            if constexpr (F::kStep >= 4) {
                store_weights<F, 1>(group, raw, step, out);
                store_weights<F, 2>(group, raw, step, out);
                store_weights<F, 3>(group, raw, step, out);
            }
            if constexpr (F::kStep == 8) {
                store_weights<F, 4>(group, raw, step, out);
                store_weights<F, 5>(group, raw, step, out);
                store_weights<F, 6>(group, raw, step, out);
                store_weights<F, 7>(group, raw, step, out);
            }
            out += F::kStep * kPanel;
        }
    }
}

// ---- a block of the product ----------------------------------------------------------------------------

int last_width(const MatmulBlock& block, int panel_end) {
    const Panels& weights = *block.panels;
    return panel_end == weights.count ? weights.n - (weights.count - 1) * kPanel : kPanel;
}

const uint8_t* panel(const Panels& weights, int index) { return weights.data + size_t(index) * weights.panel_bytes; }

Run direct_run(const MatmulBlock& block, int tile) {
    const Panels& weights = *block.panels;
    const int row = block.tiles.begin(tile);
    Run run;
    run.panels = panel(weights, block.panel_begin);
    run.panel_bytes = weights.panel_bytes;
    run.scales_offset = weights.scales_offset;
    run.count = block.panel_end - block.panel_begin;
    run.last_width = last_width(block, block.panel_end);
    run.k = weights.k;
    run.x = block.x + size_t(row) * weights.k;
    run.init = block.bias == nullptr ? nullptr : block.bias + block.panel_begin * kPanel;
    run.init_stride = 0;
    run.y = block.y + row * block.ldy + block.panel_begin * kPanel;
    run.ldy = block.ldy;
    return run;
}

template <class F>
void multiply_dequantized(const MatmulBlock& block) {
    const Panels& weights = *block.panels;
    const int inputs = weights.k < kBlockInputs ? weights.k : kBlockInputs;
    const size_t scratch_bytes = sizeof(float) * kTilePanels * inputs * kPanel;
    float* scratch = (float*)thread_scratch(Scratch::kWorker, scratch_bytes);
    for (int first = block.panel_begin; first < block.panel_end; first += kTilePanels) {
        const int end = first + kTilePanels < block.panel_end ? first + kTilePanels : block.panel_end;
        for (int begin = 0; begin < weights.k; begin += inputs) {
            const int stop = begin + inputs < weights.k ? begin + inputs : weights.k;
            for (int p = first; p < end; ++p) {
                dequantize<F>(panel(weights, p), weights.scales_offset, begin, stop,
                              scratch + size_t(p - first) * inputs * kPanel);
            }
            for (int tile = block.tile_begin; tile < block.tile_end; ++tile) {
                const int row = block.tiles.begin(tile), rows = block.tiles.rows(tile);
                Run run;
                run.panels = (const uint8_t*)scratch;
                run.panel_bytes = sizeof(float) * inputs * kPanel;
                run.scales_offset = 0;
                run.count = end - first;
                run.last_width = last_width(block, end);
                run.k = stop - begin;
                run.x = block.x + size_t(row) * weights.k + size_t(begin) * rows;
                run.y = block.y + row * block.ldy + first * kPanel;
                run.ldy = block.ldy;
                run.init = block.bias == nullptr ? nullptr : block.bias + first * kPanel;
                run.init_stride = 0;
                if (begin > 0) {  // go on from the sums so far: the order over k stays one chain
                    run.init = run.y;
                    run.init_stride = run.ldy;
                }
                run_rows<Float32>(run, rows);
            }
        }
    }
}

template <class F>
void multiply_format(const MatmulBlock& block) {
    if (block.tiles.count == 1 && block.tiles.base <= kDirectRows) {
        run_rows<F>(direct_run(block, 0), block.tiles.base);
    } else {
        multiply_dequantized<F>(block);
    }
}

void multiply(const MatmulBlock& block) {
    switch (block.panels->format) {
        case Format::kFloat32: return multiply_format<Float32>(block);
        case Format::kFloat16: return multiply_format<Float16>(block);
        case Format::kBfloat16: return multiply_format<Bfloat16>(block);
        case Format::kNibbleHalf: return multiply_format<Nibble<uint16_t, false>>(block);
        case Format::kNibbleHalfMin: return multiply_format<Nibble<uint16_t, true>>(block);
        case Format::kNibbleMin: return multiply_format<Nibble<float, true>>(block);
        case Format::kByteHalf: return multiply_format<Byte<uint16_t, false, 32>>(block);
        case Format::kByteHalfMin: return multiply_format<Byte<uint16_t, true, 32>>(block);
        case Format::kByteMin: return multiply_format<Byte<float, true, 32>>(block);
        case Format::kByte16: return multiply_format<Byte<float, false, 16>>(block);
    }
}

// Rows of x into [k][rows]. Whole vectors are stored one after the other, each covering the unused end of the
// one before; only the last must not run past the tile.
void pack_tile(const float* x, ptrdiff_t ldx, int rows, int k, float* packed) {
    int i = 0;
    for (; i + kWidth <= k; i += kWidth) {
        VF block[kWidth];
        for (int r = 0; r < kWidth; ++r) block[r] = r < rows ? vload(x + r * ldx + i) : vzero();
        transpose(block);
        for (int c = 0; c < kWidth; ++c) {
            float* to = packed + size_t(i + c) * rows;
            if (size_t(i + c) * rows + kWidth <= size_t(k) * rows) {
                vstore(to, block[c]);
            } else {
                vstore_some(to, block[c], rows);
            }
        }
    }
    for (; i < k; ++i) {
        for (int r = 0; r < rows; ++r) packed[size_t(i) * rows + r] = x[r * ldx + i];
    }
}

}  // namespace

extern const MatmulKernels matmul_kernels;
const MatmulKernels matmul_kernels = {kDirectRows, kTileRows, kTilePanels, pack_tile, multiply};

}  // namespace AIO_ISA
}  // namespace aioengine
