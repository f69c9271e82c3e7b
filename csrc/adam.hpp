// A step of Adam or AdamW, in the arithmetic of torch's own, but for the square root, which torch has of MKL.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace lagom {

// What a step does to each number; in double, and rounded to the type of the parameters as torch does.
struct Adam {
    double beta1, beta2, rate, eps, weight_decay;
    bool decoupled;  // AdamW's weight decay
    bool maximize;
    bool fused;  // products and sums are rounded once, as torch is compiled for most processors
};

// A parameter, its gradient, the averages of that and of its square, and the number of its steps so far.
struct AdamEntry {
    void* param;
    const void* grad;
    void* average;
    void* square;
    void* step;
    size_t count;
};

// One step of all entries, which are of float64 (`is_double`) or float32, as their numbers of steps are: as many numbers
// at a time as there is room for roots.
class AdamStep {
public:
    AdamStep(std::vector<AdamEntry> entries, bool is_double, bool steps_are_double, const Adam& settings);

    // Whether nothing that is written overlaps with anything; otherwise the order of operations would matter.
    bool lies_apart() const;

    // Goes on by `most` numbers at most, up to the square root: writes the averages of squares to `squares`, one behind
    // the other. How many there are; 0 at the end.
    size_t averages(void* squares, size_t most);

    // What is left of these, with the roots.
    void changes(const void* roots);

private:
    struct Place {
        size_t entry = 0, offset = 0;
    };
    template <class Each>
    size_t walk(Place from, size_t most, Each each);

    std::vector<AdamEntry> entries_;
    bool is_double_, steps_are_double_;
    Adam settings_;
    Place begin_, end_;  // of what has its averages and not its changes
    size_t between_ = 0;
};

// Of a stretch of one entry. `decay` is what weight decay multiplies with.
struct AdamNumbers {
    double weight, beta2, value, eps, decay;
    double size, bias;  // of the step, and the root of the correction of the squares' average
    enum { none, in_gradient, decoupled } how;
    bool maximize, fused;
};

struct AdamLoops {
    void (*averages)(const AdamEntry& entry, const AdamNumbers& numbers, void* squares);
    void (*changes)(const AdamEntry& entry, const AdamNumbers& numbers, const void* roots);
};
namespace baseline {
AdamLoops adam_loops(bool is_double);
}
namespace avx2 {
AdamLoops adam_loops(bool is_double);
}
namespace avx512 {
AdamLoops adam_loops(bool is_double);
}

}  // namespace lagom
