// Sums that tell of bits that have flipped.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

// The CRC-32 of ISO 3309, as zlib and Parquet have it.
uint32_t crc32(const uint8_t* data, size_t size);

}  // namespace lagom
