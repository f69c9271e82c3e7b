// Memory that the ranks of one host share, and who is who in it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace lagom {

// What went wrong in an exchange. No exchange follows it.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// A signal arrived, and its handler raised.
struct Interrupted : Failure {
    using Failure::Failure;
};

// What ranks count up, and sleep on. Each in a cache line of its own.
struct alignas(64) Counter {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> sleepers;
};

// What a rank calls; compared with what the others call before anything of theirs is used.
struct alignas(64) Call {
    uint8_t what, type, op, padding;
    int32_t root;
    uint64_t count;   // numbers for reductions, else bytes
    uint64_t number;  // of exchanges so far
};

// Counters for the messages from one rank to another, which travel in chunks: the one counts those that it has
// written, the other those that it has read.
struct Mail {
    Counter written, read;
};
struct Chunk {
    uint64_t total, tag;  // bytes of the message; what the program calls it
    uint8_t type;
};

struct alignas(64) Head {
    uint64_t magic;
    uint32_t size, version;
    uint64_t slot_bytes, mail_bytes;
    std::atomic<uint32_t> broken;  // 0: no; 1: `why` is being written; 2: it is
    char why[512];
};

// A mapping, of which all ranks have one.
//
// Head; a counter, a bell and a farewell for each rank; two calls for each rank; two slots for each rank; for each
// ordered pair of ranks mail with two chunks. Pages that are never used take no memory.
class Segment {
  public:
    // Bytes that `create` needs.
    static size_t bytes_for(int size, size_t slot_bytes, size_t mail_bytes);
    // A new file of no name, for this user only; Failure where there is no memory.
    static int create(int size, size_t slot_bytes, size_t mail_bytes);

    // Maps `fd`, which stays open. Failure when it is not of `size` ranks and this version.
    Segment(int fd, int size);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    // Leaves the mapping alone: a process forked from the one that made it has none.
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
