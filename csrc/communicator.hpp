// Collectives of the ranks of one host. All ranks make the same calls in the same order, one at a time.
#pragma once

#include <mutex>
#include <string_view>
#include <vector>

#include "arithmetic.hpp"
#include "segment.hpp"
#include "waiting.hpp"

namespace lagom {

// The bytes that one rank gave in an exchange.
struct Row {
    const char* data;
    size_t size;
};

// Numbers of one type inside the body of a row.
struct Section {
    size_t start, count;  // start in bytes, count in numbers
    Type type;
};

// See Note [Steps]. Methods throw a Failure if an exchange fails; after that no call succeeds on any rank.
class Communicator {
  public:
    Communicator(int fd, int rank, const std::vector<Process>& processes, Limits limits);
    ~Communicator() { close(); }

    int rank() const { return rank_; }
    int size() const { return size_; }
    void set_timeout(double timeout_s) { waiting_.set_timeout(timeout_s); }

    void barrier();
    // Works in place.
    void all_reduce(void* data, size_t count, Type type, Op op);
    // `in` has `count` numbers for each rank.
    void reduce_scatter(const void* in, void* out, size_t count, Type type, Op op);
    // `in` has `counts[k]` numbers for rank k, in rank order; `out` may be this rank's place in `in`.
    void reduce_parts(const void* in, const std::vector<uint64_t>& counts, void* out, Type type, Op op);
    // In the methods that only move bytes, `type` is only compared between ranks.
    // `out` gets `bytes` from each rank; `in` may be this rank's place in `out`.
    void all_gather(const void* in, void* out, size_t bytes, Type type = Type::u8);
    void broadcast(void* data, size_t bytes, int root, Type type = Type::u8);
    // Only rank `root` uses `out`, which gets `bytes` from each rank.
    void gather(const void* in, void* out, size_t bytes, int root, Type type = Type::u8);
    // Only rank `root` uses `in`, which has `bytes` for each rank.
    void scatter(const void* in, void* out, size_t bytes, int root, Type type = Type::u8);
    // `to` and `from` are the numbers of bytes for and from each rank; `in` and `out` have these bytes in rank order.
    void all_to_all(const void* in, const std::vector<uint64_t>& to, void* out, const std::vector<uint64_t>& from,
                    Type type = Type::u8);

    // Exchanges rows, each a head and a body of any length, and returns those of all ranks; the row of this rank is
    // its `head` alone. The rows are valid until the next call.
    const std::vector<Row>& exchange(std::string_view head, std::string_view body);
    // Exchanges rows as `exchange` does; the body has `size` bytes, and its sections are read from `given`. If all
    // ranks gave the same head, writes the mean of each section over the ranks to `means`, as f32 for f16 and bf16, and
    // returns true; else returns false. An address in `means` may be that in `given` if the section's type stays the
    // same.
    bool average(std::string_view head, size_t size, const std::vector<Section>& sections, const void* const* given,
                 void* const* means);
    // The rows of the last `exchange` or `average`.
    const std::vector<Row>& rows() const { return rows_; }
    // Largest number of bytes, head and body together, that `average` takes.
    size_t room() const { return segment_.slot_bytes(); }

    // Messages are received in the order in which they were sent. Only one thread at a time may send from a rank to
    // another one, and only one may receive.
    void send(const void* data, size_t bytes, Type type, int to, uint64_t tag);
    void receive(void* data, size_t bytes, Type type, int from, uint64_t tag);
    // Waits for a message, and returns the rank that has sent it; the message is not received yet.
    int sender();

    // Nanoseconds for which this rank has waited for each other rank.
    std::vector<int64_t> waited() const;
    // The exchange in which this rank waits: a description, its number, and the ranks that have not yet reached the
    // step that it waits for. The description is empty if the rank does not wait. Any thread may call `standing`.
    struct Standing {
        std::string words;
        uint64_t number = 0;
        std::vector<int> missing;
    };
    Standing standing();

    // Makes the present exchange, and all later ones, fail on all ranks with `why`.
    void abort(const std::string& why) { waiting_.spread(why); }
    // Tells the other ranks that this rank takes part in no further exchange and sends no further message.
    void close();
    // For a process forked from a rank, which takes no part in the rank's exchanges.
    void forget() {
        closed_ = true;
        segment_.forget();
    }

  private:
    enum What : uint8_t { BARRIER, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, GATHER, SCATTER, ALL_TO_ALL, EXCHANGE };
    static const char* name(uint8_t what);
    static std::string words(const Call& call);
    static uint64_t packed(const Call& call);

    // Keeps other threads from exchanging for the life of this object. It checks `closed_` before it takes the lock: in
    // a forked process, a thread that does not exist there may hold the lock.
    class Turn {
      public:
        explicit Turn(Communicator& self) : lock_((self.check_open(), self.turn_)) {}

      private:
        std::lock_guard<std::mutex> lock_;
    };
    void check_open() const;
    void begin(What what, Type type, Op op, int root, uint64_t count);
    void next();
    void publish();
    void meet();
    void wait_all(uint32_t target);
    void wait_for(int peer, uint32_t target);
    void check_calls();
    void check_root(int root) const;
    void exchange_rows(std::string_view head, std::string_view body);
    template <class Write>
    void exchange_rows(std::string_view head, size_t own, const Write& write);
    bool all_gave(std::string_view head, size_t size) const;
    char* slot(int rank) { return segment_.slot(step_, rank); }
    char* next_slot(int rank) { return segment_.slot(step_ + 1, rank); }

    Segment segment_;
    Waiting waiting_;
    std::mutex turn_;
    int rank_, size_;
    uint32_t step_ = 0;
    uint64_t number_ = 0;
    const char* doing_ = "";
    std::atomic<uint64_t> current_{0};  // number of the exchange under way
    std::atomic<uint64_t> told_{0};     // its call, in the form of `packed`
    std::atomic<bool> closed_{false};
    std::vector<uint32_t> seen_;
    std::vector<Row> rows_;
    std::vector<std::vector<char>> long_rows_;
};

// Note [Steps]
//
// All exchanges consist of steps, which are numbered over the life of the communicator. Each rank has a counter, the
// last step for which it has written, and two slots, one for even steps and one for odd steps. In a step, a rank writes
// to its slot, sets its counter to the step, waits for the counters of the other ranks, and reads their slots. A
// counter at a step also says that its rank has read the slots of the step before. So before a rank writes for a step,
// it waits until all counters have reached the step before: then no rank still reads the content that the slot had two
// steps ago. Usually the counters are there already, so a step costs one wait.
//
// The first step of each exchange also compares the calls of the ranks. Data larger than a slot is exchanged in pieces,
// one in each step. In an all-reduce, each rank adds up one part of a piece, and gives the sums to the others in the
// next step, together with the next piece. Slots are small enough to stay in the processors' caches, so memory is read
// and written once, as in a copy.
//
// A rank that fails writes the reason to the segment's `Head`, and all other ranks fail with the same text.
}  // namespace lagom
