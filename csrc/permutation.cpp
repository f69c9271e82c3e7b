#include "permutation.hpp"

namespace lagom {
namespace {

constexpr int ROUNDS = 8;
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15;

// The finalizer of splitmix64 (Steele, Lea and Flood, 2014).
inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

int bits_of(uint64_t n) {
    int bits = 1;
    while (bits < 64 && (uint64_t(1) << bits) < n) ++bits;
    return bits;
}

}  // namespace

void permute(uint64_t n, uint64_t key, uint64_t start, size_t count, int64_t* out) {
    const int bits = bits_of(n), low = bits / 2;
    const uint64_t low_mask = (uint64_t(1) << low) - 1, high_mask = (uint64_t(1) << (bits - low)) - 1;
    uint64_t keys[ROUNDS];
    for (int round = 0; round < ROUNDS; ++round) keys[round] = mixed(key + (round + 1) * GOLDEN);
    for (size_t i = 0; i < count; ++i) {
        uint64_t place = start + i;
        do {
            uint64_t right = place & low_mask, left = place >> low;
            for (int round = 0; round < ROUNDS; round += 2) {
                left ^= mixed(right + keys[round]) & high_mask;
                right ^= mixed(left + keys[round + 1]) & low_mask;
            }
            place = left << low | right;
        } while (place >= n);
        out[i] = int64_t(place);
    }
}

}  // namespace lagom
