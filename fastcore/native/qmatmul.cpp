// See qmatmul.h. This file splits the work; it packs the rows of x once per call into the order in which all
// kernels read them, then hands out blocks of panels.
#include "qmatmul.h"

#include <algorithm>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace aioengine {
namespace {

// A block of work: panels of one segment and a range of row tiles.
struct Block {
    int segment, panel_begin, panel_end, tile_begin, tile_end;
};

const float* pack_rows(const MatmulKernels& kernels, const float* x, int m, ptrdiff_t ldx, int k,
                       const RowTiles& tiles) {
    if (m == 1) return x;
    float* packed = static_cast<float*>(thread_scratch(Scratch::kShared, sizeof(float) * (size_t(m) * k + 64)));
    const auto pack = [&](int tile) {
        const int row = tiles.begin(tile);
        kernels.pack_tile(x + row * ldx, ldx, tiles.rows(tile), k, packed + size_t(row) * k);
    };
    if (tiles.count < 4) {
        for (int tile = 0; tile < tiles.count; ++tile) pack(tile);
    } else {
        parallel_for(tiles.count, pack);
    }
    return packed;
}

}  // namespace

void matmul(const float* x, int m, ptrdiff_t ldx, const PackedMatrix& weights, const float* bias, float* y,
            ptrdiff_t ldy) {
    if (m <= 0) return;
    const MatmulKernels& kernels = *current_isa().matmul;
    const bool direct = m <= kernels.direct_rows;
    const RowTiles tiles = RowTiles::cut(m, direct ? m : kernels.tile_rows);
    const float* packed = pack_rows(kernels, x, m, ldx, weights.k(), tiles);

    // Blocks of whole passes, a few per thread, so that a thread which the system holds up does not hold up the rest.
    const auto& segments = weights.segments();
    const int threads = num_threads();
    int panels = 0;
    for (const auto& segment : segments) panels += segment->panels.count;
    const int wanted = threads == 1 ? 1 : direct ? threads * 2 : threads * 6;
    const int block_panels = std::max(direct ? 4 : kernels.tile_panels,
                                      (panels + wanted - 1) / wanted / kernels.tile_panels * kernels.tile_panels);
    const int panel_blocks = (panels + block_panels - 1) / block_panels;
    const int row_splits = std::max(1, std::min(threads * 2 / panel_blocks, tiles.count / 6));
    std::vector<Block> blocks;
    for (int s = 0; s < int(segments.size()); ++s) {
        const int count = segments[s]->panels.count;
        const int parts = std::max(1, (count + block_panels / 2) / block_panels);
        for (int part = 0; part < parts; ++part) {
            const Range range = split_range(count, parts, part);
            for (int split = 0; split < row_splits; ++split) {
                const Range rows = split_range(tiles.count, row_splits, split);
                blocks.push_back({s, range.begin, range.end, rows.begin, rows.end});
            }
        }
    }
    std::vector<int> first_output(segments.size(), 0);
    for (size_t s = 1; s < segments.size(); ++s) first_output[s] = first_output[s - 1] + segments[s - 1]->panels.n;

    parallel_for(int(blocks.size()), [&](int index) {
        const Block& block = blocks[index];
        const int output = first_output[block.segment];
        kernels.multiply({&segments[block.segment]->panels, block.panel_begin, block.panel_end, tiles, block.tile_begin,
                          block.tile_end, packed, bias == nullptr ? nullptr : bias + output, y + output, ldy});
    });
}

}  // namespace aioengine
