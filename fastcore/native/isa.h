// The choice of the instruction-set level whose kernels run: the best that the build and the processor share,
// made once at run time, so that one binary serves all processors of its architecture.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace aioengine {

struct Isa {
    const char* name;
    const MatmulKernels* matmul;
    const OpKernels* ops;
    const AttentionKernels* attention;
};

// The best level of this processor, unless set_isa chose another.
const Isa& current_isa();
std::vector<std::string> available_isas();   // best first
void set_isa(const std::string& name);       // throws std::invalid_argument if the processor lacks it

}  // namespace aioengine
