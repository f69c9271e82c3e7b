// Draws masks with the numbers of torch's CPU generator, and skips numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

// The beginning of the state that torch.Generator.get_state() returns: a Mersenne Twister
// (ATen/core/MT19937RNGEngine.h).
struct Twister {
    static constexpr int SIZE = 624;
    uint64_t seed;
    int32_t left;  // numbers until the state is renewed, plus 1
    int32_t is_seeded;
    uint64_t next;  // place of the next number
    uint64_t state[SIZE];  // 32 bits of each are used

    // Advances the generator as if it had drawn `count` numbers of 32 bits.
    void skip(uint64_t count);

    // Draws `count` bytes, each 1 with `probability` and else 0, as torch.Tensor.bernoulli_ does: from 53 bits of two
    // numbers (ATen/core/TransformationHelper.h, ATen/core/DistributionsHelper.h).
    void draw_mask(double probability, uint8_t* out, uint64_t count);
};

}  // namespace lagom
