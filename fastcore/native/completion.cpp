#include "completion.h"

#include <dlfcn.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace aioengine {
namespace {

// cuLaunchHostFunc(CUstream, CUhostFn, void*); CUresult is an int, 0 is success.
using HostFn = void (*)(void*);
using LaunchHostFunc = int (*)(void* stream, HostFn fn, void* data);

struct Driver {
    LaunchHostFunc launch_host_func = nullptr;
    std::string error;

    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            error = std::string("the CUDA driver cannot be opened: ") + dlerror();
            return;
        }
        launch_host_func = reinterpret_cast<LaunchHostFunc>(dlsym(library, "cuLaunchHostFunc"));
        if (launch_host_func == nullptr) error = "the CUDA driver has no cuLaunchHostFunc";
    }
};

const Driver& driver() {
    static const Driver instance;
    return instance;
}

void write_one(int fd) {
    const std::uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

// Runs on a thread of the driver. The descriptor travels by value: nothing here outlives anything.
void on_reached(void* data) { write_one(static_cast<int>(reinterpret_cast<std::intptr_t>(data))); }

}  // namespace

Completion::Completion() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0) throw std::runtime_error(std::string("cannot make an eventfd: ") + std::strerror(errno));
}

Completion::~Completion() { close(); }

void Completion::enqueue(std::uintptr_t stream) {
    if (fd_ < 0) throw std::runtime_error("the completion is closed");
    const Driver& cuda = driver();
    if (cuda.launch_host_func == nullptr) throw std::runtime_error(cuda.error);
    void* data = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd_));
    const int status = cuda.launch_host_func(reinterpret_cast<void*>(stream), &on_reached, data);
    if (status != 0) throw std::runtime_error("cuLaunchHostFunc failed with CUDA error " + std::to_string(status));
}

void Completion::signal() const {
    if (fd_ >= 0) write_one(fd_);
}

std::uint64_t Completion::take() const {
    std::uint64_t count = 0;
    if (fd_ < 0 || read(fd_, &count, sizeof count) != static_cast<ssize_t>(sizeof count)) return 0;
    return count;
}

void Completion::close() {
    if (fd_ < 0) return;
    ::close(fd_);
    fd_ = -1;
}

const char* completion_unavailable() {
    const Driver& cuda = driver();
    return cuda.launch_host_func != nullptr ? nullptr : cuda.error.c_str();
}

}  // namespace aioengine
