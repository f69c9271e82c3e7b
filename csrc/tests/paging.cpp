// Decodes cases of Parquet pages from a file, most of them damaged, and prints "ok" or the first difference.
//   build/paging FILE
//
// A case begins with eight numbers of 32 bits: whether pages are compressed by snappy, whether nulls are allowed,
// whether values are BYTE_ARRAYs; the bytes of the prefix, of a value, and of all pages; the number of values; and
// whether the right values are known. Then come the prefix, the pages, and the right values if they are known. If they
// are not known, only the sanitizer checks the case.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "pages.hpp"

namespace {

// Reads bytes into an allocation of exactly `size` bytes, so that a sanitizer sees accesses past its end.
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
    Pages pages;  // its memory is reused from case to case
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
            // An allocation that ends with the bytes read so far, so that a sanitizer sees accesses past them.
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
