// Causal attention of packed queries over a paged KV cache, in float32, with grouped heads, sliding window and soft
// cap. A query's result is bitwise independent of the batch, of the threads and of how its prompt was cut into
// chunks, and no cache slot outside the keys that a chunk of queries sees is read. Called through bindings.cpp;
// the kernels are in attention_kernels.cpp.
#pragma once

#include "kernels.h"

namespace aioengine {

void paged_attention(const AttentionArgs& args, int num_seqs);

}  // namespace aioengine
