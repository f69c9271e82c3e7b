// Images in the Portable Network Graphics format.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

// Decodes a PNG of 8 bits a sample, grey (channels 1) or red, green and blue (3), of exactly that size, into
// height * width * channels bytes. False for whatever else, valid or not: who calls has another decoder for it, which says
// what is wrong. `out` may have been written to then. Sums over data and chunks are checked.
bool decode_png(const uint8_t* data, size_t size, uint32_t height, uint32_t width, int channels, uint8_t* out);

}  // namespace lagom
