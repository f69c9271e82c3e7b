#include "communicator.hpp"

#include <algorithm>
#include <cstring>

namespace lagom {

Communicator::Communicator(int fd, int rank, const std::vector<Process>& processes, Limits limits)
    : segment_(fd, int(processes.size())),
      waiting_(segment_, rank, processes, std::move(limits)),
      rank_(rank),
      size_(int(processes.size())),
      seen_(processes.size(), 0),
      rows_(processes.size()),
      long_rows_(processes.size()) {
    if (rank < 0 || rank >= size_) throw Failure("rank " + std::to_string(rank) + " is none of this segment's");
}

void Communicator::close() {
    if (!closed_.exchange(true)) waiting_.say_farewell();
}

void Communicator::check_open() const {
    if (closed_) throw Failure("this communicator is closed, or was another process's");
}

const char* Communicator::name(uint8_t what) {
    static const char* const names[] = {"barrier",   "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                        "gather",    "scatter",    "all_to_all",     "exchange"};
    return what <= EXCHANGE ? names[what] : "?";
}

std::string Communicator::words(const Call& call) {
    std::string said = name(call.what);
    if (call.what == ALL_REDUCE || call.what == REDUCE_SCATTER)
        said += std::string(" (") + name_of(Op(call.op)) + ") of " + std::to_string(call.count) + " " +
                name_of(Type(call.type));
    else if (call.what != BARRIER && call.what != ALL_TO_ALL && call.what != EXCHANGE)
        said += " of " + std::to_string(call.count) + " bytes";
    if (call.what >= ALL_GATHER && call.what <= ALL_TO_ALL && Type(call.type) != Type::u8)
        said += std::string(" of ") + name_of(Type(call.type));
    if (call.root >= 0) said += " with root " + std::to_string(call.root);
    return said;
}

void Communicator::begin(What what, Type type, Op op, int root, uint64_t count) {
    check_open();
    doing_ = name(what);
    waiting_.check_whole();
    next();
    const Call call{what, uint8_t(type), uint8_t(op), 0, root, count, number_++};
    told_.store(packed(call), std::memory_order_relaxed);
    current_.store(call.number, std::memory_order_relaxed);
    segment_.call(step_, rank_) = call;
}

std::vector<int64_t> Communicator::waited() const {
    std::vector<int64_t> found;
    for (int peer = 0; peer < size_; ++peer) found.push_back(waiting_.waited(peer));
    return found;
}

uint64_t Communicator::packed(const Call& call) {
    return uint64_t(call.what) | uint64_t(call.type) << 8 | uint64_t(call.op) << 16 | std::min<uint64_t>(call.count, (uint64_t(1) << 40) - 1) << 24;
}

Communicator::Standing Communicator::standing() {
    Standing found;
    uint32_t target = 0;
    if (closed_ || !waiting_.waits(target)) return found;
    const uint64_t told = told_.load(std::memory_order_relaxed);
    Call call{};
    call.what = uint8_t(told), call.type = uint8_t(told >> 8), call.op = uint8_t(told >> 16);
    call.root = -1, call.count = told >> 24;
    found.words = call.what == EXCHANGE ? "exchange of " + std::to_string(call.count) + " bytes" : words(call);
    found.number = current_.load(std::memory_order_relaxed);
    for (int peer = 0; peer < size_; ++peer)
        if (peer != rank_ && !Waiting::reached(segment_.progress(peer).value.load(std::memory_order_acquire), target))
            found.missing.push_back(peer);
    return found;
}

void Communicator::next() {
    ++step_;
    wait_all(step_ - 1);
}

void Communicator::publish() { Waiting::publish(segment_.progress(rank_), step_); }

void Communicator::wait_for(int peer, uint32_t target) {
    if (Waiting::reached(seen_[peer], target)) return;
    waiting_.reach(segment_.progress(peer), peer, target, doing_);
    // The peer may be ahead of `target` by now; a later call reads its counter again.
    seen_[peer] = target;
}

void Communicator::wait_all(uint32_t target) {
    for (int i = 1; i < size_; ++i) wait_for((rank_ + i) % size_, target);
}

void Communicator::meet() {
    publish();
    wait_all(step_);
    check_calls();
}

void Communicator::check_calls() {
    const Call& first = segment_.call(step_, 0);
    for (int peer = 1; peer < size_; ++peer) {
        const Call& call = segment_.call(step_, peer);
        const bool same = call.what == first.what && call.type == first.type && call.op == first.op &&
                          call.root == first.root && call.number == first.number &&
                          (call.count == first.count || call.what == EXCHANGE);
        if (!same)
            waiting_.fail("the ranks call different things: rank 0 " + words(first) + ", rank " +
                          std::to_string(peer) + " " + words(call));
    }
}

void Communicator::check_root(int root) const {
    if (root < 0 || root >= size_) throw Failure("there is no rank " + std::to_string(root));
}

}  // namespace lagom
