#include "sampling.h"

#include "threads.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

// The loops marked so are compiled once per instruction set and chosen at load time.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define AIO_VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define AIO_VECTORIZED
#endif
#define AIO_INLINE static inline __attribute__((always_inline))

namespace aioengine {

namespace {

// Memory of one thread, reused from row to row.
struct RowMemory {
    std::vector<float> values, block_max, weights, candidates;
    std::vector<int32_t> ids, order;
};

RowMemory& thread_memory() {
    static thread_local RowMemory memory;
    return memory;
}

constexpr int kBlock = 64;  // tokens handled together; 16 calls of Philox make their noise
constexpr int kGroups = kBlock / 4;
constexpr int kLanes = 16;  // partial sums, fixed so that a sum does not depend on the vector width
constexpr int kBins = 512;
constexpr int kManyRows = 16;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLog2 = 0.693147181f;
constexpr float kUniformScale = 4.6566127342e-10f;      // the float32 below 2^-31
constexpr float kUniformFloor = 2.3283064365386963e-10f;  // 2^-32
constexpr float kMaxNoise = 22.1808f;                   // above -log(2^-32 as noise)

AIO_INLINE int32_t bits_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

AIO_INLINE float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Orders floats as integers, NaN outside of both infinities; integer maxima are vectorized, float ones not.
AIO_INLINE int32_t key_of(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

constexpr int32_t kInfKey = 0x7f800000;
constexpr int32_t kMinusInfKey = int32_t(0xff800000u) ^ 0x7fffffff;

// e^x to about 2 ulp for x <= 0; 1e-38 instead of less.
AIO_INLINE float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * float_of((int32_t(n) + 127) << 23);
}

struct Extremes {
    int32_t least, greatest;  // keys
};

AIO_VECTORIZED Extremes find_extremes(const float* x, int32_t n) {
    int32_t least = INT32_MAX, greatest = INT32_MIN;
    for (int32_t i = 0; i < n; ++i) {
        const int32_t key = key_of(bits_of(x[i]));
        least = key < least ? key : least;
        greatest = key > greatest ? key : greatest;
    }
    return {least, greatest};
}

Status status_of(const Extremes& e) {
    if (e.greatest >= kInfKey || e.least < kMinusInfKey) return kNotFinite;
    return e.greatest == kMinusInfKey ? kNothingAllowed : kOk;
}

// Index of the first element equal to `value`, which is there.
AIO_VECTORIZED int32_t find_first(const float* x, int32_t n, float value) {
    int32_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        int32_t hits = 0;
        for (int j = 0; j < kBlock; ++j) hits += x[i + j] == value;
        if (hits != 0) break;
    }
    while (i < n - 1 && x[i] != value) ++i;
    return i;
}

// out = x / divisor, filled up with -inf to whole blocks.
AIO_VECTORIZED void divide(const float* x, int32_t n, float divisor, float* out) {
    for (int32_t i = 0; i < n; ++i) out[i] = x[i] / divisor;
    for (int32_t i = n; i % kBlock != 0; ++i) out[i] = -kInf;
}

AIO_VECTORIZED void find_block_maxima(const float* z, int32_t num_blocks, float* maxima) {
    for (int32_t b = 0; b < num_blocks; ++b) {
        int32_t greatest = INT32_MIN;
        for (int j = 0; j < kBlock; ++j) {
            const int32_t key = key_of(bits_of(z[b * kBlock + j]));
            greatest = key > greatest ? key : greatest;
        }
        maxima[b] = float_of(key_of(greatest));
    }
}

// weights = e^(z - top) where z >= threshold, else 0; blocks wholly below it are left as they are.
AIO_VECTORIZED double exponentiate(const float* z, const float* block_max, int32_t num_blocks, float top,
                                   float threshold, float* weights) {
    double total = 0;
    for (int32_t b = 0; b < num_blocks; ++b) {
        if (!(block_max[b] >= threshold)) continue;
        const float* zb = z + ptrdiff_t(b) * kBlock;
        float* wb = weights + ptrdiff_t(b) * kBlock;
        for (int j = 0; j < kBlock; ++j) {
            const float weight = exp_of(zb[j] - top);
            wb[j] = zb[j] >= threshold ? weight : 0.0f;
        }
        float sums[kLanes] = {};
        for (int j = 0; j < kBlock; j += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) sums[lane] += wb[j + lane];
        }
        for (int lane = 0; lane < kLanes; ++lane) total += double(sums[lane]);
    }
    return total;
}

// The random words of the 64 tokens from 64 * block on: words[v & 63], as in kernels/sampling.py.
AIO_INLINE void random_words(uint32_t block, uint32_t position, uint64_t seed, int32_t* words) {
    uint32_t c0[kGroups], c1[kGroups], c2[kGroups], c3[kGroups];
    for (int j = 0; j < kGroups; ++j) {
        c0[j] = block * kGroups + uint32_t(j);
        c1[j] = position;
        c2[j] = 0;
        c3[j] = 0;
    }
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        uint32_t high0[kGroups], low0[kGroups], high2[kGroups], low2[kGroups];
        for (int j = 0; j < kGroups; ++j) {  // a loop per product: together they are not vectorized
            const uint64_t product = uint64_t(c0[j]) * 0xD2511F53u;
            high0[j] = uint32_t(product >> 32);
            low0[j] = uint32_t(product);
        }
        for (int j = 0; j < kGroups; ++j) {
            const uint64_t product = uint64_t(c2[j]) * 0xCD9E8D57u;
            high2[j] = uint32_t(product >> 32);
            low2[j] = uint32_t(product);
        }
        for (int j = 0; j < kGroups; ++j) {
            c0[j] = high2[j] ^ c1[j] ^ k0;
            c1[j] = low2[j];
            c2[j] = high0[j] ^ c3[j] ^ k1;
            c3[j] = low0[j];
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int j = 0; j < kGroups; ++j) {
        words[4 * j] = int32_t(c0[j]);
        words[4 * j + 1] = int32_t(c1[j]);
        words[4 * j + 2] = int32_t(c2[j]);
        words[4 * j + 3] = int32_t(c3[j]);
    }
}

AIO_INLINE float folded_of(int32_t word) { return float(word ^ (word >> 31)); }

float noise_of(int32_t word) {
    const float u = std::max(folded_of(word) * kUniformScale, kUniformFloor);
    return -std::log(-std::log1p(-u));
}

// Writes the random words of a block, and how far each token could get at most. True if one of them could
// reach `best`. The bound: noise <= -log(u), u is just below 2^-31 folded, and the bits of a float read as a
// number give its exponent and mantissa, whose sum is never above the logarithm: log2(1 + m) >= m.
AIO_VECTORIZED bool bound_scores(const float* z, uint32_t block, uint32_t position, uint64_t seed, float best,
                                 int32_t* words, float* bounds) {
    random_words(block, position, seed, words);
    int32_t hits = 0;
    for (int j = 0; j < kBlock; ++j) {
        const float log2_u = float(bits_of(folded_of(words[j]))) * 1.1920929e-7f - (127.0f + 31.0f);
        bounds[j] = z[j] + (1e-4f - kLog2 * log2_u);
        hits += bounds[j] >= best;
    }
    return hits != 0;
}

int32_t draw(const float* z, const float* block_max, int32_t num_blocks, float threshold, int32_t top_id,
             const RowSettings& s) {
    int32_t words[kBlock];
    float bounds[kBlock];
    const uint32_t position = uint32_t(s.position);
    bound_scores(z + top_id / kBlock * kBlock, uint32_t(top_id / kBlock), position, s.seed, 0, words, bounds);
    int32_t best_id = top_id;
    float best = z[top_id] + noise_of(words[top_id % kBlock]);
    for (int32_t b = 0; b < num_blocks; ++b) {
        if (!(block_max[b] >= threshold) || block_max[b] + kMaxNoise < best) continue;
        const float* zb = z + ptrdiff_t(b) * kBlock;
        if (!bound_scores(zb, uint32_t(b), position, s.seed, best, words, bounds)) continue;
        for (int j = 0; j < kBlock; ++j) {
            if (bounds[j] < best || !(zb[j] >= threshold)) continue;
            const float score = zb[j] + noise_of(words[j]);
            const int32_t id = b * kBlock + j;
            if (score > best || (score == best && id < best_id)) {
                best = score;
                best_id = id;
            }
        }
    }
    return best_id;
}

// The values >= bound, in the order of their ids; their ids too if asked for.
void collect(const float* z, const float* block_max, int32_t num_blocks, float bound, std::vector<float>& values,
             std::vector<int32_t>* ids) {
    values.clear();
    if (ids != nullptr) ids->clear();
    for (int32_t b = 0; b < num_blocks; ++b) {
        if (!(block_max[b] >= bound)) continue;
        for (int32_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
            if (!(z[i] >= bound)) continue;
            values.push_back(z[i]);
            if (ids != nullptr) ids->push_back(i);
        }
    }
}

// A value that at least k elements reach; -inf if the block maxima cannot tell. 1 <= k.
float bound_of_kth(const float* block_max, int32_t num_blocks, int32_t k, std::vector<float>& scratch) {
    if (k > num_blocks) return -kInf;
    scratch.assign(block_max, block_max + num_blocks);
    std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<float>());
    return scratch[size_t(k - 1)];
}

// The k-th greatest of the values >= threshold, or the threshold if there are not that many.
float find_kth(const float* z, const float* block_max, int32_t num_blocks, int32_t k, float threshold,
               std::vector<float>& scratch) {
    const float bound = std::max(threshold, bound_of_kth(block_max, num_blocks, k, scratch));
    collect(z, block_max, num_blocks, bound, scratch, nullptr);
    if (scratch.size() <= size_t(k)) return bound;
    std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<float>());
    return scratch[size_t(k - 1)];
}

// The greatest threshold, at or above the given one, whose survivors hold top_p of the mass of all z >= threshold.
float find_nucleus(int32_t vocab_size, int32_t num_blocks, float top, float threshold, float top_p,
                   RowMemory& scratch) {
    const float* z = scratch.values.data();
    const float* block_max = scratch.block_max.data();
    scratch.weights.resize(scratch.values.size());
    const float* weights = scratch.weights.data();
    const double total = exponentiate(z, block_max, num_blocks, top, threshold, scratch.weights.data());
    const double target = double(top_p) * total;
    // Tokens below `low` hold less than 1 - top_p together, whatever their number.
    const double least_weight = (1.0 - double(top_p)) * total / vocab_size;
    const float low = std::max(threshold, top + float(std::log(std::max(least_weight, 1e-37))) - 1e-3f);
    if (!(top > low)) return top;

    // Bins from the top down; only the one in which the target is reached needs an order.
    const float scale = float(kBins) / (top - low);
    const auto bin_of = [=](float value) { return std::min(kBins - 1, int((top - value) * scale)); };
    double mass[kBins] = {};
    for (int32_t b = 0; b < num_blocks; ++b) {
        if (!(block_max[b] >= low)) continue;
        for (int32_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
            if (z[i] >= low) mass[bin_of(z[i])] += double(weights[i]);
        }
    }
    double above = 0;
    int bin = 0;
    while (bin < kBins - 1 && above + mass[bin] < target) above += mass[bin++];

    auto& members = scratch.candidates;
    members.clear();
    for (int32_t b = 0; b < num_blocks; ++b) {
        if (!(block_max[b] >= low)) continue;
        for (int32_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
            if (z[i] >= low && bin_of(z[i]) == bin) members.push_back(z[i]);
        }
    }
    std::sort(members.begin(), members.end(), std::greater<float>());
    for (const float value : members) {
        above += double(exp_of(value - top));
        if (above >= target) return value;
    }
    return low;
}

// What min-p, top-k and top-p, in this order, leave: the tokens with z at or above the result.
float find_threshold(int32_t vocab_size, int32_t num_blocks, float top, const RowSettings& s,
                     RowMemory& scratch) {
    float threshold = s.min_p > 0 ? top + std::log(s.min_p) : -kInf;
    if (s.top_k < vocab_size) {
        threshold = std::max(threshold, find_kth(scratch.values.data(), scratch.block_max.data(), num_blocks,
                                                 s.top_k, threshold, scratch.candidates));
    }
    if (s.top_p < 1) threshold = find_nucleus(vocab_size, num_blocks, top, threshold, s.top_p, scratch);
    return threshold;
}

// out = max(x - top - log_total, floor), filled up with -inf to whole blocks.
AIO_VECTORIZED void normalize(const float* x, int32_t n, float top, float log_total, float floor, float* out) {
    for (int32_t i = 0; i < n; ++i) {
        const float logprob = (x[i] - top) - log_total;
        out[i] = logprob > floor ? logprob : floor;
    }
    for (int32_t i = n; i % kBlock != 0; ++i) out[i] = -kInf;
}

AIO_VECTORIZED int32_t count_greater(const float* x, int32_t n, float value) {
    int32_t count = 0;
    for (int32_t i = 0; i < n; ++i) count += x[i] > value;
    return count;
}

int32_t prepare(int32_t vocab_size, RowMemory& scratch) {
    const int32_t num_blocks = (vocab_size + kBlock - 1) / kBlock;
    scratch.values.resize(size_t(num_blocks) * kBlock);
    scratch.block_max.resize(size_t(num_blocks));
    return num_blocks;
}

struct Choice {
    int32_t token_id;
    Status status;
};

Choice choose_token(const float* logits, int32_t vocab_size, const RowSettings& s, RowMemory& scratch) {
    const Extremes extremes = find_extremes(logits, vocab_size);
    const Status status = status_of(extremes);
    if (status != kOk) return {0, status};
    const int32_t top_id = find_first(logits, vocab_size, float_of(key_of(extremes.greatest)));
    if (s.temperature < kGreedyTemperature) return {top_id, kOk};

    const int32_t num_blocks = prepare(vocab_size, scratch);
    const float* z = scratch.values.data();
    divide(logits, vocab_size, s.temperature, scratch.values.data());
    if (std::isinf(z[top_id])) return {top_id, kNotFinite};
    find_block_maxima(z, num_blocks, scratch.block_max.data());
    const float threshold = find_threshold(vocab_size, num_blocks, z[top_id], s, scratch);
    return {draw(z, scratch.block_max.data(), num_blocks, threshold, top_id, s), kOk};
}

struct Score {
    float logprob;
    int32_t rank;
};

Score score_token(const float* logits, int32_t vocab_size, int32_t token_id, int32_t k, float floor, int32_t* top_ids,
                  float* top_logprobs, RowMemory& scratch) {
    const Extremes extremes = find_extremes(logits, vocab_size);
    if (status_of(extremes) != kOk) return {floor, 0};
    const float top = float_of(key_of(extremes.greatest));
    const int32_t num_blocks = prepare(vocab_size, scratch);
    float* values = scratch.values.data();
    float* block_max = scratch.block_max.data();
    scratch.weights.resize(scratch.values.size());
    std::fill_n(block_max, num_blocks, kInf);
    divide(logits, vocab_size, 1.0f, values);
    const double total = exponentiate(values, block_max, num_blocks, top, -kInf, scratch.weights.data());
    normalize(logits, vocab_size, top, float(std::log(total)), floor, values);
    const Score score = {values[token_id], 1 + count_greater(logits, vocab_size, logits[token_id])};
    if (k == -1) std::copy_n(values, vocab_size, top_logprobs);
    if (k <= 0) return score;

    find_block_maxima(values, num_blocks, block_max);
    auto& candidates = scratch.candidates;
    auto& order = scratch.order;
    const float kth = find_kth(values, block_max, num_blocks, k, -kInf, candidates);
    collect(values, block_max, num_blocks, kth, candidates, &scratch.ids);
    order.resize(candidates.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = int32_t(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return candidates[size_t(a)] > candidates[size_t(b)];
    });
    for (int32_t i = 0; i < k; ++i) {
        top_ids[i] = scratch.ids[size_t(order[size_t(i)])];
        top_logprobs[i] = candidates[size_t(order[size_t(i)])];
    }
    return score;
}

// Runs body(i) for all rows, over the pool where there is enough to do to wake it.
template <class Body>
void for_each_row(int num_rows, bool is_worth_it, Body&& body) {
    if (is_worth_it && num_rows > 1) {
        parallel_for(num_rows, body);
    } else {
        for (int i = 0; i < num_rows; ++i) body(i);
    }
}

}  // namespace

void choose_tokens(const float* logits, ptrdiff_t stride, int32_t vocab_size, const int64_t* rows, int num_rows,
                   const RowSettings* settings, int32_t* token_ids, int32_t* statuses) {
    const bool any_drawn = std::any_of(settings, settings + num_rows, [](const RowSettings& s) {
        return s.temperature >= kGreedyTemperature;
    });
    for_each_row(num_rows, any_drawn || num_rows >= kManyRows, [&](int i) {
        const Choice choice = choose_token(logits + rows[i] * stride, vocab_size, settings[i], thread_memory());
        token_ids[i] = choice.token_id;
        statuses[i] = choice.status;
    });
}

void score_tokens(const float* logits, ptrdiff_t stride, int32_t vocab_size, const int64_t* rows, int num_rows,
                  const int64_t* token_ids, const int64_t* counts, float floor, float* logprobs, int32_t* ranks,
                  const int64_t* offsets, int32_t* top_ids, float* top_logprobs) {
    for_each_row(num_rows, true, [&](int i) {
        const Score score =
            score_token(logits + rows[i] * stride, vocab_size, int32_t(token_ids[i]), int32_t(counts[i]), floor,
                        top_ids + offsets[i], top_logprobs + offsets[i], thread_memory());
        logprobs[i] = score.logprob;
        ranks[i] = score.rank;
    });
}

void TokenCounts::see(int32_t id) {
    if (marks_[size_t(id)] == 0) {
        marks_[size_t(id)] = 1;
        seen_.push_back(id);
    }
}

void TokenCounts::reset(const int32_t* prompt_ids, size_t num_prompt, const int32_t* output_ids,
                        size_t num_output) {
    for (const int32_t id : seen_) marks_[size_t(id)] = 0;
    seen_.clear();
    for (size_t i = 0; i < num_prompt; ++i) see(prompt_ids[i]);
    for (size_t i = 0; i < num_output; ++i) add(output_ids[i]);
}

void TokenCounts::add(int32_t id) {
    see(id);
    ++marks_[size_t(id)];
}

void TokenCounts::penalize(float* logits, const RowSettings& s) const {
    for (const int32_t id : seen_) {
        const int32_t count = marks_[size_t(id)] - 1;
        float x = logits[id];
        x = x > 0 ? x / s.repetition_penalty : x * s.repetition_penalty;
        x -= s.frequency_penalty * float(count);
        x -= count > 0 ? s.presence_penalty : 0.0f;
        logits[id] = x;
    }
}

}  // namespace aioengine
