#include "crc.hpp"

namespace lagom {
namespace {

// Tables that process eight bytes at a time (Kounavis and Berry, 2005).
struct Sums {
    uint32_t of[8][256]{};
    constexpr Sums() {
        for (uint32_t byte = 0; byte < 256; ++byte) {
            uint32_t sum = byte;
            for (int bit = 0; bit < 8; ++bit) sum = sum & 1 ? sum >> 1 ^ 0xedb88320 : sum >> 1;
            of[0][byte] = sum;
        }
        for (int k = 1; k < 8; ++k)
            for (int byte = 0; byte < 256; ++byte) of[k][byte] = of[k - 1][byte] >> 8 ^ of[0][of[k - 1][byte] & 255];
    }
};
constexpr Sums SUMS;

}  // namespace

uint32_t crc32(const uint8_t* data, size_t size) {
    uint32_t sum = ~0u;
    for (; size >= 8; data += 8, size -= 8) {
        sum ^= uint32_t(data[0]) | uint32_t(data[1]) << 8 | uint32_t(data[2]) << 16 | uint32_t(data[3]) << 24;
        sum = SUMS.of[7][sum & 255] ^ SUMS.of[6][sum >> 8 & 255] ^ SUMS.of[5][sum >> 16 & 255] ^ SUMS.of[4][sum >> 24] ^
              SUMS.of[3][data[4]] ^ SUMS.of[2][data[5]] ^ SUMS.of[1][data[6]] ^ SUMS.of[0][data[7]];
    }
    for (; size; ++data, --size) sum = sum >> 8 ^ SUMS.of[0][(sum ^ *data) & 255];
    return ~sum;
}

}  // namespace lagom
