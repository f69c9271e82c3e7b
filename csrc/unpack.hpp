// Unpacks numbers of a few bits each, which are packed from the least significant bit on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

// Unpacks `count` numbers of `bits` (0 to 32) bits each. The first one begins `bit` bits after `in`, where a packed run
// begins. 8 bytes after the last number must be readable.
void unpack(const uint8_t* in, size_t bit, int bits, uint32_t* out, size_t count);

}  // namespace lagom
