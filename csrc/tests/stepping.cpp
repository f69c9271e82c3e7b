// Makes steps of Adam in one piece and in pieces of every size, and prints "ok" or what differs. What the numbers should
// be is torch's to say (tests/optimizers/test_adam.py); this is for a sanitizer, which sees what is read or written behind.
//   build/stepping
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "adam.hpp"

using namespace lagom;

namespace {

struct Parameters {
    std::vector<std::unique_ptr<double[]>> memory;
    std::vector<AdamEntry> entries;
    std::vector<size_t> counts;

    void* take(size_t count, unsigned seed) {
        memory.emplace_back(new double[count]);
        counts.push_back(count);
        std::mt19937 drawn(seed);
        for (size_t i = 0; i < count; ++i) memory.back()[i] = double(drawn() % 1000) / 1000;
        return memory.back().get();
    }
    explicit Parameters(const std::vector<size_t>& sizes) {
        for (unsigned i = 0; i < sizes.size(); ++i) {
            AdamEntry entry{};
            entry.count = sizes[i];
            entry.param = take(entry.count, 5 * i);
            entry.grad = take(entry.count, 5 * i + 1);
            entry.average = take(entry.count, 5 * i + 2);
            entry.square = take(entry.count, 5 * i + 3);
            entry.step = take(1, 5 * i + 4);
            *static_cast<double*>(entry.step) = double(i);
            entries.push_back(entry);
        }
    }
    bool step(size_t most) {
        AdamStep step(entries, true, true, Adam{0.9, 0.99, 0.1, 1e-8, 0.01, most % 2 == 0, false, false});
        const std::unique_ptr<double[]> room(new double[most]);
        if (!step.lies_apart()) return false;
        while (const size_t count = step.averages(room.get(), most)) {
            for (size_t i = 0; i < count; ++i) room[i] = std::sqrt(room[i]);
            step.changes(room.get());
        }
        return true;
    }
};

}  // namespace

int main() {
    const std::vector<std::vector<size_t>> all{{}, {0}, {1}, {5, 0, 3}, {0, 0, 7, 1, 16, 0}, {40, 1, 40}};
    int number = 0;
    for (const auto& sizes : all) {
        for (size_t most = 1; most < 90; ++most, ++number) {
            Parameters whole(sizes), pieces(sizes);
            if (!whole.step(1000 + most % 2) || !pieces.step(most)) return std::puts("memory seems to overlap"), 1;
            for (size_t i = 0; i < whole.memory.size(); ++i)
                for (size_t k = 0; k < whole.counts[i]; ++k)
                    if (whole.memory[i][k] != pieces.memory[i][k])
                        return std::printf("case %d: number %zu of %zu differs\n", number, k, i), 1;
            for (size_t i = 0; i < sizes.size(); ++i)
                if (*static_cast<double*>(pieces.entries[i].step) != double(i + 1)) return std::puts("a count is wrong"), 1;
        }
    }
    return std::printf("ok, %d cases\n", number), 0;
}
