// The next token of one row of float32 logits on the CPU: penalties, temperature, filters, draw, and
// log-probabilities. Same definitions as kernels/sampling.py, which is the oracle of the tests; here each row
// takes a few passes over its logits and the noise is computed only where a token can still win.
// A result depends on its row alone. Knows no Python. Used through bindings.cpp by
// aioengine/sampling_backend.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace aioengine {

// One row of the array that aioengine/sampling_backend.py calls SETTINGS.
struct RowSettings {
    float temperature;  // below kGreedyTemperature: the most likely token
    float top_p;        // (0, 1]; 1 keeps all
    float min_p;        // [0, 1]; 0 keeps all
    int32_t top_k;      // 1 to the size of the vocabulary, which keeps all
    uint64_t seed;
    int32_t position;  // number of output tokens so far
    float repetition_penalty;
    float frequency_penalty;
    float presence_penalty;
};
static_assert(sizeof(RowSettings) == 40);

constexpr float kGreedyTemperature = 1e-5f;

enum Status : int32_t { kOk = 0, kNotFinite = 1, kNothingAllowed = 2 };

// One token for each of logits[rows[i]]; stride in elements. A token lies inside the vocabulary whatever its status.
void choose_tokens(const float* logits, ptrdiff_t stride, int32_t vocab_size, const int64_t* rows, int num_rows,
                   const RowSettings* settings, int32_t* token_ids, int32_t* statuses);

// The tokens of one sequence: what its penalties need, at the cost of the tokens it has, not of the vocabulary.
class TokenCounts {
public:
    explicit TokenCounts(int32_t vocab_size) : marks_(size_t(vocab_size), 0) {}

    // Starts over with these tokens; ids must lie in the vocabulary.
    void reset(const int32_t* prompt_ids, size_t num_prompt, const int32_t* output_ids, size_t num_output);
    void add(int32_t id);  // one more output token
    void penalize(float* logits, const RowSettings& settings) const;
    int32_t vocab_size() const { return int32_t(marks_.size()); }

private:
    void see(int32_t id);

    std::vector<int32_t> marks_;  // 0: never seen, else 1 + how often it is in the output
    std::vector<int32_t> seen_;   // ids with a mark
};

// Log-probability of one token of each of logits[rows[i]], floored at `floor`, and its rank: 1 + number of
// strictly greater logits, or 0 if the logits hold NaN or +inf. From offsets[i] on in the last two arrays:
// the counts[i] greatest ones, lowest id first on ties; for -1 all values in the order of the ids, and no ids.
void score_tokens(const float* logits, ptrdiff_t stride, int32_t vocab_size, const int64_t* rows, int num_rows,
                  const int64_t* token_ids, const int64_t* counts, float floor, float* logprobs, int32_t* ranks,
                  const int64_t* offsets, int32_t* top_ids, float* top_logprobs);

}  // namespace aioengine
