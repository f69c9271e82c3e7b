// Inflates what a file holds, of which zlib has said beforehand what is in it, and prints "ok" or the first difference.
//   build/inflating FILE
// A case is three numbers of 32 bits (bytes that were deflated, bytes that they should make, whether they do) and these
// bytes, in that order; the second only where they do.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>

#include "inflate.hpp"

namespace {

// A piece of memory of its own, so that a sanitizer sees what is read or written behind it.
std::unique_ptr<uint8_t[]> take(std::FILE* file, size_t size) {
    std::unique_ptr<uint8_t[]> found(new uint8_t[size]);
    if (std::fread(found.get(), 1, size, file) != size) std::puts("the file is cut off");
    return found;
}

}  // namespace

int main(int count, char** names) {
    std::FILE* const file = count == 2 ? std::fopen(names[1], "rb") : nullptr;
    if (!file) return 2;
    uint32_t head[3];
    long number = 0;
    for (; std::fread(head, sizeof head, 1, file) == 1; ++number) {
        const auto in = take(file, head[0]);
        const std::unique_ptr<uint8_t[]> out(new uint8_t[head[1]]);
        const bool is_done = lagom::inflate(in.get(), head[0], out.get(), head[1]);
        if (is_done != bool(head[2])) return std::printf("case %ld: %s, zlib not\n", number, is_done ? "right" : "wrong"), 1;
        if (is_done && std::memcmp(take(file, head[1]).get(), out.get(), head[1])) return std::printf("case %ld differs\n", number), 1;
    }
    std::fclose(file);
    return std::printf("ok, %ld cases\n", number), 0;
}
