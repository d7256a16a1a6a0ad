// See isa.h. Which levels exist is decided by the build (AIO_HAVE_AVX2, AIO_HAVE_AVX512), which of them run here
// by the processor.
#include "isa.h"

#include <atomic>
#include <stdexcept>

namespace aioengine {

#define AIO_DECLARE_LEVEL(level)                        \
    namespace level {                                   \
    extern const MatmulKernels matmul_kernels;          \
    extern const OpKernels op_kernels;                  \
    extern const AttentionKernels attention_kernels;    \
    }

AIO_DECLARE_LEVEL(generic)
#if defined(AIO_HAVE_AVX2)
AIO_DECLARE_LEVEL(avx2)
#endif
#if defined(AIO_HAVE_AVX512)
AIO_DECLARE_LEVEL(avx512)
#endif

namespace {

#if defined(AIO_HAVE_AVX2)
bool runs_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif
#if defined(AIO_HAVE_AVX512)
bool runs_avx512() {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

#define AIO_LEVEL(level) \
    Isa { #level, &level::matmul_kernels, &level::op_kernels, &level::attention_kernels }

const std::vector<Isa>& levels() {
    static const std::vector<Isa> found = [] {
        std::vector<Isa> list;
#if defined(AIO_HAVE_AVX512)
        if (runs_avx512()) list.push_back(AIO_LEVEL(avx512));
#endif
#if defined(AIO_HAVE_AVX2)
        if (runs_avx2()) list.push_back(AIO_LEVEL(avx2));
#endif
        list.push_back(AIO_LEVEL(generic));
        return list;
    }();
    return found;
}

std::atomic<const Isa*> g_chosen{nullptr};

}  // namespace

const Isa& current_isa() {
    const Isa* chosen = g_chosen.load(std::memory_order_relaxed);
    return chosen != nullptr ? *chosen : levels().front();
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Isa& level : levels()) names.push_back(level.name);
    return names;
}

void set_isa(const std::string& name) {
    std::string available;
    for (const Isa& level : levels()) {
        if (name == level.name) {
            g_chosen.store(&level);
            return;
        }
        available += available.empty() ? level.name : std::string(", ") + level.name;
    }
    throw std::invalid_argument("isa '" + name + "' is not available here; available are " + available);
}

}  // namespace aioengine
