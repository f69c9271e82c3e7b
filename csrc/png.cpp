#include "png.hpp"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "crc.hpp"
#include "inflate.hpp"

namespace lagom {
namespace {

uint32_t number(const uint8_t* at) {
    return uint32_t(at[0]) << 24 | uint32_t(at[1]) << 16 | uint32_t(at[2]) << 8 | at[3];
}

constexpr uint32_t kind_of(const char (&name)[5]) {
    return uint32_t(name[0]) << 24 | uint32_t(name[1]) << 16 | uint32_t(name[2]) << 8 | uint32_t(name[3]);
}

// The predictor of section 9.4 of the specification.
inline int paeth(int left, int above, int corner) {
    const int guess = left + above - corner;
    const int to_left = std::abs(guess - left), to_above = std::abs(guess - above), to_corner = std::abs(guess - corner);
    return to_left <= to_above && to_left <= to_corner ? left : to_above <= to_corner ? above : corner;
}

// Undoes the filter of a line; `above` is the one before, undone, or zeros.
template <int CHANNELS>
bool undo(int filter, const uint8_t* line, const uint8_t* above, uint8_t* out, size_t size) {
    switch (filter) {
        case 0:
            std::memcpy(out, line, size);
            return true;
        case 1:
            for (size_t i = 0; i < size; ++i) out[i] = uint8_t(line[i] + (i < CHANNELS ? 0 : out[i - CHANNELS]));
            return true;
        case 2:
            for (size_t i = 0; i < size; ++i) out[i] = uint8_t(line[i] + above[i]);
            return true;
        case 3:
            for (size_t i = 0; i < size; ++i)
                out[i] = uint8_t(line[i] + ((i < CHANNELS ? 0 : out[i - CHANNELS]) + above[i]) / 2);
            return true;
        case 4: {
            int left[CHANNELS] = {}, corner[CHANNELS] = {};
            for (size_t i = 0; i < size; i += CHANNELS)
                for (int k = 0; k < CHANNELS; ++k) {
                    left[k] = uint8_t(line[i + k] + paeth(left[k], above[i + k], corner[k]));
                    corner[k] = above[i + k];
                    out[i + k] = uint8_t(left[k]);
                }
            return true;
        }
        default:
            return false;
    }
}

template <int CHANNELS>
bool lines(const std::vector<uint8_t>& raw, uint32_t height, size_t size, uint8_t* out) {
    const std::vector<uint8_t> zeros(size, 0);
    const uint8_t* above = zeros.data();
    for (uint32_t i = 0; i < height; ++i, above = out, out += size) {
        const uint8_t* const line = raw.data() + i * (size + 1);
        if (!undo<CHANNELS>(line[0], line + 1, above, out, size)) return false;
    }
    return true;
}

// What the chunks between the first and the last say; the data of the image, joined where it is in several.
struct Data {
    const uint8_t* start = nullptr;
    size_t size = 0;
    std::vector<uint8_t> joined;
    void add(const uint8_t* part, size_t count) {
        if (!start) {
            start = part;
        } else {
            if (joined.empty()) joined.assign(start, start + size);
            joined.insert(joined.end(), part, part + count);
            start = joined.data();
        }
        size += count;
    }
};

bool chunks(const uint8_t* at, size_t size, Data& data) {
    bool ended = false;
    while (size >= 12) {
        const size_t count = number(at);
        const uint32_t kind = number(at + 4);
        const uint8_t* const body = at + 8;
        if (count > size - 12) return false;
        if (kind == kind_of("IEND")) return data.start && !count && crc32(at + 4, 4) == number(body);
        if (kind == kind_of("IDAT")) {
            if (ended || crc32(at + 4, count + 4) != number(body + count)) return false;
            if (count) data.add(body, count);
        } else {
            // Transparent colours and animations change what decoders give; what is critical beside these, too.
            const bool is_critical = !(at[4] & 32);
            if (is_critical || kind == kind_of("tRNS") || kind == kind_of("acTL")) return false;
            ended = data.start;
        }
        at += count + 12;
        size -= count + 12;
    }
    return false;
}

}  // namespace

bool decode_png(const uint8_t* data, size_t size, uint32_t height, uint32_t width, int channels, uint8_t* out) {
    static constexpr uint8_t head[16] = {137, 'P', 'N', 'G', 13, 10, 26, 10, 0, 0, 0, 13, 'I', 'H', 'D', 'R'};
    // Eight bits; colours or not; the only compression and filters there are; lines in order.
    const uint8_t kind[5] = {8, uint8_t(channels == 3 ? 2 : 0), 0, 0, 0};
    if (size < 33 || std::memcmp(data, head, 16) || std::memcmp(data + 24, kind, 5)) return false;
    if (channels != 1 && channels != 3) return false;
    if (!height || !width || number(data + 16) != width || number(data + 20) != height) return false;
    if (crc32(data + 12, 17) != number(data + 29)) return false;
    Data found;
    if (!chunks(data + 33, size - 33, found)) return false;
    const size_t line = size_t(width) * size_t(channels);
    // Deflate makes 1032 bytes of one at most: no memory for what cannot be there.
    if ((line + 1) * height / 1032 > found.size) return false;
    std::vector<uint8_t> raw((line + 1) * height);
    if (!inflate(found.start, found.size, raw.data(), raw.size())) return false;
    return channels == 3 ? lines<3>(raw, height, line, out) : lines<1>(raw, height, line, out);
}

}  // namespace lagom
