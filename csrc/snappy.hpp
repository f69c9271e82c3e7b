// Decompression of snappy blocks whose decompressed size is known.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

// Decompresses the snappy block (google/snappy, format_description.txt) at `in` into exactly `out_size` bytes. Returns
// false if it is damaged, no snappy block, or of another size; `out` may have been written to then.
bool unsnap(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size);

}  // namespace lagom
