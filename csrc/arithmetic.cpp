#include "arithmetic.hpp"

#include <array>

#include "kernels.hpp"

namespace lagom {
namespace {

constexpr std::array<const char*, 10> TYPES{"float64", "float32", "float16", "bfloat16", "int64",
                                            "int32",   "int16",   "int8",    "uint8",    "bool"};
constexpr std::array<const char*, 8> OPS{"sum", "avg", "min", "max", "product", "band", "bor", "bxor"};

#ifdef LAGOM_X86
int instruction_set() {
    static const int level = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                     __builtin_cpu_supports("avx512dq")
                                 ? 2
                                 : (__builtin_cpu_supports("avx2") != 0);
    return level;
}
#endif

Kernel kernel(Type type, Op op) {
    if (size_t(type) >= TYPES.size() || size_t(op) >= OPS.size()) return nullptr;
#ifdef LAGOM_X86
    const int level = instruction_set();
    if (level == 2) return avx512::kernel(type, op);
    if (level == 1) return avx2::kernel(type, op);
#endif
    return baseline::kernel(type, op);
}

Kernel mean_kernel(Type type) {
#ifdef LAGOM_X86
    const int level = instruction_set();
    if (level == 2) return avx512::mean(type);
    if (level == 1) return avx2::mean(type);
#endif
    return baseline::mean(type);
}

}  // namespace

const char* name_of(Type type) { return size_t(type) < TYPES.size() ? TYPES[size_t(type)] : "?"; }
const char* name_of(Op op) { return size_t(op) < OPS.size() ? OPS[size_t(op)] : "?"; }
bool has(Type type, Op op) { return kernel(type, op) != nullptr; }

void reduce(Type type, Op op, const void* const* sources, int num_sources, void* out, void* also, size_t count) {
    kernel(type, op)(sources, num_sources, out, also, count);
}

void mean(Type type, const void* const* sources, int num_sources, void* out, size_t count) {
    mean_kernel(type)(sources, num_sources, out, nullptr, count);
}

}  // namespace lagom
