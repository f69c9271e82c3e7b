#include "adam.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace lagom {
namespace {

AdamLoops loops(bool is_double) {
#ifdef LAGOM_X86
    static const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    static const bool has_512 = has_fma && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                __builtin_cpu_supports("avx512dq");
    if (has_512) return avx512::adam_loops(is_double);
    if (has_fma) return avx2::adam_loops(is_double);
#endif
    return baseline::adam_loops(is_double);
}

size_t size_of(bool is_double) { return is_double ? sizeof(double) : sizeof(float); }

struct Range {
    uintptr_t start, end;
    bool is_written;
};

AdamNumbers numbers_of(const Adam& settings) {
    AdamNumbers found{};
    found.weight = 1 - settings.beta1;
    found.beta2 = settings.beta2;
    found.value = 1 - settings.beta2;
    found.eps = settings.eps;
    found.how = settings.weight_decay == 0 ? AdamNumbers::none
                : settings.decoupled       ? AdamNumbers::decoupled
                                           : AdamNumbers::in_gradient;
    found.decay = settings.decoupled ? 1 - settings.rate * settings.weight_decay : settings.weight_decay;
    found.maximize = settings.maximize;
    found.fused = settings.fused;
    return found;
}

AdamEntry stretch(const AdamEntry& entry, size_t offset, size_t count, size_t size) {
    const size_t bytes = offset * size;
    const auto moved = [bytes](void* place) -> void* { return static_cast<char*>(place) + bytes; };
    return {moved(entry.param),  static_cast<const char*>(entry.grad) + bytes, moved(entry.average),
            moved(entry.square), entry.step,                                   count};
}

}  // namespace

AdamStep::AdamStep(std::vector<AdamEntry> entries, bool is_double, bool steps_are_double, const Adam& settings)
    : entries_(std::move(entries)), is_double_(is_double), steps_are_double_(steps_are_double), settings_(settings) {}

bool AdamStep::lies_apart() const {
    std::vector<Range> ranges;
    ranges.reserve(5 * entries_.size());
    const auto add = [&ranges](const void* place, size_t size, bool is_written) {
        const uintptr_t start = reinterpret_cast<uintptr_t>(place);
        if (size) ranges.push_back({start, start + size, is_written});
    };
    for (const AdamEntry& entry : entries_) {
        const size_t size = entry.count * size_of(is_double_);
        for (const void* place : {entry.param, entry.average, entry.square}) add(place, size, true);
        add(entry.grad, size, false);
        add(entry.step, size_of(steps_are_double_), true);
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.start < b.start; });
    uintptr_t end = 0, written = 0;  // of those before
    for (const Range& range : ranges) {
        if (range.start < (range.is_written ? end : written)) return false;
        end = std::max(end, range.end);
        if (range.is_written) written = std::max(written, range.end);
    }
    return true;
}

// Calls each(entry, stretch of it, its offset, numbers before it) until there are `most` numbers; how many there were.
template <class Each>
size_t AdamStep::walk(Place from, size_t most, Each each) {
    size_t done = 0;
    end_ = from;
    while (end_.entry < entries_.size()) {
        const AdamEntry& entry = entries_[end_.entry];
        const size_t count = std::min(entry.count - end_.offset, most - done);
        if (count == 0 && entry.count != 0) break;
        each(entry, stretch(entry, end_.offset, count, size_of(is_double_)), end_.offset, done);
        done += count;
        end_.offset += count;
        if (end_.offset == entry.count) end_ = {end_.entry + 1, 0};
    }
    return done;
}

size_t AdamStep::averages(void* squares, size_t most) {
    const AdamLoops found = loops(is_double_);
    const AdamNumbers numbers = numbers_of(settings_);
    begin_ = end_;
    between_ = walk(begin_, most, [&](const AdamEntry& entry, const AdamEntry& part, size_t offset, size_t before) {
        if (offset == 0 && steps_are_double_) *static_cast<double*>(entry.step) += 1;
        else if (offset == 0) *static_cast<float*>(entry.step) += 1;
        found.averages(part, numbers, static_cast<char*>(squares) + before * size_of(is_double_));
    });
    return between_;
}

void AdamStep::changes(const void* roots) {
    const AdamLoops found = loops(is_double_);
    AdamNumbers numbers = numbers_of(settings_);
    double known = -1;
    walk(begin_, between_, [&](const AdamEntry& entry, const AdamEntry& part, size_t, size_t before) {
        const double step = steps_are_double_ ? *static_cast<double*>(entry.step) : *static_cast<float*>(entry.step);
        if (step != known) {
            known = step;
            numbers.size = settings_.rate / (1 - std::pow(settings_.beta1, step));
            numbers.bias = std::pow(1 - std::pow(settings_.beta2, step), 0.5);
        }
        found.changes(part, numbers, static_cast<const char*>(roots) + before * size_of(is_double_));
    });
}

}  // namespace lagom
