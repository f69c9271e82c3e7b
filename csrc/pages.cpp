#include "pages.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "crc.hpp"
#include "snappy.hpp"
#include "unpack.hpp"

namespace lagom {
namespace {

constexpr size_t ROOM = 16;
constexpr size_t INDICES = 1024;  // number of indices that are unpacked at a time
constexpr int64_t MOST = int64_t(1) << 30;  // largest number of bytes or values of a page
constexpr int64_t ABSENT = std::numeric_limits<int64_t>::min();
enum Type : int64_t { DATA = 0, INDEX = 1, DICTIONARY = 2, DATA_2 = 3 };
enum Encoding : int64_t { PLAIN = 0, PLAIN_DICTIONARY = 2, RLE = 3, RLE_DICTIONARY = 8 };

// Reads bytes in Thrift's compact protocol. `is_over`: they end too early; `is_wrong`: they are not in this protocol.
struct Compact {
    const uint8_t* at;
    const uint8_t* end;
    bool is_over = false, is_wrong = false;

    bool ok() const { return !is_over && !is_wrong; }
    uint8_t byte() {
        if (at == end) return is_over = true, 0;
        return *at++;
    }
    uint64_t varint() {
        uint64_t found = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            const uint8_t next = byte();
            found |= uint64_t(next & 127) << shift;
            if (next < 128) return found;
        }
        return is_wrong = true, 0;
    }
    int64_t number() {
        const uint64_t found = varint();
        return int64_t(found >> 1) ^ -int64_t(found & 1);
    }
    void skip(uint64_t size) {
        if (size > uint64_t(end - at)) is_over = true;
        else at += size;
    }
};

}  // namespace

// PageHeader of parquet.thrift. Field number i is `fields[i]`; field number i of the struct in field s is
// `fields[16 * s + i]`.
struct Pages::Header {
    int64_t fields[16 * 16];

    void read(Compact& in, int base, int depth) {
        int id = 0;
        while (in.ok()) {
            const uint8_t head = in.byte();
            if (!in.ok() || !head) return;
            id = head >> 4 ? id + (head >> 4) : int(std::clamp<int64_t>(in.number(), -1, 1000));
            const int place = id > 0 && id < 16 && base >= 0 ? base + id : -1;
            int64_t value = ABSENT;
            switch (head & 15) {
                case 1: value = 1; break;
                case 2: value = 0; break;
                case 3: value = in.byte(); break;
                case 5: value = in.number(); break;
                case 4: case 6: in.number(); break;  // the header needs no field of these types
                case 8: in.skip(in.varint()); break;
                case 12:
                    if (depth == 3) in.is_wrong = true;
                    else read(in, depth == 0 && id > 0 && id < 16 ? 16 * id : -1, depth + 1);
                    break;
                default: in.is_wrong = true;
            }
            if (place >= 0 && (head & 15) != 12 && (head & 15) != 8) fields[place] = value;
        }
    }
    int64_t type() const { return fields[1]; }
    int64_t whole() const { return fields[2]; }
    bool has_sum() const { return fields[4] != ABSENT; }
    uint32_t sum() const { return uint32_t(fields[4]); }
    int64_t stored() const { return fields[3]; }
    int64_t of(int part, int id) const { return fields[16 * part + id]; }
};

void Pages::begin(Kind kind) {
    kind_ = std::move(kind);
    left_ = kind_.count;
    page_left_ = num_entries_ = 0;
    has_dictionary_ = false;
}

Pages::Step Pages::read(const uint8_t* data, size_t size, Out out, size_t done, size_t rows) {
    Step step{0, 0, Status::done, 0};
    while (step.rows < rows) {
        if (page_left_) {
            const size_t place = (done + step.rows) % out.piece;
            const size_t count = std::min({page_left_, rows - step.rows, out.piece - place});
            if (!take(out.at + (done + step.rows) / out.piece * out.jump + place * kind_.size, count)) break;
            step.rows += count;
            page_left_ -= count;
            left_ -= count;
            continue;
        }
        if (!left_) break;
        Header header;
        std::fill(std::begin(header.fields), std::end(header.fields), ABSENT);
        Compact in{data + step.used, data + size};
        header.read(in, 0, 0);
        if (in.is_wrong) break;
        if (in.is_over) return step.status = Status::starved, step.wanted = 1, step;
        if (header.stored() < 0 || header.stored() > MOST || header.whole() < 0 || header.whole() > MOST ||
            uint64_t(header.whole()) > kind_.most)
            break;
        const size_t stored = size_t(header.stored()), there = size_t(in.end - in.at);
        if (there < stored) return step.status = Status::starved, step.wanted = stored - there, step;
        if (header.has_sum() && header.sum() != crc32(in.at, stored)) break;
        if (!open(header, in.at, stored)) break;
        step.used = size_t(in.at - data) + stored;
    }
    if (step.rows < rows) step.status = Status::unusual;
    return step;
}

namespace {

// Returns whether all of `count` definition levels of one bit are 1. Levels, like indices, are stored as runs of one
// value and runs of bit-packed values.
bool all_ones(const uint8_t* at, const uint8_t* end, size_t count) {
    Compact in{at, end};
    while (count) {
        const uint64_t head = in.varint();
        if (!in.ok()) return false;
        if (!(head & 1)) {
            if (in.byte() != 1 || !in.ok() || !(head >> 1)) return false;
            count -= size_t(std::min<uint64_t>(count, head >> 1));
            continue;
        }
        if (!(head >> 1)) return false;
        for (uint64_t group = head >> 1; group && count; --group) {
            const size_t here = std::min<size_t>(count, 8);
            const uint8_t mask = uint8_t((1u << here) - 1);
            if ((in.byte() & mask) != mask || !in.ok()) return false;
            count -= here;
        }
    }
    return true;
}

}  // namespace

// Makes the page whose `size` bytes are at `data` the current page, or the dictionary. Returns false if it cannot be
// decoded here.
bool Pages::open(const Header& header, const uint8_t* data, size_t size) {
    const bool is_dictionary = header.type() == DICTIONARY, is_second = header.type() == DATA_2;
    if (!is_dictionary && !is_second && header.type() != DATA) return false;
    const int part = is_dictionary ? 7 : is_second ? 8 : 5;
    const int64_t count = header.of(part, 1), encoding = header.of(part, is_second ? 4 : 2);
    // These fields are required by parquet.thrift.
    for (int id = 1; id <= (is_dictionary ? 2 : is_second ? 6 : 4); ++id)
        if (header.of(part, id) < 0) return false;
    if (count < 0 || count > MOST || (!is_dictionary && uint64_t(count) > left_)) return false;
    size_t whole = size_t(header.whole());
    bool is_snappy = kind_.is_snappy;
    if (is_second) {
        const int64_t levels = header.of(8, 5);
        if (header.of(8, 2) != 0 || header.of(8, 3) != count || header.of(8, 6) != 0) return false;
        if (levels < 0 || uint64_t(levels) > size || uint64_t(levels) > whole) return false;
        if (kind_.is_optional ? !all_ones(data, data + levels, size_t(count)) : levels != 0) return false;
        data += levels;
        size -= size_t(levels);
        whole -= size_t(levels);
        if (header.of(8, 7) == 0) is_snappy = false;
    }
    std::vector<uint8_t>& into = is_dictionary ? dictionary_ : page_;
    if (into.size() < whole + ROOM) into = std::vector<uint8_t>(whole + ROOM);
    if (is_snappy ? !unsnap(data, size, into.data(), whole) : size != whole) return false;
    if (!is_snappy && whole) std::memcpy(into.data(), data, whole);
    if (is_dictionary) {
        if (has_dictionary_ || (encoding != PLAIN && encoding != PLAIN_DICTIONARY)) return false;
        has_dictionary_ = true;
        num_entries_ = size_t(count);
        return has_values(into.data(), whole, num_entries_);
    }
    at_ = into.data();
    end_ = at_ + whole;
    if (!is_second && kind_.is_optional) {
        uint32_t levels = 0;
        if (header.of(5, 3) != RLE || whole < 4) return false;
        std::memcpy(&levels, at_, 4);
        if (levels > whole - 4 || !all_ones(at_ + 4, at_ + 4 + levels, size_t(count))) return false;
        at_ += 4 + size_t(levels);
    }
    page_left_ = size_t(count);
    if (encoding == PLAIN) return is_indexed_ = false, has_values(at_, size_t(end_ - at_), page_left_);
    if ((encoding != RLE_DICTIONARY && encoding != PLAIN_DICTIONARY) || !has_dictionary_) return false;
    is_indexed_ = true;
    run_left_ = 0;
    if (!count) return true;
    if (at_ == end_ || *at_ > 32) return false;
    bits_ = *at_++;
    return true;
}

// Returns whether `values` are `count` values that all have the size and prefix of the column.
bool Pages::has_values(const uint8_t* values, size_t size, size_t count) const {
    if (size % stride() || size / stride() != count) return false;
    if (!kind_.is_bytes) return true;
    const uint32_t length = uint32_t(stride() - 4);
    for (size_t i = 0; i < count; ++i, values += stride())
        if (std::memcmp(values, &length, 4) || std::memcmp(values + 4, kind_.prefix.data(), kind_.prefix.size())) return false;
    return true;
}

bool Pages::take(uint8_t* out, size_t rows) {
    if (is_indexed_) return take_indexed(out, rows);
    if (!kind_.is_bytes) {
        std::memcpy(out, at_, rows * kind_.size);
    } else {
        for (size_t i = 0; i < rows; ++i) std::memcpy(out + i * kind_.size, at_ + i * stride() + skipped(), kind_.size);
    }
    at_ += rows * stride();
    return true;
}

bool Pages::next_run() {
    Compact in{at_, end_};
    const uint64_t head = in.varint(), count = head >> 1;
    if (!in.ok() || !count || count > uint64_t(MOST)) return false;
    if (head & 1) {
        run_repeats_ = false;
        // The bytes of the last run may end after its last index.
        const uint64_t bytes = std::min<uint64_t>(count * uint64_t(bits_), uint64_t(end_ - in.at));
        run_end_ = in.at + bytes;
        run_left_ = bits_ ? size_t(std::min<uint64_t>(count * 8, bytes * 8 / uint64_t(bits_))) : size_t(count * 8);
        at_ = in.at;
        run_bit_ = 0;
        return run_left_ > 0;
    }
    run_repeats_ = true;
    run_value_ = 0;
    for (int i = 0; i < (bits_ + 7) / 8; ++i) run_value_ |= uint32_t(in.byte()) << (8 * i);
    run_left_ = size_t(count);
    run_end_ = at_ = in.at;
    return in.ok();
}

namespace {

template <class Value>
void gather(const uint8_t* values, const uint32_t* indices, uint8_t* out, size_t count) {
    for (size_t i = 0; i < count; ++i) std::memcpy(out + i * sizeof(Value), values + size_t(indices[i]) * sizeof(Value), sizeof(Value));
}

}  // namespace

bool Pages::take_indexed(uint8_t* out, size_t rows) {
    uint32_t indices[INDICES];
    while (rows) {
        if (!run_left_ && !next_run()) return false;
        const size_t count = std::min({rows, run_left_, INDICES});
        uint32_t largest = 0;
        if (run_repeats_) {
            std::fill(indices, indices + count, run_value_);
            largest = run_value_;
        } else {
            unpack(at_, run_bit_, bits_, indices, count);  // it may read past the page, which has ROOM
            for (size_t i = 0; i < count; ++i) largest = std::max(largest, indices[i]);
            run_bit_ += count * size_t(bits_);
        }
        if (largest >= num_entries_) return false;
        if (kind_.is_bytes) {
            for (size_t i = 0; i < count; ++i)
                std::memcpy(out + i * kind_.size, dictionary_.data() + indices[i] * stride() + skipped(), kind_.size);
        } else if (kind_.size == 4) {
            gather<uint32_t>(dictionary_.data(), indices, out, count);
        } else {
            gather<uint64_t>(dictionary_.data(), indices, out, count);
        }
        out += count * kind_.size;
        rows -= count;
        run_left_ -= count;
        if (!run_left_) at_ = run_end_;
    }
    return true;
}

}  // namespace lagom
