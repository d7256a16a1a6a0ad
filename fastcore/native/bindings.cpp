// The Python face of fastcore.native. Each algorithm file has its own register_* function here and
// knows no Python itself; long calls release the GIL.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(native, m) {
    m.doc() = "CPU kernels, detokenizer and stream completion";
}
