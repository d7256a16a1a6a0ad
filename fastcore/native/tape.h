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
    const int32_t* slot_mapping = nullptr;  // [num_tokens]
    const int32_t* block_table = nullptr;   // [num_seqs, block_table_stride]
    int64_t block_table_stride = 0;
    const int32_t* query_start = nullptr;  // [num_seqs + 1]
    const int32_t* seq_lens = nullptr;     // [num_seqs]
};

class Tape {
public:
    using Call = std::function<void(const StepArgs&)>;

    void add(Call call) { calls_.push_back(std::move(call)); }
    void run(const StepArgs& step) const {
        for (const Call& call : calls_) call(step);
    }
    int size() const { return int(calls_.size()); }

private:
    std::vector<Call> calls_;
};

}  // namespace aioengine
