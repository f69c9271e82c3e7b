// Waiting of a rank for another one: it spins for a while, then sleeps, and notices when the other process is gone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "segment.hpp"

namespace lagom {

struct Process {
    int pid;
    uint64_t started;  // from /proc, to recognise another process with the same pid; 0: unknown
};

// Returns the start time of process `pid`, in the units of /proc; 0 if it is unknown.
uint64_t started(int pid);

struct Limits {
    double timeout_s = 1800;
    double spin_s = 50e-6;
    int yields = 0;  // number of sched_yield calls before sleeping
    std::function<bool()> interrupted = [] { return false; };  // called between sleeps; true ends the exchange
};

class Waiting {
  public:
    Waiting(Segment& segment, int rank, const std::vector<Process>& processes, Limits limits);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    // Sets `counter` to `value`, and wakes the threads that sleep on it. They see all memory written before.
    static void publish(Counter& counter, uint32_t value);

    static void ring(Counter& counter);  // wakes the threads that sleep on it

    // Waits until `counter` of rank `peer` has reached `target`; counters may wrap. Throws a Failure on a timeout, if any
    // rank has failed, or if `peer` has ended or its process is gone.
    void reach(Counter& counter, int peer, uint32_t target, const char* doing) {
        if (reached(counter.value.load(std::memory_order_acquire), target)) return;
        reach_slowly(counter, peer, target, doing);
    }
    // Waits for a while until `counter` differs from `value`, whichever rank increases it. It may return earlier; the
    // caller then checks for other reasons to stop waiting.
    void change(Counter& counter, uint32_t value, const char* doing, int64_t deadline);

    // Marks this rank as ended, and wakes the ranks that wait for it.
    void say_farewell() noexcept;
    // Throws a Failure if any rank has failed.
    void check_whole();
    // Makes all ranks fail with `why`, this one by a Failure now.
    [[noreturn]] void fail(const std::string& why);
    // Makes all other ranks fail with `why`, without an exception here.
    void spread(const std::string& why) noexcept;
    bool is_alive(int peer);
    std::string gone_while(int peer, const char* doing) const;

    // Sets the timeout from the next exchange on.
    void set_timeout(double timeout_s) { timeout_s_ = timeout_s; }
    int64_t deadline() const;

    // Nanoseconds that this rank has waited for `peer`, without waits that ended at once and without the present wait.
    int64_t waited(int peer) const { return waited_[peer].load(std::memory_order_relaxed); }
    // Whether this rank waits now, and for which `target` of counters. Any thread may call this.
    bool waits(uint32_t& target) const {
        target = target_.load(std::memory_order_relaxed);
        return waits_.load(std::memory_order_acquire);
    }

    static bool reached(uint32_t value, uint32_t target) { return int32_t(value - target) >= 0; }

  private:
    void reach_slowly(Counter& counter, int peer, uint32_t target, const char* doing);
    void wait_until(Counter& counter, int peer, uint32_t target, const char* doing, int64_t begun);
    void sleep(Counter& counter, uint32_t seen, int64_t deadline);
    void check_interrupt(const char* doing);
    std::string within() const;  // the timeout, as text

    Segment& segment_;
    const Limits limits_;
    std::atomic<double> timeout_s_;  // may be set while another thread waits
    int rank_;
    std::vector<Process> processes_;
    std::vector<int> pidfds_;
    std::vector<std::atomic<int64_t>> waited_;
    std::atomic<uint32_t> target_{0};
    std::atomic<bool> waits_{false};
};

// Nanoseconds of the monotonic clock.
int64_t now();

}  // namespace lagom
