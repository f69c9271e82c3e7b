// How a rank waits for another: it spins for a while, then sleeps, and notices when the other is gone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "segment.hpp"

namespace lagom {

struct Process {
    int pid;
    uint64_t started;  // as /proc tells it, so that another process of the same number is told apart; 0: unknown
};

// When this process began, in the units of /proc; 0 where unknown.
uint64_t started(int pid);

struct Limits {
    double timeout_s = 1800;
    double spin_s = 50e-6;
    int yields = 0;  // of the processor, before sleeping
    std::function<bool()> interrupted = [] { return false; };  // asked between sleeps; true ends the exchange
};

class Waiting {
  public:
    Waiting(Segment& segment, int rank, const std::vector<Process>& processes, Limits limits);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    // Counts up to `value`, and wakes who waits for it. What was written before is seen by them.
    static void publish(Counter& counter, uint32_t value);

    static void ring(Counter& counter);  // wakes who sleeps on it

    // Until `counter` of rank `peer` has reached `target`; counters may wrap. Failure when that will not be.
    void reach(Counter& counter, int peer, uint32_t target, const char* doing) {
        if (reached(counter.value.load(std::memory_order_acquire), target)) return;
        reach_slowly(counter, peer, target, doing);
    }
    // Until `counter` is no longer `value`, whoever counts. False: look again for other reasons to stop waiting.
    void change(Counter& counter, uint32_t value, const char* doing, int64_t deadline);

    // Nothing more comes from this rank: who waits for it looks now.
    void say_farewell() noexcept;
    // Failure when some rank has failed.
    void check_whole();
    // Has all ranks fail, and this one now.
    [[noreturn]] void fail(const std::string& why);
    // The same with no exception.
    void spread(const std::string& why) noexcept;
    bool is_alive(int peer);
    std::string gone_while(int peer, const char* doing) const;

    // From the next exchange on.
    void set_timeout(double timeout_s) { timeout_s_ = timeout_s; }
    int64_t deadline() const;

    // Nanoseconds that this rank has waited for `peer`, but for waits that are short and the one under way.
    int64_t waited(int peer) const { return waited_[peer].load(std::memory_order_relaxed); }
    // Whether it waits now, for counters to reach `target`; to be asked by any thread.
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
    std::string within() const;  // the timeout, in words

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

// Nanoseconds of a clock that is never set.
int64_t now();

}  // namespace lagom
