// Memory that the ranks of one host share, and its layout.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace lagom {

// An exchange has failed, with the reason as its text. No later exchange succeeds.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// A signal arrived during an exchange, and its handler raised in Python.
struct Interrupted : Failure {
    using Failure::Failure;
};

// A counter that ranks increase, and that others wait for by a futex. Each counter has its own cache line.
struct alignas(64) Counter {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> sleepers;
};

// The call that a rank makes; it is compared with the other ranks' calls before any of their data is used.
struct alignas(64) Call {
    uint8_t what, type, op, padding;
    int32_t root;
    uint64_t count;   // numbers for reductions, else bytes
    uint64_t number;  // of this exchange, counted from 0
};

// Counters for the messages from one rank to another, which are sent in chunks: the chunks that the sender has written,
// and those that the receiver has read.
struct Mail {
    Counter written, read;
};
struct Chunk {
    uint64_t total, tag;  // bytes of the whole message, and the program's tag for it
    uint8_t type;
};

struct alignas(64) Head {
    uint64_t magic;
    uint32_t size, version;
    uint64_t slot_bytes, mail_bytes;
    std::atomic<uint32_t> broken;  // 0: no rank has failed; 1: `why` is being written; 2: `why` is complete
    char why[512];
};

// A rank's mapping of the shared memory.
//
// Its layout: the head; a progress counter for each rank, then a bell for each (rung when a message comes), then a
// farewell for each (set when the rank closes); two calls for each rank; two slots for each rank; and for each ordered
// pair of ranks mail with two chunks. Pages that are never used take no memory.
class Segment {
  public:
    // Returns the number of bytes that `create` needs.
    static size_t bytes_for(int size, size_t slot_bytes, size_t mail_bytes);
    // Creates an unnamed file for this user only, and returns its descriptor. Throws a Failure if there is no memory.
    static int create(int size, size_t slot_bytes, size_t mail_bytes);

    // Maps `fd`, which stays open. Throws a Failure if it was not created for `size` ranks by this version.
    Segment(int fd, int size);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    // Drops the mapping without unmapping it: a process forked from a rank does not inherit the mapping.
    void forget() { base_ = nullptr; }

    Head& head() { return *reinterpret_cast<Head*>(base_); }
    Counter& progress(int rank) { return counters()[rank]; }
    Counter& bell(int rank) { return counters()[size_ + rank]; }
    Counter& farewell(int rank) { return counters()[2 * size_ + rank]; }
    Call& call(uint32_t step, int rank) { return calls()[(step & 1) * size_ + rank]; }
    char* slot(uint32_t step, int rank) { return slots_ + ((step & 1) * size_ + rank) * slot_bytes_; }
    Mail& mail(int from, int to);
    Chunk& chunk(int from, int to, uint32_t number);
    char* text(int from, int to, uint32_t number) { return reinterpret_cast<char*>(&chunk(from, to, number)) + 64; }
    size_t slot_bytes() const { return slot_bytes_; }
    size_t mail_bytes() const { return mail_bytes_; }

  private:
    Counter* counters() { return reinterpret_cast<Counter*>(base_ + sizeof(Head)); }
    Call* calls() { return reinterpret_cast<Call*>(counters() + 3 * size_); }

    char* base_ = nullptr;
    char* slots_ = nullptr;
    char* mails_ = nullptr;
    size_t num_bytes_ = 0, slot_bytes_ = 0, mail_bytes_ = 0;
    int size_;
};

}  // namespace lagom
