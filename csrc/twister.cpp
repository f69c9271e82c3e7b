#include "twister.hpp"

#include <algorithm>

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

}  // namespace lagom
