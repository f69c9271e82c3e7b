// The exchanges of the ranks of one host. All ranks make the same calls in the same order, one at a time.
#pragma once

#include <mutex>
#include <string_view>
#include <vector>

#include "arithmetic.hpp"
#include "segment.hpp"
#include "waiting.hpp"

namespace lagom {

struct Row {
    const char* data;
    size_t size;
};

// Numbers of one type inside a row.
struct Section {
    size_t start, count;  // bytes, numbers
    Type type;
};

// See Note [Steps]. Throws Failure, after which no call succeeds on any rank.
class Communicator {
  public:
    Communicator(int fd, int rank, const std::vector<Process>& processes, Limits limits);
    ~Communicator() { close(); }

    int rank() const { return rank_; }
    int size() const { return size_; }
    void set_timeout(double timeout_s) { waiting_.set_timeout(timeout_s); }

    void barrier();
    // In place.
    void all_reduce(void* data, size_t count, Type type, Op op);
    // `in` has `count` numbers for each rank.
    void reduce_scatter(const void* in, void* out, size_t count, Type type, Op op);
    // `in` has `counts[k]` numbers for rank k, one behind the other; `out` may be this rank's place in it.
    void reduce_parts(const void* in, const std::vector<uint64_t>& counts, void* out, Type type, Op op);
    // Of what is moved the type is only compared.
    // `out` has `bytes` of each rank; `in` may be this rank's place in it.
    void all_gather(const void* in, void* out, size_t bytes, Type type = Type::u8);
    void broadcast(void* data, size_t bytes, int root, Type type = Type::u8);
    // `out` is rank `root`'s, with `bytes` of each rank.
    void gather(const void* in, void* out, size_t bytes, int root, Type type = Type::u8);
    // `in` is rank `root`'s, with `bytes` for each rank.
    void scatter(const void* in, void* out, size_t bytes, int root, Type type = Type::u8);
    // Bytes for each rank and from each rank, one behind the other.
    void all_to_all(const void* in, const std::vector<uint64_t>& to, void* out, const std::vector<uint64_t>& from,
                    Type type = Type::u8);

    // What each rank gave, of any lengths; in this rank's place is `head` alone. Valid until the next call.
    const std::vector<Row>& exchange(std::string_view head, std::string_view body);
    // The same exchange, of a body of `size` bytes whose sections lie at `given`. When all gave the same head: puts the mean
    // over the ranks of each section where `means` says, as f32 for f16 and bf16, and says true. `means` may
    // be `given` where that is the section's own type.
    bool average(std::string_view head, size_t size, const std::vector<Section>& sections, const void* const* given,
                 void* const* means);
    // What the ranks gave in the exchange or the average before.
    const std::vector<Row>& rows() const { return rows_; }
    // Bytes that `average` can take.
    size_t room() const { return segment_.slot_bytes(); }

    // Messages are received in the order in which they were sent. For each pair of ranks one thread at a time.
    void send(const void* data, size_t bytes, Type type, int to, uint64_t tag);
    void receive(void* data, size_t bytes, Type type, int from, uint64_t tag);
    // The next rank that has sent something.
    int sender();

    // Nanoseconds for which this rank has waited for each other.
    std::vector<int64_t> waited() const;
    // The exchange in which this rank waits, in words, its number, its bytes or numbers, and the ranks that have not
    // come to it or not got as far; no words where it does not wait. To be asked by any thread.
    struct Standing {
        std::string words;
        uint64_t number = 0;
        std::vector<int> missing;
    };
    Standing standing();

    // Which exchange comes to an end by force, on all ranks.
    void abort(const std::string& why) { waiting_.spread(why); }
    // Tells the others that this rank waits for nothing and sends nothing more.
    void close();
    // A process forked from a rank has no part in its exchanges.
    void forget() {
        closed_ = true;
        segment_.forget();
    }

  private:
    enum What : uint8_t { BARRIER, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, GATHER, SCATTER, ALL_TO_ALL, EXCHANGE };
    static const char* name(uint8_t what);
    static std::string words(const Call& call);
    static uint64_t packed(const Call& call);

    // Nobody else exchanges while it lives. A forked process may find the lock held by a thread that it does not have.
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
    std::atomic<uint64_t> current_{0};  // of the exchange under way: its number
    std::atomic<uint64_t> told_{0};     // and what is called, as `packed` has it
    std::atomic<bool> closed_{false};
    std::vector<uint32_t> seen_;
    std::vector<Row> rows_;
    std::vector<std::vector<char>> long_rows_;
};

// Note [Steps]
//
// All exchanges are made of steps, numbered from the first on. A rank has a counter, which says up to which step it has
// written, and two slots, for even steps and for odd ones. In a step it writes into its slot, counts up, waits for the
// others' counters, and reads their slots. To count up to a step says also that the reading of the step before is
// over. So who begins to write for a step waits until all have counted to the step before it: then nobody reads what
// lay in that slot two steps ago. As a rule that has long happened, and a step costs one wait.
//
// The first step of each exchange also compares what the ranks call. What is larger than a slot goes in pieces, one
// each step. In an all-reduce each rank adds up one part of a piece and gives the sum to the others in the next
// step, together with the next piece. Slots are small enough to stay in the processors' caches, so memory is read and
// written once, as in a copy.
//
// A rank that has failed says so in the head, and all others fail with its words.
}  // namespace lagom
