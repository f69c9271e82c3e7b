// Runs ranks as threads of one process, so that ThreadSanitizer and AddressSanitizer see all of them. Prints "ok", or
// the exchange that gave a wrong result.
//
//     harness [rounds]
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "communicator.hpp"
#include "ring.hpp"

using namespace lagom;

namespace {

std::atomic<int> failures{0};

void expect(bool right, const char* what, int rank, size_t count) {
    if (right) return;
    std::printf("rank %d: %s of %zu is wrong\n", rank, what, count);
    ++failures;
}

// The number that rank `rank` gives at place `i` in round `round`; small and whole, so that sums are exact.
float given(int round, int rank, size_t i) { return float((round * 31 + rank * 7 + i * 13) % 101); }

std::vector<float> numbers(int round, int rank, size_t count) {
    std::vector<float> made(count);
    for (size_t i = 0; i < count; ++i) made[i] = given(round, rank, i);
    return made;
}

struct Rank {
    Communicator all;
    int rank, size;

    void reduce(int round, size_t count) {
        std::vector<float> data = numbers(round, rank, count);
        all.all_reduce(data.data(), count, Type::f32, Op::sum);
        bool right = true;
        for (size_t i = 0; i < count; ++i) {
            float sum = 0;
            for (int k = 0; k < size; ++k) sum += given(round, k, i);
            right = right && data[i] == sum;
        }
        expect(right, "all_reduce", rank, count);
        std::vector<float> part(count);
        data = numbers(round, rank, count * size);
        all.reduce_scatter(data.data(), part.data(), count, Type::f32, Op::max);
        right = true;
        for (size_t i = 0; i < count; ++i) {
            float most = 0;
            for (int k = 0; k < size; ++k) most = std::max(most, given(round, k, rank * count + i));
            right = right && part[i] == most;
        }
        expect(right, "reduce_scatter", rank, count);
        std::vector<uint64_t> counts(size);
        size_t before = 0, total = 0;
        for (int k = 0; k < size; total += counts[k++]) {
            counts[k] = (k + round) % 3 * count;
            if (k == rank) before = total;
        }
        data = numbers(round, rank, total);
        part.assign(counts[rank], 0);
        const bool in_place = round % 2 == 0;  // `out` may be this rank's place in `in`
        float* const sums = in_place ? data.data() + before : part.data();
        all.reduce_parts(data.data(), counts, sums, Type::f32, Op::sum);
        right = true;
        for (size_t i = 0; i < counts[rank]; ++i) {
            float sum = 0;
            for (int k = 0; k < size; ++k) sum += given(round, k, before + i);
            right = right && sums[i] == sum;
        }
        expect(right, "reduce_parts", rank, count);
    }

    void move(int round, size_t count) {
        const std::vector<float> mine = numbers(round, rank, count);
        std::vector<float> every(count * size), found(count);
        all.all_gather(mine.data(), every.data(), count * 4);
        bool right = true;
        for (int k = 0; k < size; ++k)
            right = right && (count == 0 || !std::memcmp(&every[k * count], numbers(round, k, count).data(), count * 4));
        expect(right, "all_gather", rank, count);
        const int root = round % size;
        found = mine;
        all.broadcast(found.data(), count * 4, root);
        expect(found == numbers(round, root, count), "broadcast", rank, count);
        std::fill(every.begin(), every.end(), -1.f);
        all.gather(mine.data(), every.data(), count * 4, root);
        right = true;
        for (int k = 0; k < size && rank == root; ++k)
            right = right && (count == 0 || !std::memcmp(&every[k * count], numbers(round, k, count).data(), count * 4));
        expect(right, "gather", rank, count);
        const std::vector<float> whole = numbers(round, root, count * size);
        all.scatter(whole.data(), found.data(), count * 4, root);
        expect(std::equal(found.begin(), found.end(), whole.begin() + rank * count), "scatter", rank, count);
        all.barrier();
    }

    void deal(int round, size_t count) {
        std::vector<uint64_t> to(size), from(size);
        size_t sent = 0, received = 0;
        for (int k = 0; k < size; ++k) {
            sent += to[k] = (rank + 2 * k) % 3 * count;
            received += from[k] = (k + 2 * rank) % 3 * count;
        }
        std::vector<char> in(sent), out(received);
        for (int k = 0, at = 0; k < size; at += int(to[k++])) std::fill_n(in.begin() + at, to[k], char(round + rank * size + k));
        all.all_to_all(in.data(), to, out.data(), from);
        bool right = true;
        for (int k = 0, at = 0; k < size; at += int(from[k++]))
            for (size_t i = 0; i < from[k]; ++i) right = right && out[at + i] == char(round + k * size + rank);
        expect(right, "all_to_all", rank, count);
        const std::string head = "signature", body(count * rank, char('a' + rank));
        const std::vector<Row>& rows = all.exchange(head, body);
        right = true;
        for (int k = 0; k < size; ++k)
            right = right && std::string(rows[k].data, rows[k].size) == head + (k == rank ? "" : std::string(count * k, char('a' + k)));
        expect(right, "exchange", rank, count);
        const int next = (rank + 1) % size, before = (rank + size - 1) % size;
        if (size == 1) return;
        std::thread sending([&] { all.send(in.data(), sent, Type::u8, next, 7); });
        uint64_t coming = 0;
        for (int k = 0; k < size; ++k) coming += (before + 2 * k) % 3 * count;
        std::vector<char> got(coming);
        if (round % 2) expect(size > 2 || all.sender() == before, "sender", rank, count);
        all.receive(got.data(), coming, Type::u8, before, 7);
        sending.join();
        right = true;
        for (int k = 0, at = 0; k < size; ++k)
            for (size_t i = 0; i < (before + 2 * k) % 3 * count; ++i) right = right && got[at++] == char(round + before * size + k);
        expect(right, "send", rank, count);
    }

    void average(int round, size_t count) {
        const std::vector<float> mine = numbers(round, rank, count);
        std::vector<float> total(count);
        const std::vector<Section> whole{{0, count, Type::f32}};
        const void* const given_at[] = {mine.data()};
        void* const mean_at[] = {total.data()};
        expect(all.average(std::string(32, 's'), count * 4, whole, given_at, mean_at), "agreement", rank, count);
        bool right = true;
        for (size_t i = 0; i < count; ++i) {
            float sum = 0;
            for (int k = 0; k < size; ++k) sum += given(round, k, i);
            right = right && total[i] == sum / float(size);
        }
        expect(right, "average", rank, count);
        expect(size == 1 || !all.average(std::string(32, char('a' + rank)), count * 4, whole, given_at, mean_at),
               "disagreement", rank, count);
        // Average in place, two sections that overlap in the middle third.
        std::vector<float> own = mine;
        const size_t part = count - count / 3;
        const std::vector<Section> parts{{0, part, Type::f32}, {part * 4, part, Type::f32}};
        void* const places[] = {own.data(), own.data() + count / 3};
        expect(all.average(std::string(32, 's'), part * 8, parts, places, places), "agreement in place", rank, count);
        expect(own == total, "average in place", rank, count);
        expect(size == 1 || !all.average(std::string(32, char('a' + rank)), part * 8, parts, places, places),
               "disagreement in place", rank, count);
        expect(own == total, "nothing changed", rank, count);
    }

    void run(int rounds) {
        std::mt19937 random(5);
        for (int round = 0; round < rounds; ++round) {
            const size_t count = random() % 8 == 0 ? 0 : random() % (1u << random() % 15);
            switch (random() % 4) {
                case 0: reduce(round, count); break;
                case 1: move(round, count); break;
                case 2: deal(round, count); break;
                default: average(round, std::min<size_t>(count, 1000)); break;
            }
        }
    }
};

void run_ranks(int size, int rounds) {
    const int fd = Segment::create(size, 8192, 1024);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
        threads.emplace_back([=] {
            const std::vector<Process> processes(size, Process{getpid(), 0});
            Limits limits;
            limits.timeout_s = 120;
            limits.spin_s = rank % 2 ? 20e-6 : 0;
            Rank one{{fd, rank, processes, limits}, rank, size};
            try {
                one.run(rounds);
                one.all.barrier();
            } catch (const std::exception& error) {
                std::printf("rank %d of %d: %s\n", rank, size, error.what());
                ++failures;
            }
        });
    for (std::thread& thread : threads) thread.join();
    close(fd);
}

// Ranks that call different things all get the same error.
void disagree() {
    const int fd = Segment::create(3, 8192, 1024);
    std::vector<std::string> said(3);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank)
        threads.emplace_back([&, rank] {
            Communicator one(fd, rank, std::vector<Process>(3, Process{getpid(), 0}), Limits{});
            float data[4] = {};
            try {
                if (rank == 2) one.broadcast(data, 16, 0);
                else one.all_reduce(data, 4, Type::f32, Op::sum);
            } catch (const Failure& error) {
                said[rank] = error.what();
            }
        });
    for (std::thread& thread : threads) thread.join();
    close(fd);
    expect(said[0].find("rank 2 broadcast of 16 bytes") != std::string::npos && said[0] == said[1] && said[1] == said[2],
           said[0].c_str(), 0, 0);
}

// One host's part of a sum over 3 hosts; `following` and `preceding` are its ends of the connections to its neighbours.
Streamed sum_over_hosts(int home, int following, int preceding, std::vector<float>& data, char mark, double timeout_s) {
    constexpr int HOSTS = 3;
    const size_t part = data.size() / HOSTS;
    const auto at = [&](int distance) { return reinterpret_cast<char*>(data.data() + size_t((home + distance + 6) % HOSTS) * part); };
    std::vector<Outgoing> outs;
    std::vector<Incoming> backs;
    for (int i = 0; i < 2 * (HOSTS - 1); ++i) {
        outs.push_back({at(i < HOSTS - 1 ? -i - 1 : HOSTS - 1 - i), part * sizeof(float), i - 1});
        backs.push_back({at(i < HOSTS - 1 ? -i - 2 : HOSTS - 2 - i), part * sizeof(float), i < HOSTS - 1});
    }
    std::vector<char> scratch(1000);  // 998 of these bytes are used, which is no whole number of floats
    return stream(following, preceding, std::string(22, mark), outs, backs, Type::f32, scratch.data(), 998, timeout_s);
}

void ring() {
    for (const size_t count : {0, 3, 999, 300'000}) {
        int ends[3][2];  // of the connection from each host to the next
        for (auto& pair : ends) expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "socketpair", 0, 0);
        std::vector<std::vector<float>> all;
        std::vector<std::thread> threads;
        for (int home = 0; home < 3; ++home) all.push_back(numbers(1, home, count));
        for (int home = 0; home < 3; ++home)
            threads.emplace_back([&, home] {
                const Streamed found = sum_over_hosts(home, ends[home][0], ends[(home + 2) % 3][1], all[home], 'h', 60);
                expect(found.ending == Ending::done, "ring", home, count);
            });
        for (std::thread& thread : threads) thread.join();
        bool right = true;
        for (int home = 0; home < 3; ++home)
            for (size_t i = 0; i < count; ++i)
                right = right && all[home][i] == given(1, 0, i) + given(1, 1, i) + given(1, 2, i);
        expect(right, "sum over hosts", 0, count);
        // Host 0 runs alone: first no message comes, then a message with another head, then its neighbour is gone.
        std::vector<float> data(3);
        const auto alone = [&] { return sum_over_hosts(0, ends[0][0], ends[2][1], data, 'h', 0.05); };
        expect(alone().ending == Ending::late, "late", 0, count);
        expect(send(ends[2][0], std::string(22, 'x').data(), 22, 0) == 22, "send", 0, 0);
        const Streamed other = alone();
        expect(other.ending == Ending::differs && other.found == std::string(22, 'x') && other.wanted[0] == 'h', "differs", 0, count);
        close(ends[2][0]);
        expect(alone().ending == Ending::gone, "gone", 0, count);
        for (const int end : {ends[0][0], ends[0][1], ends[1][0], ends[1][1], ends[2][1]}) close(end);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
    for (const int size : {1, 2, 3, 5}) run_ranks(size, rounds);
    disagree();
    ring();
    if (failures == 0) std::puts("ok");
    return failures != 0;
}
