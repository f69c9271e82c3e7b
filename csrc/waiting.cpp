#include "waiting.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace lagom {
namespace {

constexpr int64_t SLICE_NS = 100'000'000;  // longest sleep, after which the peer is checked
constexpr int64_t CROWDED_NS = 10'000;  // a longer sched_yield shows that another thread uses this core
constexpr int64_t SECOND_NS = 1'000'000'000;
constexpr double FOREVER_S = 1e9;  // some 30 years, whose nanoseconds fit into 64 bits

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Reads /proc/<pid>/stat; returns the text after the process name (which may contain anything), or nullptr if there is
// no such file.
const char* state_of(int pid, char (&text)[1024]) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return nullptr;
    const ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[std::max<ssize_t>(length, 0)] = 0;
    const char* end = std::strrchr(text, ')');
    return end == nullptr ? nullptr : end + 2;
}

}  // namespace

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND_NS + time.tv_nsec;
}

uint64_t started(int pid) {
    char text[1024];
    const char* field = state_of(pid, text);  // the third field
    for (int i = 3; field != nullptr && i < 22; ++i) {
        field = std::strchr(field, ' ');
        if (field != nullptr) ++field;
    }
    return field == nullptr ? 0 : std::strtoull(field, nullptr, 10);
}

Waiting::Waiting(Segment& segment, int rank, const std::vector<Process>& processes, Limits given)
    : segment_(segment), limits_(std::move(given)), timeout_s_(limits_.timeout_s), rank_(rank), processes_(processes), waited_(processes.size()) {
    for (size_t peer = 0; peer < processes_.size(); ++peer) {
        const auto [pid, since] = processes_[peer];
        const bool is_own = int(peer) == rank_ || pid == getpid();
        // If /proc tells when a process started, its pid and start identify it, and no descriptor is needed.
        pidfds_.push_back(is_own || since != 0 ? -1 : int(syscall(434 /* pidfd_open */, pid, 0)));
    }
}

Waiting::~Waiting() {
    for (const int fd : pidfds_)
        if (fd >= 0) close(fd);
}

void Waiting::publish(Counter& counter, uint32_t value) {
    // Sequentially consistent: either the sleeper sees the new value, or this thread sees the sleeper and wakes it.
    counter.value.store(value, std::memory_order_seq_cst);
    if (counter.sleepers.load(std::memory_order_seq_cst) != 0) wake(counter.value);
}

void Waiting::ring(Counter& counter) { wake(counter.value); }

int64_t Waiting::deadline() const { return now() + int64_t(std::clamp(timeout_s_.load(), 0.0, FOREVER_S) * 1e9); }

std::string Waiting::within() const {
    char text[64];
    std::snprintf(text, sizeof text, " within %g s", timeout_s_.load());
    return text;
}

void Waiting::reach_slowly(Counter& counter, int peer, uint32_t target, const char* doing) {
    const int64_t begun = now();
    target_.store(target, std::memory_order_relaxed);
    waits_.store(true, std::memory_order_release);
    try {
        wait_until(counter, peer, target, doing, begun);
    } catch (...) {
        waits_.store(false, std::memory_order_relaxed);
        throw;
    }
    waits_.store(false, std::memory_order_relaxed);
    // No other thread writes `waited_`, since only the thread that has the `Turn` waits.
    waited_[peer].store(waited(peer) + now() - begun, std::memory_order_relaxed);
}

void Waiting::wait_until(Counter& counter, int peer, uint32_t target, const char* doing, int64_t begun) {
    const int64_t spin_until = begun + int64_t(limits_.spin_s * 1e9);
    for (bool spins = limits_.spin_s > 0; spins; spins = now() < spin_until)
        for (int i = 0; i < 32; ++i) {
            if (reached(counter.value.load(std::memory_order_acquire), target)) return;
            relax();
        }
    int64_t before = limits_.spin_s > 0 ? now() : 0;
    for (int i = 0; i < limits_.yields; ++i) {
        sched_yield();
        if (reached(counter.value.load(std::memory_order_acquire), target)) return;
        // Another thread ran on this core, perhaps the peer. So sleep: the system may wake a sleeper on a free core.
        if (limits_.spin_s > 0 && now() - before > CROWDED_NS) break;
        if (limits_.spin_s > 0) before = now();
    }
    const int64_t end = deadline();
    while (true) {
        const uint32_t seen = counter.value.load(std::memory_order_acquire);
        if (reached(seen, target)) return;
        sleep(counter, seen, end);
        if (reached(counter.value.load(std::memory_order_acquire), target)) return;
        check_whole();
        // The peer may have counted before it went, so its counter is read once more after these checks.
        const bool gone = !is_alive(peer);
        const bool ended = segment_.farewell(peer).value.load(std::memory_order_acquire) != 0;
        if (reached(counter.value.load(std::memory_order_acquire), target)) return;
        if (ended)
            fail("rank " + std::to_string(peer) + " has ended, and rank " + std::to_string(rank_) +
                 " waits for it in " + doing);
        if (gone) fail(gone_while(peer, doing));
        check_interrupt(doing);
        if (now() >= end)
            fail("rank " + std::to_string(peer) + " did not come to " + doing + " of rank " + std::to_string(rank_) +
                 within());
    }
}

void Waiting::change(Counter& counter, uint32_t value, const char* doing, int64_t deadline) {
    const int64_t spin_until = now() + int64_t(limits_.spin_s * 1e9);
    do {
        if (counter.value.load(std::memory_order_acquire) != value) return;
        relax();
    } while (now() < spin_until);
    sleep(counter, value, deadline);
    check_whole();
    check_interrupt(doing);
    if (counter.value.load(std::memory_order_acquire) == value && now() >= deadline)
        fail("nothing came to rank " + std::to_string(rank_) + " in " + doing + within());
}

void Waiting::check_interrupt(const char* doing) {
    if (!limits_.interrupted()) return;
    spread("rank " + std::to_string(rank_) + " was interrupted in " + doing);
    throw Interrupted("interrupted");
}

void Waiting::sleep(Counter& counter, uint32_t seen, int64_t deadline) {
    const int64_t length = std::clamp<int64_t>(deadline - now(), 0, SLICE_NS);
    const timespec time{time_t(length / SECOND_NS), long(length % SECOND_NS)};
    counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (counter.value.load(std::memory_order_seq_cst) == seen && segment_.head().broken.load() != 2)
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&counter.value), FUTEX_WAIT, seen, &time, nullptr, 0);
    counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

bool Waiting::is_alive(int peer) {
    const auto [pid, since] = processes_[peer];
    if (peer == rank_ || pid == getpid()) return true;
    if (pidfds_[peer] >= 0) {
        pollfd one{pidfds_[peer], POLLIN, 0};
        return poll(&one, 1, 0) <= 0;  // -1 for a pending signal, which says nothing about the peer
    }
    char text[1024];
    const char* state = state_of(pid, text);
    return state != nullptr && *state != 'Z' && *state != 'X' && (since == 0 || started(pid) == since);
}

std::string Waiting::gone_while(int peer, const char* doing) const {
    return "the process of rank " + std::to_string(peer) + " is gone, and rank " + std::to_string(rank_) +
           " waits for it in " + doing;
}

void Waiting::check_whole() {
    Head& head = segment_.head();
    if (head.broken.load(std::memory_order_acquire) == 0) return;
    for (int i = 0; i < 1000 && head.broken.load(std::memory_order_acquire) == 1; ++i) sched_yield();
    const bool told = head.broken.load(std::memory_order_acquire) == 2;
    throw Failure(told ? std::string(head.why) : "another rank has failed");
}

void Waiting::spread(const std::string& why) noexcept {
    Head& head = segment_.head();
    uint32_t whole = 0;
    if (!head.broken.compare_exchange_strong(whole, 1)) return;
    std::strncpy(head.why, why.c_str(), sizeof head.why - 1);
    head.broken.store(2, std::memory_order_seq_cst);
    const int size = int(processes_.size());
    for (int one = 0; one < size; ++one) {
        wake(segment_.progress(one).value);
        wake(segment_.bell(one).value);
        for (int other = 0; other < size; ++other) {
            if (segment_.mail(one, other).written.sleepers.load() != 0) wake(segment_.mail(one, other).written.value);
            if (segment_.mail(one, other).read.sleepers.load() != 0) wake(segment_.mail(one, other).read.value);
        }
    }
}

void Waiting::say_farewell() noexcept {
    segment_.farewell(rank_).value.store(1, std::memory_order_seq_cst);
    if (segment_.progress(rank_).sleepers.load() != 0) wake(segment_.progress(rank_).value);
}

void Waiting::fail(const std::string& why) {
    spread(why);
    throw Failure(why);
}

}  // namespace lagom
