// One set of loops for each instruction set.
#pragma once

#include "arithmetic.hpp"

namespace lagom {

using Kernel = void (*)(const void* const* sources, int num_sources, void* out, void* also, size_t count);

// `kernel` returns null if `op` is not defined for `type`; the results of `mean` have the type of the sums.
namespace baseline {
Kernel kernel(Type type, Op op);
Kernel mean(Type type);
}
namespace avx2 {
Kernel kernel(Type type, Op op);
Kernel mean(Type type);
}
namespace avx512 {
Kernel kernel(Type type, Op op);
Kernel mean(Type type);
}

}  // namespace lagom
