// The process-wide thread pool of the CPU kernels: parallel loops over chunks, handed out by an atomic
// counter. The calling thread works too and waits only for workers that are inside a chunk, so a worker that
// the operating system does not run costs nothing. Idle workers spin for a few tens of microseconds, then sleep.
// Used by qmatmul, cpu_ops and attention; knows nothing of them.
#pragma once

#include <cstddef>
#include <type_traits>

namespace aioengine {

constexpr int kMaxThreads = 256;

// Number of threads a loop may use, the caller included. Starts or joins workers lazily; waits for a running loop.
void set_num_threads(int count);
int num_threads();

// Ends and joins all workers; a later loop starts them again. For interpreter exit.
void stop_threads();

using ChunkFunction = void (*)(void* context, int chunk);

// Runs function(context, 0..chunks-1), each once, and returns when all are done. Loops of different threads
// are serialized. A chunk must not start a loop itself.
void run_chunks(int chunks, ChunkFunction function, void* context);

template <class Body>
void parallel_for(int chunks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_chunks(
        chunks, [](void* context, int chunk) { (*static_cast<Plain*>(context))(chunk); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

// A buffer of this thread, aligned to 64 bytes, valid until the same slot is asked for again.
enum class Scratch { kShared, kWorker, kCount };
void* thread_scratch(Scratch slot, size_t num_bytes);

// [begin, end) of part `index` when `total` things are split into `parts` nearly equal parts.
struct Range {
    int begin, end;
};
inline Range split_range(int total, int parts, int index) {
    const int base = total / parts, extra = total % parts;
    const int begin = index * base + (index < extra ? index : extra);
    return {begin, begin + base + (index < extra ? 1 : 0)};
}

}  // namespace aioengine
