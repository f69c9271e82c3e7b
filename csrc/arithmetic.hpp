// Element types and reductions: sources in, one result out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

enum class Type : uint8_t { f64, f32, f16, bf16, i64, i32, i16, i8, u8, boolean };
enum class Op : uint8_t { sum, average, min, max, product, band, bor, bxor };

constexpr size_t size_of(Type type) {
    switch (type) {
        case Type::f64:
        case Type::i64: return 8;
        case Type::f32:
        case Type::i32: return 4;
        case Type::f16:
        case Type::bf16:
        case Type::i16: return 2;
        default: return 1;
    }
}

const char* name_of(Type type);
const char* name_of(Op op);

// Whether `op` is defined for `type`: averages only for floating point, bitwise operations only for integers and
// booleans.
bool has(Type type, Op op);

// Computes out[i] = sources[0][i] op sources[1][i] op ..., in this order, so that every rank that computes it gets the
// same bits. `out` may be one of the sources. `also` gets a copy of the result unless it is null. f16 and bf16 are
// accumulated in f32 and rounded once; integers wrap; a sum of booleans is an or. A NaN in min or max is kept.
void reduce(Type type, Op op, const void* const* sources, int num_sources, void* out, void* also, size_t count);

// Computes the average as `reduce` does, but leaves it in the type of accumulation: f32 for f16 and bf16. For floating
// point only.
void mean(Type type, const void* const* sources, int num_sources, void* out, size_t count);

}  // namespace lagom
