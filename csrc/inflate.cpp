#include "inflate.hpp"

#include <cstring>

namespace lagom {
namespace {

// An entry of a table tells what a code stands for: the bits of the code, those that follow it, and a value to which
// these are added. A code that is longer than a table's index leads to a second part of the table.
constexpr uint32_t LITERAL = 1u << 13, END = 1u << 14, WRONG = 1u << 15, LONGER = 1u << 12;
constexpr int MOST_BITS = 15;

inline int code_bits(uint32_t entry) { return entry & 15; }
inline int more_bits(uint32_t entry) { return entry >> 4 & 15; }
inline uint32_t value_of(uint32_t entry) { return entry >> 16; }
constexpr uint32_t entry_of(uint32_t value, int more) { return value << 16 | uint32_t(more) << 4; }

// Codes of one alphabet. PRIMARY bits are looked up at once; of a complete code, each prefix of longer ones has two
// symbols or more, so that SYMBOLS / 2 second parts are enough.
template <int SYMBOLS, int PRIMARY>
struct Table {
    uint32_t entries[(1 << PRIMARY) + (SYMBOLS / 2 + 1) * (1 << (MOST_BITS - PRIMARY))];
    int longest;

    // From the lengths of the codes, as RFC 1951 numbers them. What is incomplete is refused as zlib refuses it: but for
    // a single code of one bit, or none at all where `may_lack`.
    bool make(const uint8_t* lengths, int count, const uint32_t* meanings, bool may_lack) {
        int counts[MOST_BITS + 1] = {};
        for (int symbol = 0; symbol < count; ++symbol) ++counts[lengths[symbol]];
        counts[0] = 0;
        longest = MOST_BITS;
        while (longest && !counts[longest]) --longest;
        int left = 1;
        for (int bits = 1; bits <= MOST_BITS; ++bits) {
            left = 2 * left - counts[bits];
            if (left < 0) return false;
        }
        if (left > 0 && (!may_lack || longest > 1)) return false;
        for (int i = 0; i < 1 << PRIMARY; ++i) entries[i] = WRONG;
        int starts[MOST_BITS + 2] = {};
        for (int bits = 1; bits <= MOST_BITS; ++bits) starts[bits + 1] = starts[bits] + counts[bits];
        uint16_t sorted[SYMBOLS];
        int places[MOST_BITS + 2];
        std::memcpy(places, starts, sizeof places);
        for (int symbol = 0; symbol < count; ++symbol)
            if (lengths[symbol]) sorted[places[lengths[symbol]]++] = uint16_t(symbol);
        uint32_t code = 0;
        int end = 1 << PRIMARY, part = -1, second = 0;
        for (int bits = 1; bits <= longest; ++bits, code <<= 1) {
            for (int i = starts[bits]; i < starts[bits + 1]; ++i, ++code) {
                const uint32_t found = meanings[sorted[i]] | uint32_t(bits);
                const uint32_t turned = reversed(code, bits);
                if (bits <= PRIMARY) {
                    for (uint32_t at = turned; at < 1u << PRIMARY; at += 1u << bits) entries[at] = found;
                    continue;
                }
                const int prefix = int(turned & ((1u << PRIMARY) - 1));
                const int size = 1 << (longest - PRIMARY);
                if (prefix != part) {
                    part = prefix;
                    second = end;
                    end += size;
                    entries[prefix] = LONGER | uint32_t(second) << 16;
                }
                for (int at = int(turned >> PRIMARY); at < size; at += 1 << (bits - PRIMARY)) entries[second + at] = found;
            }
        }
        return true;
    }

    uint32_t find(uint64_t bits) const {
        uint32_t found = entries[bits & ((1u << PRIMARY) - 1)];
        if (found & LONGER) found = entries[value_of(found) + (bits >> PRIMARY & ((1u << (longest - PRIMARY)) - 1))];
        return found;
    }

    static uint32_t reversed(uint32_t code, int bits) {
        code = (code & 0x5555) << 1 | (code >> 1 & 0x5555);
        code = (code & 0x3333) << 2 | (code >> 2 & 0x3333);
        code = (code & 0x0f0f) << 4 | (code >> 4 & 0x0f0f);
        return ((code & 0xff) << 8 | code >> 8) >> (16 - bits);
    }
};

constexpr int LENGTHS = 288, DISTANCES = 32, ORDERS = 19;

struct Meanings {
    uint32_t lengths[LENGTHS]{}, distances[DISTANCES]{}, orders[ORDERS]{};
    constexpr Meanings() {
        for (int i = 0; i < 256; ++i) lengths[i] = entry_of(uint32_t(i), 0) | LITERAL;
        lengths[256] = END;
        uint32_t value = 3;
        for (int i = 0; i < 28; ++i) {
            const int more = i < 8 ? 0 : i / 4 - 1;
            lengths[257 + i] = entry_of(value, more);
            value += 1u << more;
        }
        lengths[285] = entry_of(258, 0);
        lengths[286] = lengths[287] = WRONG;
        value = 1;
        for (int i = 0; i < 30; ++i) {
            const int more = i < 4 ? 0 : i / 2 - 1;
            distances[i] = entry_of(value, more);
            value += 1u << more;
        }
        distances[30] = distances[31] = WRONG;
        for (int i = 0; i < ORDERS; ++i) orders[i] = entry_of(uint32_t(i), 0);
    }
};
constexpr Meanings MEANINGS;

// What is read, bit by bit; a value, as a compiler keeps a local one in registers.
struct Bits {
    const uint8_t *at, *end;
    uint64_t bits = 0;
    int num = 0;

    // At least 56 bits, or all that is left.
    void fill() {
        if (end - at >= 8) {
            uint64_t word;
            std::memcpy(&word, at, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
            word = __builtin_bswap64(word);
#endif
            bits |= word << num;
            at += (63 - num) >> 3;
            num |= 56;
            return;
        }
        while (num <= 56 && at < end) {
            bits |= uint64_t(*at++) << num;
            num += 8;
        }
    }

    bool drop(int count) {
        if (count > num) return false;
        bits >>= count;
        num -= count;
        return true;
    }

    bool take(int count, uint32_t& value) {
        if (num < count) fill();
        value = uint32_t(bits & ((uint64_t(1) << count) - 1));
        return drop(count);
    }

    // Whole bytes go back to where they came from.
    void align() {
        drop(num & 7);
        at -= num >> 3;
        bits = 0;
        num = 0;
    }

    size_t left() const { return size_t(end - at); }
};

class Stream {
public:
    Stream(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size)
        : in_{in, in + in_size}, out_(out), out_start_(out), out_end_(out + out_size) {}

    bool read() {
        uint32_t head, is_last = 0;
        // 32 KB of window at most, deflate, no dictionary.
        if (!in_.take(16, head) || (head & 15) != 8 || (head >> 4 & 15) > 7 || head & 1u << 13) return false;
        if (((head & 255) << 8 | head >> 8) % 31) return false;
        while (!is_last) {
            uint32_t kind;
            if (!in_.take(1, is_last) || !in_.take(2, kind)) return false;
            if (!(kind == 0 ? stored() : kind == 1 ? fixed() : kind == 2 && dynamic())) return false;
        }
        return out_ == out_end_ && sums_up();
    }

private:
    bool stored() {
        in_.align();
        if (in_.left() < 4) return false;
        const size_t size = in_.at[0] | size_t(in_.at[1]) << 8;
        if ((in_.at[2] | size_t(in_.at[3]) << 8) != (size ^ 0xffff)) return false;
        in_.at += 4;
        if (in_.left() < size || size_t(out_end_ - out_) < size) return false;
        if (size) std::memcpy(out_, in_.at, size);
        in_.at += size;
        out_ += size;
        return true;
    }

    bool fixed() {
        uint8_t lengths[LENGTHS], distances[DISTANCES];
        for (int i = 0; i < LENGTHS; ++i) lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
        std::memset(distances, 5, sizeof distances);
        return lengths_.make(lengths, LENGTHS, MEANINGS.lengths, false) &&
               distances_.make(distances, DISTANCES, MEANINGS.distances, false) && symbols();
    }

    bool dynamic() {
        static constexpr uint8_t places[ORDERS] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
        uint32_t num_lengths, num_distances, num_orders;
        if (!in_.take(5, num_lengths) || !in_.take(5, num_distances) || !in_.take(4, num_orders)) return false;
        num_lengths += 257;
        num_distances += 1;
        if (num_lengths > 286 || num_distances > 30) return false;
        uint8_t orders[ORDERS] = {};
        for (uint32_t i = 0; i < num_orders + 4; ++i) {
            uint32_t bits;
            if (!in_.take(3, bits)) return false;
            orders[places[i]] = uint8_t(bits);
        }
        if (!orders_.make(orders, ORDERS, MEANINGS.orders, false)) return false;
        uint8_t all[286 + 30 + 138];
        uint32_t count = 0;
        while (count < num_lengths + num_distances) {
            in_.fill();
            const uint32_t found = orders_.find(in_.bits);
            if (found & WRONG || !in_.drop(code_bits(found))) return false;
            const uint32_t symbol = value_of(found);
            if (symbol < 16) {
                all[count++] = uint8_t(symbol);
                continue;
            }
            uint32_t times;
            if (symbol == 16 && !count) return false;
            if (!in_.take(symbol == 16 ? 2 : symbol == 17 ? 3 : 7, times)) return false;
            times += symbol == 18 ? 11 : 3;
            if (count + times > num_lengths + num_distances) return false;
            std::memset(all + count, symbol == 16 ? all[count - 1] : 0, times);
            count += times;
        }
        if (!all[256]) return false;  // no end
        return lengths_.make(all, int(num_lengths), MEANINGS.lengths, true) &&
               distances_.make(all + num_lengths, int(num_distances), MEANINGS.distances, true) && symbols();
    }

    bool symbols() {
        Bits in = in_;
        uint8_t* out = out_;
        for (;;) {
            in.fill();
            uint32_t found = lengths_.find(in.bits);
            // 56 bits are three literals of 15, and there may be as many.
            for (int i = 0; i < 2 && found & LITERAL; ++i) {
                if (out == out_end_ || !in.drop(code_bits(found))) return false;
                *out++ = uint8_t(value_of(found));
                found = lengths_.find(in.bits);
            }
            if (found & (LITERAL | WRONG | END)) {
                if (found & WRONG || !in.drop(code_bits(found))) return false;
                if (found & END) break;
                if (out == out_end_) return false;
                *out++ = uint8_t(value_of(found));
                continue;
            }
            uint32_t more;
            if (!in.drop(code_bits(found)) || !in.take(more_bits(found), more)) return false;
            const size_t length = value_of(found) + more;
            in.fill();
            found = distances_.find(in.bits);
            if (found & WRONG || !in.drop(code_bits(found)) || !in.take(more_bits(found), more)) return false;
            const size_t distance = value_of(found) + more;
            if (distance > size_t(out - out_start_) || length > size_t(out_end_ - out)) return false;
            repeat(out, distance, length);
            out += length;
        }
        in_ = in;
        out_ = out;
        return true;
    }

    static void repeat(uint8_t* out, size_t distance, size_t length) {
        const uint8_t* const from = out - distance;
        if (distance == 1) {
            std::memset(out, *from, length);
        } else if (distance >= length) {
            std::memcpy(out, from, length);
        } else {
            for (size_t i = 0; i < length; ++i) out[i] = from[i];
        }
    }

    // Adler's sum, as RFC 1950 has it.
    bool sums_up() {
        in_.align();
        if (in_.left() < 4) return false;
        const uint8_t* const sum = in_.at;
        const uint32_t told = uint32_t(sum[0]) << 24 | uint32_t(sum[1]) << 16 | uint32_t(sum[2]) << 8 | sum[3];
        uint32_t low = 1, high = 0;
        for (const uint8_t* at = out_start_; at < out_end_;) {
            const uint8_t* const stop = out_end_ - at > 5552 ? at + 5552 : out_end_;  // so that 32 bits hold it
            for (; at < stop; ++at) {
                low += *at;
                high += low;
            }
            low %= 65521;
            high %= 65521;
        }
        return told == (high << 16 | low);
    }

    Bits in_;
    uint8_t *out_, *out_start_, *out_end_;
    Table<LENGTHS, 10> lengths_;
    Table<DISTANCES, 8> distances_;
    Table<ORDERS, 7> orders_;
};

}  // namespace

bool inflate(const uint8_t* in, size_t in_size, uint8_t* out, size_t out_size) {
    return Stream(in, in_size, out, out_size).read();
}

}  // namespace lagom
