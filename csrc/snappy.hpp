// Data that snappy compressed, into memory of a size that is known.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

// Decompresses the snappy block (google/snappy, format_description.txt) at `in` into exactly `out_size` bytes. False where it
// is none, is damaged or holds more or less than that; then `out` may have been written to.
bool unsnap(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size);

}  // namespace lagom
