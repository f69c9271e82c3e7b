#include "snappy.hpp"

#include <cstring>

namespace lagom {
namespace {

// With this many bytes of room in the output, a repetition may be copied in whole steps of 8 or 16 bytes.
constexpr size_t SLACK = 64;

// Copies `size` bytes that begin `offset` bytes before `out`. If they overlap with `out`, the bytes repeat.
inline void repeat(uint8_t* out, size_t offset, size_t size, bool has_room) {
    const uint8_t* from = out - offset;
    if (has_room && offset >= 16) {
        for (size_t i = 0; i < size; i += 16) std::memcpy(out + i, from + i, 16);
    } else if (has_room && offset >= 8) {
        for (size_t i = 0; i < size; i += 8) std::memcpy(out + i, from + i, 8);
    } else {
        for (size_t i = 0; i < size; ++i) out[i] = from[i];
    }
}

}  // namespace

bool unsnap(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size) {
    const uint8_t* const end = in + in_size;
    uint64_t told = 0;
    for (int shift = 0;; shift += 7) {
        if (in == end || shift > 28) return false;
        const uint8_t byte = *in++;
        told |= uint64_t(byte & 127) << shift;
        if (byte < 128) break;
    }
    if (told != out_size) return false;
    size_t at = 0;
    while (in < end) {
        const uint8_t tag = *in++;
        if ((tag & 3) == 0) {
            size_t size = size_t(tag >> 2) + 1;
            if (size <= 16 && size_t(end - in) >= 16 && out_size - at >= 16) {
                std::memcpy(out + at, in, 16);
                in += size;
                at += size;
                continue;
            }
            if (size > 60) {
                const size_t bytes = size - 60;
                if (size_t(end - in) < bytes) return false;
                size = 0;
                for (size_t i = 0; i < bytes; ++i) size |= size_t(in[i]) << (8 * i);
                ++size;
                in += bytes;
            }
            if (size > size_t(end - in) || size > out_size - at) return false;
            std::memcpy(out + at, in, size);
            in += size;
            at += size;
            continue;
        }
        size_t size = 0, offset = 0;
        if ((tag & 3) == 1) {
            if (in == end) return false;
            size = size_t(tag >> 2 & 7) + 4;
            offset = size_t(tag >> 5) << 8 | *in++;
        } else {
            const size_t bytes = (tag & 3) == 2 ? 2 : 4;
            if (size_t(end - in) < bytes) return false;
            size = size_t(tag >> 2) + 1;
            for (size_t i = 0; i < bytes; ++i) offset |= size_t(in[i]) << (8 * i);
            in += bytes;
        }
        if (offset == 0 || offset > at || size > out_size - at) return false;
        repeat(out + at, offset, size, out_size - at >= SLACK);
        at += size;
    }
    return at == out_size;
}

}  // namespace lagom
