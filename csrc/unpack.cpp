#include "unpack.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

namespace lagom {
namespace {

// Unpacks 8 numbers, which are BITS bytes. The compiler knows all shifts and offsets, so this takes a third of the time
// of `one_by_one`.
template <int BITS>
inline void eight(const uint8_t* in, uint32_t* out) {
    using Word = std::conditional_t<BITS <= 25, uint32_t, uint64_t>;
    constexpr Word mask = Word((uint64_t(1) << BITS) - 1);
    for (int i = 0; i < 8; ++i) {
        Word word;
        std::memcpy(&word, in + i * BITS / 8, sizeof word);
        out[i] = uint32_t(word >> (i * BITS % 8) & mask);
    }
}

template <int BITS>
void eights(const uint8_t* in, uint32_t* out, size_t times) {
    for (; times; --times, in += BITS, out += 8) eight<BITS>(in, out);
}

using Eights = void (*)(const uint8_t*, uint32_t*, size_t);

template <size_t... BITS>
constexpr std::array<Eights, sizeof...(BITS)> all(std::index_sequence<BITS...>) {
    return {eights<int(BITS)>...};
}

constexpr auto EIGHTS = all(std::make_index_sequence<33>());

void one_by_one(const uint8_t* in, size_t bit, int bits, uint32_t* out, size_t count) {
    const uint64_t mask = (uint64_t(1) << bits) - 1;
    for (size_t i = 0; i < count; ++i, bit += size_t(bits)) {
        uint64_t word;
        std::memcpy(&word, in + bit / 8, 8);
        out[i] = uint32_t(word >> (bit & 7) & mask);
    }
}

}  // namespace

void unpack(const uint8_t* in, size_t bit, int bits, uint32_t* out, size_t count) {
    // Every eighth number begins at a byte, as `eights` needs it; the numbers before it are unpacked one by one.
    const size_t ahead = bits ? std::min(count, (8 - bit / size_t(bits) % 8) % 8) : 0;
    one_by_one(in, bit, bits, out, ahead);
    bit += ahead * size_t(bits);
    const size_t whole = (count - ahead) & ~size_t(7);
    EIGHTS[size_t(bits)](in + bit / 8, out + ahead, whole / 8);
    one_by_one(in, bit + whole * size_t(bits), bits, out + ahead + whole, count - ahead - whole);
}

}  // namespace lagom
