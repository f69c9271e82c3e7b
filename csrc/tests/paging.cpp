// Decodes pages of Parquet that a file holds, damaged as a rule, and prints "ok" or the first difference.
//   build/paging FILE
// A case is eight numbers of 32 bits (whether snappy, nulls may be, values are BYTE_ARRAYs; bytes of the prefix, of a value, of
// the pages; values; whether it is known what they are) and then the prefix, the pages and, where they are known, the values.
// Where they are not known, the sanitizer is the judge.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "pages.hpp"

namespace {

// A piece of memory of its own, so that a sanitizer sees what is read or written behind it.
std::unique_ptr<uint8_t[]> take(std::FILE* file, size_t size) {
    std::unique_ptr<uint8_t[]> found(new uint8_t[size]);
    if (std::fread(found.get(), 1, size, file) != size) std::puts("the file is cut off");
    return found;
}

}  // namespace

int main(int argc, char** names) {
    using lagom::Pages;
    std::FILE* const file = argc == 2 ? std::fopen(names[1], "rb") : nullptr;
    if (!file) return 2;
    uint32_t head[8];
    long number = 0;
    Pages pages;  // whose memory is used again
    for (; std::fread(head, sizeof head, 1, file) == 1; ++number) {
        const auto prefix = take(file, head[3]);
        const size_t size = head[5], count = head[6], each = head[4];
        const auto data = take(file, size);
        const std::unique_ptr<uint8_t[]> out(new uint8_t[count * each]);
        pages.begin({bool(head[0]), bool(head[1]), bool(head[2]), std::string(prefix.get(), prefix.get() + head[3]), each, count,
                     uint64_t(1) << 20});
        size_t rows = 0, at = 0, there = 0, wanted = size_t(number % 3) * 40 + 1;
        Pages::Status status = Pages::Status::starved;
        while (rows < count && status != Pages::Status::unusual) {
            if (status == Pages::Status::starved) {
                if (at + there == size) break;
                there = std::min(there + wanted, size - at);
            }
            // Memory that ends where what has been read does.
            const std::unique_ptr<uint8_t[]> window(new uint8_t[there]);
            std::memcpy(window.get(), data.get() + at, there);
            const auto step = pages.read(window.get(), there, {out.get(), 5, 5 * each}, rows, std::min<size_t>(count - rows, 7));
            if (step.used > there) return std::printf("case %ld used more than there was\n", number), 1;
            at += step.used, there -= step.used, rows += step.rows;
            status = step.status, wanted = std::min<size_t>(step.wanted, size);
        }
        if (!head[7]) continue;
        const auto told = take(file, count * each);
        if (rows < count) return std::printf("case %ld: %zu of %zu values\n", number, rows, count), 1;
        if (std::memcmp(told.get(), out.get(), count * each)) return std::printf("case %ld differs\n", number), 1;
    }
    std::fclose(file);
    return std::printf("ok, %ld cases\n", number), 0;
}
