#include "twister.hpp"

#include <algorithm>
#include <cmath>

namespace lagom {
namespace {

constexpr int SIZE = Twister::SIZE, SHIFT = 397;

inline uint32_t twisted(uint32_t one, uint32_t next) {
    return (((one & 0x80000000u) | (next & 0x7fffffffu)) >> 1) ^ (-(next & 1u) & 0x9908b0dfu);
}

void renew(uint32_t* state) {
    for (int i = 0; i < SIZE - SHIFT; ++i) state[i] = state[i + SHIFT] ^ twisted(state[i], state[i + 1]);
    for (int i = SIZE - SHIFT; i < SIZE - 1; ++i) state[i] = state[i + SHIFT - SIZE] ^ twisted(state[i], state[i + 1]);
    state[SIZE - 1] = state[SHIFT - 1] ^ twisted(state[SIZE - 1], state[0]);
}

inline uint32_t tempered(uint32_t word) {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    return word ^ (word >> 18);
}

}  // namespace

void Twister::skip(uint64_t count) {
    const uint64_t here = std::min(count, uint64_t(left - 1));
    left -= int32_t(here);
    next += here;
    count -= here;
    if (!count) return;
    uint32_t now[SIZE];
    for (int i = 0; i < SIZE; ++i) now[i] = uint32_t(state[i]);
    for (; count > SIZE; count -= SIZE) renew(now);
    renew(now);
    for (int i = 0; i < SIZE; ++i) state[i] = now[i];
    left = SIZE + 1 - int32_t(count);
    next = count;
}

void Twister::draw_mask(double probability, uint8_t* out, uint64_t count) {
    if (!count) return;
    const uint64_t limit = uint64_t(std::ceil(std::ldexp(probability, 53)));
    uint32_t now[SIZE], words[SIZE + 1];  // words: perhaps the last one of the block before, and those of a block
    for (int i = 0; i < SIZE; ++i) now[i] = uint32_t(state[i]);
    int place = left > 1 ? int(next) : SIZE, held = 0;
    for (;;) {
        const int all = held + SIZE - place;
        for (int i = place; i < SIZE; ++i) words[held + i - place] = tempered(now[i]);
        const int pairs = int(std::min(count, uint64_t(all / 2)));
        for (int i = 0; i < pairs; ++i)
            out[i] = ((uint64_t(words[2 * i] & 0x1fffffu) << 32) | words[2 * i + 1]) < limit;
        out += pairs;
        count -= uint64_t(pairs);
        place += 2 * pairs - held;
        if (!count) break;
        held = all % 2;
        if (held) words[0] = words[all - 1];
        renew(now);
        place = 0;
    }
    for (int i = 0; i < SIZE; ++i) state[i] = now[i];
    left = SIZE + 1 - place;
    next = uint64_t(place);
}

}  // namespace lagom
