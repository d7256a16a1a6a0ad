// See attention.h. This file cuts the work into items and, when there are few of them and the context is long,
// lets the segments of an item run in parallel.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace aioengine {
namespace {

constexpr int kItemRows = 96;

struct Work {
    AttentionItem item;
    int rows;
    int segment_begin, segment_end;
};

std::vector<Work> cut_work(const AttentionArgs& args, int num_seqs) {
    const int group = args.num_heads / args.num_kv_heads;
    const int chunk = std::max(1, kItemRows / group);
    std::vector<Work> work;
    for (int s = 0; s < num_seqs; ++s) {
        const int queries = args.query_start[s + 1] - args.query_start[s];
        const int context = args.seq_lens[s] - queries;
        // Late chunks see the most keys: they go first, so that the last ones to run are short.
        for (int end = queries; end > 0; end -= chunk) {
            const int begin = std::max(0, end - chunk);
            const int first_key = args.window > 0 ? std::max(0, context + begin + 1 - args.window) : 0;
            const int last_key = context + end - 1;
            for (int h = 0; h < args.num_kv_heads; ++h) {
                work.push_back({{s, h, begin, end}, (end - begin) * group, first_key / kSegmentKeys,
                                last_key / kSegmentKeys + 1});
            }
        }
    }
    return work;
}

// Each item by one thread, segment after segment.
void run_whole(const AttentionKernels& kernels, const AttentionArgs& args, const std::vector<Work>& work) {
    parallel_for(int(work.size()), [&](int index) {
        const Work& w = work[index];
        const size_t state_floats = kernels.state_floats(w.rows, args.head_dim);
        const size_t floats = 2 * state_floats + kernels.scratch_floats(w.rows, args.head_dim);
        float* total = static_cast<float*>(thread_scratch(Scratch::kWorker, floats * sizeof(float)));
        float* state = total + state_floats;
        float* scratch = state + state_floats;
        kernels.run_segment(args, w.item, w.segment_begin, total, scratch);
        for (int segment = w.segment_begin + 1; segment < w.segment_end; ++segment) {
            kernels.run_segment(args, w.item, segment, state, scratch);
            kernels.merge(total, state, w.rows, args.head_dim);
        }
        kernels.finish(args, w.item, total);
    });
}

// Each segment of each item by itself, then the merges in the same order as above.
void run_split(const AttentionKernels& kernels, const AttentionArgs& args, const std::vector<Work>& work) {
    struct Part {
        int work, segment;
        size_t state;
    };
    std::vector<Part> parts;
    std::vector<size_t> first_part;
    size_t floats = 0;
    for (int i = 0; i < int(work.size()); ++i) {
        first_part.push_back(parts.size());
        for (int segment = work[i].segment_begin; segment < work[i].segment_end; ++segment) {
            parts.push_back({i, segment, floats});
            floats += kernels.state_floats(work[i].rows, args.head_dim);
        }
    }
    float* states = static_cast<float*>(thread_scratch(Scratch::kShared, floats * sizeof(float)));
    parallel_for(int(parts.size()), [&](int index) {
        const Part& part = parts[index];
        const Work& w = work[part.work];
        const size_t num_bytes = kernels.scratch_floats(w.rows, args.head_dim) * sizeof(float);
        float* scratch = static_cast<float*>(thread_scratch(Scratch::kWorker, num_bytes));
        kernels.run_segment(args, w.item, part.segment, states + part.state, scratch);
    });
    for (int i = 0; i < int(work.size()); ++i) {
        const Work& w = work[i];
        float* total = states + parts[first_part[i]].state;
        for (int s = 1; s < w.segment_end - w.segment_begin; ++s) {
            kernels.merge(total, states + parts[first_part[i] + s].state, w.rows, args.head_dim);
        }
        kernels.finish(args, w.item, total);
    }
}

}  // namespace

void paged_attention(const AttentionArgs& args, int num_seqs) {
    const AttentionKernels& kernels = *current_isa().attention;
    const std::vector<Work> work = cut_work(args, num_seqs);
    int longest = 0;
    for (const Work& w : work) longest = std::max(longest, w.segment_end - w.segment_begin);
    if (num_threads() > 1 && longest > 1 && int(work.size()) < 4 * num_threads()) {
        run_split(kernels, args, work);
    } else {
        run_whole(kernels, args, work);
    }
}

}  // namespace aioengine
