// Checksums that detect flipped bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

// Returns the CRC-32 of ISO 3309, which zlib and Parquet use.
uint32_t crc32(const uint8_t* data, size_t size);

}  // namespace lagom
