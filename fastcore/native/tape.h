// A forward pass as a list of kernel calls with fixed addresses: recorded once, then run for steps of any size
// without a return to Python (and without the GIL) between kernels. What differs from step to step, the number
// of tokens and the addresses of the step's inputs, comes as StepArgs. Recorded and run through bindings.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace aioengine {

// The inputs of one step; all arrays int32.
struct StepArgs {
    int num_tokens = 0;
    int num_seqs = 0;
    const int32_t* input_ids = nullptr;     // [num_tokens]
    const int32_t* positions = nullptr;     // [num_tokens]
    // By group of layers that share a block table.
    std::vector<const int32_t*> slot_mappings;  // [num_tokens]
    std::vector<const int32_t*> block_tables;   // [num_seqs, block_table_stride]
    int64_t block_table_stride = 0;
    const int32_t* query_start = nullptr;  // [num_seqs + 1]
    const int32_t* seq_lens = nullptr;     // [num_seqs]
};

class Tape {
public:
    using Call = std::function<void(const StepArgs&)>;

    // Names the next group by the addresses that calls for its layers are recorded with.
    void add_group(const void* slot_mapping, const void* block_table) { groups_.push_back({slot_mapping, block_table}); }
    // The group that an address stands for, or -1.
    int group_of(const void* named) const {
        for (size_t g = 0; g < groups_.size(); ++g) {
            if (groups_[g].first == named || groups_[g].second == named) return int(g);
        }
        return -1;
    }
    size_t num_groups() const { return groups_.size(); }

    void add(Call call) { calls_.push_back(std::move(call)); }
    void run(const StepArgs& step) const {
        for (const Call& call : calls_) call(step);
    }
    int size() const { return int(calls_.size()); }

private:
    std::vector<Call> calls_;
    std::vector<std::pair<const void*, const void*>> groups_;
};

}  // namespace aioengine
