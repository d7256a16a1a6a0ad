// Tells an event loop that a CUDA stream has come to a point: a host callback on the stream writes to an
// eventfd. The driver is opened at run time, so nothing of CUDA is needed to build.
#pragma once

#include <cstdint>

namespace aioengine {

class Completion {
public:
    Completion();  // throws std::runtime_error if there can be no eventfd
    ~Completion();
    Completion(const Completion&) = delete;
    Completion& operator=(const Completion&) = delete;

    // The descriptor to watch, -1 once closed.
    int fd() const { return fd_; }

    // Signals once everything enqueued on `stream` so far is done. Throws std::runtime_error without a driver
    // or if the driver refuses. The object must stay open until then.
    void enqueue(std::uintptr_t stream);

    // Signals now; what the callback does.
    void signal() const;

    // How many signals came since the last call; 0 if none. Never blocks.
    std::uint64_t take() const;

    void close();

private:
    int fd_;
};

// Why `enqueue` cannot work on this machine, or nullptr.
const char* completion_unavailable();

}  // namespace aioengine
