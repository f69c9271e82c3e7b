// The loops of arithmetic.cpp, compiled once for each instruction set in the namespace LAGOM_VARIANT. They must not use
// functions of the standard library that are compiled here (templates, inline functions): the linker keeps one copy of
// such a function, and its instruction set may be one that the processor lacks.
#include <stdint.h>
#include <string.h>

#include "kernels.hpp"

namespace lagom::LAGOM_VARIANT {
namespace {

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// For each kind of number: the type in which it is stored, the type of sums, and the type of results.
template <class T>
struct Plain {
    using Stored = T;
    using Sum = T;
    using Result = T;
    static Sum load(Stored x) { return x; }
    static Stored store(Sum x) { return x; }
};

struct Brain {
    using Stored = uint16_t;
    using Sum = float;
    using Result = uint16_t;
    static float load(uint16_t x) { return bits<float>(uint32_t(x) << 16); }
    static uint16_t store(float x) {
        const uint32_t u = bits<uint32_t>(x);
        const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;  // to nearest, ties to even
        return uint16_t(x != x ? 0x7fc0 : rounded);
    }
};

struct Half {
    using Stored = uint16_t;
    using Sum = float;
    using Result = uint16_t;
    static float load(uint16_t x) {
        const uint32_t shifted = uint32_t(x & 0x7fff) << 13, exponent = shifted & 0x0f800000;
        const uint32_t normal = shifted + (112u << 23);
        const uint32_t special = normal + (112u << 23);  // infinity and NaN
        const uint32_t subnormal = bits<uint32_t>(bits<float>(normal + (1u << 23)) - bits<float>(113u << 23));
        const uint32_t u = exponent == 0x0f800000 ? special : exponent == 0 ? subnormal : normal;
        return bits<float>(u | uint32_t(x & 0x8000) << 16);
    }
    static uint16_t store(float x) {
        const uint32_t whole = bits<uint32_t>(x), sign = whole & 0x80000000, u = whole ^ sign;
        const uint32_t special = u > 0x7f800000 ? 0x7e00 : 0x7c00;
        const uint32_t subnormal = bits<uint32_t>(bits<float>(u) + bits<float>(126u << 23)) - (126u << 23);
        const uint32_t normal = (u - (112u << 23) + 0xfff + ((u >> 13) & 1)) >> 13;
        const uint32_t half = u >= (143u << 23) ? special : u < (113u << 23) ? subnormal : normal;
        return uint16_t(half | sign >> 16);
    }
};

struct Truth {
    using Stored = uint8_t;
    using Sum = uint8_t;
    using Result = uint8_t;
    static uint8_t load(uint8_t x) { return x != 0; }
    static uint8_t store(uint8_t x) { return x; }
};

struct Add {
    template <class T>
    static T of(T a, T b) { return T(a + b); }
};
struct Multiply {
    template <class T>
    static T of(T a, T b) { return T(a * b); }
    static uint16_t of(uint16_t a, uint16_t b) { return uint16_t(uint32_t(a) * b); }  // not as int, which overflows
};
struct Min {
    template <class T>
    static T of(T a, T b) { return a < b || a != a ? a : b; }
};
struct Max {
    template <class T>
    static T of(T a, T b) { return a > b || a != a ? a : b; }
};
struct And {
    template <class T>
    static T of(T a, T b) { return a & b; }
};
struct Or {
    template <class T>
    static T of(T a, T b) { return a | b; }
};
struct Xor {
    template <class T>
    static T of(T a, T b) { return a ^ b; }
};

constexpr size_t BLOCK = 1024;  // numbers whose sums stay in the first-level cache

// `Kind`, but with results in the type of sums, not rounded to the stored type.
template <class Kind>
struct Wide {
    using Stored = typename Kind::Stored;
    using Sum = typename Kind::Sum;
    using Result = Sum;
    static Sum load(Stored x) { return Kind::load(x); }
    static Result store(Sum x) { return x; }
};

template <class Kind, class Function, bool Divides>
void fold(const void* const* sources, int num_sources, void* out, void* also, size_t count) {
    using Stored = typename Kind::Stored;
    using Sum = typename Kind::Sum;
    using Result = typename Kind::Result;
    Sum sums[BLOCK];
    const Sum divisor = Sum(num_sources);
    for (size_t start = 0; start < count; start += BLOCK) {
        const size_t num = count - start < BLOCK ? count - start : BLOCK;
        const Stored* first = static_cast<const Stored*>(sources[0]) + start;
        for (size_t i = 0; i < num; ++i) sums[i] = Kind::load(first[i]);
        for (int k = 1; k < num_sources; ++k) {
            const Stored* next = static_cast<const Stored*>(sources[k]) + start;
            for (size_t i = 0; i < num; ++i) sums[i] = Function::of(sums[i], Kind::load(next[i]));
        }
        if (Divides)
            for (size_t i = 0; i < num; ++i) sums[i] = Sum(sums[i] / divisor);
        Result* result = static_cast<Result*>(out) + start;
        for (size_t i = 0; i < num; ++i) result[i] = Kind::store(sums[i]);
        if (also != nullptr) memcpy(static_cast<Result*>(also) + start, result, num * sizeof(Result));
    }
}

template <class Kind>
Kernel floating(Op op) {
    switch (op) {
        case Op::sum: return fold<Kind, Add, false>;
        case Op::average: return fold<Kind, Add, true>;
        case Op::min: return fold<Kind, Min, false>;
        case Op::max: return fold<Kind, Max, false>;
        case Op::product: return fold<Kind, Multiply, false>;
        default: return nullptr;
    }
}

// `Bits` is the unsigned type: in C++ sums and products of signed numbers must not overflow, and unsigned ones give the
// same bits.
template <class Number, class Bits>
Kernel whole(Op op) {
    switch (op) {
        case Op::sum: return fold<Plain<Bits>, Add, false>;
        case Op::min: return fold<Plain<Number>, Min, false>;
        case Op::max: return fold<Plain<Number>, Max, false>;
        case Op::product: return fold<Plain<Bits>, Multiply, false>;
        case Op::band: return fold<Plain<Bits>, And, false>;
        case Op::bor: return fold<Plain<Bits>, Or, false>;
        case Op::bxor: return fold<Plain<Bits>, Xor, false>;
        default: return nullptr;
    }
}

Kernel truth(Op op) {
    switch (op) {
        case Op::sum:
        case Op::max:
        case Op::bor: return fold<Truth, Or, false>;
        case Op::product:
        case Op::min:
        case Op::band: return fold<Truth, And, false>;
        case Op::bxor: return fold<Truth, Xor, false>;
        default: return nullptr;
    }
}

}  // namespace

Kernel kernel(Type type, Op op) {
    switch (type) {
        case Type::f64: return floating<Plain<double>>(op);
        case Type::f32: return floating<Plain<float>>(op);
        case Type::f16: return floating<Half>(op);
        case Type::bf16: return floating<Brain>(op);
        case Type::i64: return whole<int64_t, uint64_t>(op);
        case Type::i32: return whole<int32_t, uint32_t>(op);
        case Type::i16: return whole<int16_t, uint16_t>(op);
        case Type::i8: return whole<int8_t, uint8_t>(op);
        case Type::u8: return whole<uint8_t, uint8_t>(op);
        case Type::boolean: return truth(op);
    }
    return nullptr;
}

Kernel mean(Type type) {
    switch (type) {
        case Type::f64: return fold<Plain<double>, Add, true>;
        case Type::f32: return fold<Plain<float>, Add, true>;
        case Type::f16: return fold<Wide<Half>, Add, true>;
        case Type::bf16: return fold<Wide<Brain>, Add, true>;
        default: return nullptr;
    }
}

}  // namespace lagom::LAGOM_VARIANT
