// See threads.h. How a worker and the caller meet:
//
//   caller: write the job, next_chunk = 0, open_epoch = ++epoch; work; open_epoch = 0; wait until inside == 0
//   worker: inside += 1; if open_epoch != 0 take chunks; inside -= 1
//
// A worker enters `inside` before it looks whether a job is open, and the caller closes the job before it
// looks at `inside`; with sequentially consistent order one of them sees the other, so that nobody reads a job
// whose caller has returned.
#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace aioengine {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(40);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
public:
    void set_size(int count) {
        std::lock_guard<std::mutex> serialize(callers_);
        size_ = count;
        if (int(workers_.size()) > count - 1) join_workers();
    }

    int size() const { return size_; }

    void stop() {
        std::lock_guard<std::mutex> serialize(callers_);
        join_workers();
    }

    void run(int chunks, ChunkFunction function, void* context) {
        if (chunks <= 1 || size_ <= 1) {
            for (int chunk = 0; chunk < chunks; ++chunk) function(context, chunk);
            return;
        }
        std::lock_guard<std::mutex> serialize(callers_);
        while (int(workers_.size()) < size_ - 1) workers_.emplace_back([this] { work(); });

        function_ = function;
        context_ = context;
        chunks_ = chunks;
        next_chunk_.store(0, std::memory_order_relaxed);
        open_epoch_.store(++epoch_);
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep_mutex_);
            wake_.notify_all();
        }
        take_chunks();
        open_epoch_.store(0);
        for (int spins = 0; inside_.load() != 0; ++spins) {
            if (spins < 2000) {
                relax();
            } else {
                std::this_thread::yield();
            }
        }
    }

private:
    void take_chunks() {
        for (;;) {
            const int chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
            if (chunk >= chunks_) return;
            function_(context_, chunk);
        }
    }

    void work() {
        uint64_t seen = 0;
        while (wait_job(seen)) {
            inside_.fetch_add(1);
            const uint64_t open = open_epoch_.load();
            if (open != 0) {
                seen = open;
                take_chunks();
            }
            inside_.fetch_sub(1);
        }
    }

    bool has_job(uint64_t seen) const {
        const uint64_t open = open_epoch_.load();
        return open != 0 && open != seen;
    }

    // False when the pool ends.
    bool wait_job(uint64_t seen) {
        const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
        do {
            for (int i = 0; i < 16; ++i) {
                if (has_job(seen)) return true;
                relax();
            }
        } while (std::chrono::steady_clock::now() < deadline);
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return ending_ || has_job(seen); });
        sleepers_.fetch_sub(1);
        return !ending_;
    }

    void join_workers() {
        {
            std::lock_guard<std::mutex> lock(sleep_mutex_);
            ending_ = true;
            wake_.notify_all();
        }
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
        ending_ = false;
    }

    std::mutex callers_;
    std::atomic<int> size_{int(std::thread::hardware_concurrency() ? std::thread::hardware_concurrency() : 1)};
    std::vector<std::thread> workers_;

    // The job; written only while no worker is inside.
    ChunkFunction function_ = nullptr;
    void* context_ = nullptr;
    int chunks_ = 0;
    uint64_t epoch_ = 0;
    alignas(64) std::atomic<int> next_chunk_{0};
    alignas(64) std::atomic<uint64_t> open_epoch_{0};
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<int> sleepers_{0};

    std::mutex sleep_mutex_;
    std::condition_variable wake_;
    bool ending_ = false;
};

Pool* g_pool = nullptr;

// Lives as long as the process: its workers are joined by stop_threads. A forked child has none of the
// workers, so it starts with a fresh pool of the same size and leaves the old one alone.
Pool& pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        g_pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] {
            const int size = g_pool->size();
            g_pool = new Pool;
            g_pool->set_size(size);
        });
    });
    return *g_pool;
}

struct Buffer {
    void* data = nullptr;
    size_t num_bytes = 0;
    ~Buffer() { std::free(data); }
};

}  // namespace

void set_num_threads(int count) { pool().set_size(count); }
int num_threads() { return pool().size(); }
void stop_threads() { pool().stop(); }
void run_chunks(int chunks, ChunkFunction function, void* context) { pool().run(chunks, function, context); }

void* thread_scratch(Scratch slot, size_t num_bytes) {
    thread_local Buffer buffers[int(Scratch::kCount)];
    Buffer& buffer = buffers[int(slot)];
    if (buffer.num_bytes < num_bytes) {
        std::free(buffer.data);
        buffer.num_bytes = (num_bytes + 4095) / 4096 * 4096;
        buffer.data = std::aligned_alloc(4096, buffer.num_bytes);
        if (buffer.data == nullptr) {
            buffer.num_bytes = 0;
            throw std::bad_alloc();
        }
    }
    return buffer.data;
}

}  // namespace aioengine
