// Numbers of a few bits each, packed from the least significant bit on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

// The next `count` numbers of `bits` (0 to 32) each, the first of which begins `bit` bits behind `in`, where the first of all
// begins; there are 8 bytes that may be read behind the last.
void unpack(const uint8_t* in, size_t bit, int bits, uint32_t* out, size_t count);

}  // namespace lagom
