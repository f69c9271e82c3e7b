// The loops of adam.cpp, each in the order of operations of torch's _single_tensor_adam. Compiled once for each
// instruction set, as kernels.cpp is.
#include "adam.hpp"

namespace lagom::LAGOM_VARIANT {
namespace {

template <bool fused>
inline float sum(float a, float b, float c) { return fused ? __builtin_fmaf(a, b, c) : a * b + c; }
template <bool fused>
inline double sum(double a, double b, double c) { return fused ? __builtin_fma(a, b, c) : a * b + c; }

template <class T, bool fused, bool small>
void averages_of(const AdamEntry& entry, const AdamNumbers& all, T* squares) {
    T* const p = static_cast<T*>(entry.param);
    const T* const g = static_cast<const T*>(entry.grad);
    T* const m = static_cast<T*>(entry.average);
    T* const v = static_cast<T*>(entry.square);
    const T weight = T(all.weight), beta2 = T(all.beta2), value = T(all.value), decay = T(all.decay);
    const T sign = all.maximize ? T(-1) : T(1);
    const bool in_gradient = all.how == AdamNumbers::in_gradient;
    if (all.how == AdamNumbers::decoupled)
        for (size_t i = 0; i < entry.count; ++i) p[i] *= decay;
#pragma GCC ivdep
    for (size_t i = 0; i < entry.count; ++i) {
        T grad = g[i] * sign;
        if (in_gradient) grad = sum<fused>(p[i], decay, grad);
        const T way = grad - m[i];
        // torch's lerp goes from the end that is nearer.
        if (small) m[i] = sum<fused>(weight, way, m[i]);
        else m[i] = fused ? sum<true>(weight - T(1), way, grad) : grad - way * (T(1) - weight);
        squares[i] = v[i] = sum<fused>(value * grad, grad, v[i] * beta2);
    }
}

template <class T>
void averages(const AdamEntry& entry, const AdamNumbers& all, void* squares) {
    T* const to = static_cast<T*>(squares);
    const T weight = T(all.weight);
    const bool small = (weight < 0 ? -weight : weight) < T(0.5);
    if (all.fused) return small ? averages_of<T, true, true>(entry, all, to) : averages_of<T, true, false>(entry, all, to);
    return small ? averages_of<T, false, true>(entry, all, to) : averages_of<T, false, false>(entry, all, to);
}

template <class T>
void changes(const AdamEntry& entry, const AdamNumbers& all, const void* roots) {
    T* const p = static_cast<T*>(entry.param);
    const T* const m = static_cast<const T*>(entry.average);
    const T* const root = static_cast<const T*>(roots);
    const T bias = T(all.bias), eps = T(all.eps), size = T(-all.size);
#pragma GCC ivdep
    for (size_t i = 0; i < entry.count; ++i) p[i] += size * m[i] / (root[i] / bias + eps);
}

}  // namespace

AdamLoops adam_loops(bool is_double) {
    return is_double ? AdamLoops{averages<double>, changes<double>} : AdamLoops{averages<float>, changes<float>};
}

}  // namespace lagom::LAGOM_VARIANT
