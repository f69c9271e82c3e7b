#include <algorithm>
#include <cstring>

#include "communicator.hpp"

namespace lagom {
namespace {

std::string message(uint64_t bytes, uint8_t type, uint64_t tag) {
    return std::to_string(bytes) + " bytes of " + name_of(Type(type)) + " with tag " + std::to_string(tag);
}

}  // namespace

void Communicator::send(const void* data, size_t bytes, Type type, int to, uint64_t tag) {
    check_open();
    check_root(to);
    if (to == rank_) throw Failure("a rank sends nothing to itself");
    waiting_.check_whole();
    Mail& mail = segment_.mail(rank_, to);
    uint32_t number = mail.written.value.load(std::memory_order_relaxed);  // nobody else writes it
    for (size_t start = 0; start == 0 || start < bytes; start += segment_.mail_bytes()) {
        waiting_.reach(mail.read, to, number - 1, "receive");
        segment_.chunk(rank_, to, number) = Chunk{bytes, tag, uint8_t(type)};
        const size_t num = std::min(segment_.mail_bytes(), bytes - start);
        if (num != 0) std::memcpy(segment_.text(rank_, to, number), static_cast<const char*>(data) + start, num);
        Waiting::publish(mail.written, ++number);
        Counter& bell = segment_.bell(to);
        bell.value.fetch_add(1, std::memory_order_seq_cst);
        if (bell.sleepers.load(std::memory_order_seq_cst) != 0) Waiting::ring(bell);
    }
}

void Communicator::receive(void* data, size_t bytes, Type type, int from, uint64_t tag) {
    check_open();
    check_root(from);
    if (from == rank_) throw Failure("a rank receives nothing from itself");
    waiting_.check_whole();
    Mail& mail = segment_.mail(from, rank_);
    uint32_t number = mail.read.value.load(std::memory_order_relaxed);  // nobody else writes it
    for (size_t start = 0; start == 0 || start < bytes; start += segment_.mail_bytes()) {
        waiting_.reach(mail.written, from, number + 1, "send");
        const Chunk& chunk = segment_.chunk(from, rank_, number);
        if (chunk.total != bytes || chunk.tag != tag || chunk.type != uint8_t(type))
            waiting_.fail("rank " + std::to_string(from) + " sends " + message(chunk.total, chunk.type, chunk.tag) +
                          ", rank " + std::to_string(rank_) + " receives " + message(bytes, uint8_t(type), tag));
        const size_t num = std::min(segment_.mail_bytes(), bytes - start);
        if (num != 0) std::memcpy(static_cast<char*>(data) + start, segment_.text(from, rank_, number), num);
        Waiting::publish(mail.read, ++number);
    }
}

int Communicator::sender() {
    check_open();
    const int64_t deadline = waiting_.deadline();
    int gone = -1;
    while (true) {
        waiting_.check_whole();
        const uint32_t rung = segment_.bell(rank_).value.load(std::memory_order_acquire);
        for (int from = 0; from < size_; ++from) {
            Mail& mail = segment_.mail(from, rank_);
            if (mail.written.value.load(std::memory_order_acquire) != mail.read.value.load(std::memory_order_relaxed))
                return from;
        }
        if (gone >= 0) waiting_.fail(waiting_.gone_while(gone, "send"));
        waiting_.change(segment_.bell(rank_), rung, "receive", deadline);
        // A rank that is gone may have sent a message before. So its death only counts after the next look at messages.
        for (int from = 0; from < size_ && gone < 0; ++from)
            if (from != rank_ && segment_.farewell(from).value.load() == 0 && !waiting_.is_alive(from)) gone = from;
    }
}

}  // namespace lagom
