#include <algorithm>
#include <cstring>

#include "communicator.hpp"

namespace lagom {
namespace {

// Up to this many bytes of the other ranks together, each rank reduces everything itself: faster by measurement.
constexpr size_t SMALL = 32 << 10;

struct Part {
    size_t start, count;
};

// Part `k` when `size` ranks share out `count` numbers, in multiples of 64 numbers, which are whole cache lines.
Part part_of(size_t count, int size, int k) {
    const size_t each = ((count + size - 1) / size + 63) / 64 * 64;
    const size_t start = std::min(count, each * k);
    return {start, std::min(count, start + each) - start};
}

void copy(void* to, const void* from, size_t bytes) {
    if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

void Communicator::barrier() {
    const Turn turn(*this);
    begin(BARRIER, Type::u8, Op::sum, -1, 0);
    meet();
}

void Communicator::all_reduce(void* data, size_t count, Type type, Op op) {
    const Turn turn(*this);
    if (!has(type, op)) throw Failure(std::string("there is no ") + name_of(op) + " of " + name_of(type));
    const size_t width = size_of(type);
    char* const numbers = static_cast<char*>(data);
    std::vector<const void*> sources(size_);
    begin(ALL_REDUCE, type, op, -1, count);
    if (count * width * (size_ - 1) <= SMALL && count * width <= segment_.slot_bytes()) {
        copy(slot(rank_), data, count * width);
        meet();
        for (int k = 0; k < size_; ++k) sources[k] = k == rank_ ? data : slot(k);
        reduce(type, op, sources.data(), size_, data, nullptr, count);
        return;
    }
    // A slot holds a part of the piece for each other rank, and after these this rank's sums of the previous piece.
    const size_t most = segment_.slot_bytes() / (size_ + 1) / width / 64 * 64;
    const size_t piece = most * size_, sums = most * size_ * width;
    for (size_t start = 0, before = 0; start < count + piece; before = start, start += piece) {
        const bool first = start == 0, last = start >= count;
        if (!first) next();
        const size_t num = last ? 0 : std::min(piece, count - start);
        for (int k = 0; k < size_ && !last; ++k) {
            const Part part = part_of(num, size_, k);
            if (k != rank_)
                copy(slot(rank_) + k * most * width, numbers + (start + part.start) * width, part.count * width);
        }
        publish();
        wait_all(step_);
        if (first) check_calls();
        const size_t num_before = first ? 0 : std::min(piece, count - before);
        for (int i = 1; i < size_ && !first; ++i) {
            const int k = (rank_ + i) % size_;
            const Part part = part_of(num_before, size_, k);
            copy(numbers + (before + part.start) * width, slot(k) + sums, part.count * width);
        }
        if (!last) {
            const Part part = part_of(num, size_, rank_);
            char* const own = numbers + (start + part.start) * width;
            for (int k = 0; k < size_; ++k) sources[k] = k == rank_ ? own : slot(k) + rank_ * most * width;
            reduce(type, op, sources.data(), size_, own, next_slot(rank_) + sums, part.count);
        }
    }
}

void Communicator::reduce_scatter(const void* in, void* out, size_t count, Type type, Op op) {
    const Turn turn(*this);
    if (!has(type, op)) throw Failure(std::string("there is no ") + name_of(op) + " of " + name_of(type));
    const size_t width = size_of(type);
    const size_t piece = segment_.slot_bytes() / size_ / width / 64 * 64;
    const char* const numbers = static_cast<const char*>(in);
    std::vector<const void*> sources(size_);
    begin(REDUCE_SCATTER, type, op, -1, count);
    for (size_t start = 0; start == 0 || start < count; start += piece) {
        if (start != 0) next();
        const size_t num = std::min(piece, count - start);
        for (int k = 0; k < size_; ++k)
            if (k != rank_) copy(slot(rank_) + k * piece * width, numbers + (k * count + start) * width, num * width);
        publish();
        wait_all(step_);
        if (start == 0) check_calls();
        for (int k = 0; k < size_; ++k) {
            const char* const own = numbers + (rank_ * count + start) * width;
            sources[k] = k == rank_ ? own : slot(k) + rank_ * piece * width;
        }
        reduce(type, op, sources.data(), size_, static_cast<char*>(out) + start * width, nullptr, num);
    }
}

void Communicator::reduce_parts(const void* in, const std::vector<uint64_t>& counts, void* out, Type type, Op op) {
    const Turn turn(*this);
    if (!has(type, op)) throw Failure(std::string("there is no ") + name_of(op) + " of " + name_of(type));
    if (counts.size() != size_t(size_)) throw Failure("reduce_parts needs as many counts as there are ranks");
    const size_t width = size_of(type);
    const size_t piece = segment_.slot_bytes() / width / 64 * 64;
    const char* const numbers = static_cast<const char*>(in);
    size_t total = 0, own_start = 0;
    for (int k = 0; k < size_; total += counts[k++])
        if (k == rank_) own_start = total;
    const size_t own_end = own_start + counts[rank_];
    std::vector<const void*> sources(size_);
    begin(REDUCE_SCATTER, type, op, -1, total);
    // A slot holds the numbers of a piece in order, without this rank's own part.
    for (size_t start = 0; start == 0 || start < total; start += piece) {
        if (start != 0) next();
        const size_t end = std::min(total, start + piece);
        const size_t first = std::clamp(own_start, start, end), last = std::clamp(own_end, start, end);
        copy(slot(rank_), numbers + start * width, (first - start) * width);
        copy(slot(rank_) + (last - start) * width, numbers + last * width, (end - last) * width);
        publish();
        wait_all(step_);
        if (start == 0) check_calls();
        for (int k = 0; k < size_; ++k)
            sources[k] = k == rank_ ? numbers + first * width : slot(k) + (first - start) * width;
        if (first < last)
            reduce(type, op, sources.data(), size_, static_cast<char*>(out) + (first - own_start) * width, nullptr, last - first);
    }
}

void Communicator::all_gather(const void* in, void* out, size_t bytes, Type type) {
    const Turn turn(*this);
    const size_t piece = segment_.slot_bytes();
    char* const all = static_cast<char*>(out);
    begin(ALL_GATHER, type, Op::sum, -1, bytes);
    for (size_t start = 0; start == 0 || start < bytes; start += piece) {
        if (start != 0) next();
        const size_t num = std::min(piece, bytes - start);
        const char* const own = static_cast<const char*>(in) + start;
        copy(slot(rank_), own, num);
        publish();
        copy(all + rank_ * bytes + start, own, num);
        wait_all(step_);
        if (start == 0) check_calls();
        for (int i = 1; i < size_; ++i) {
            const int k = (rank_ + i) % size_;
            copy(all + k * bytes + start, slot(k), num);
        }
    }
}

void Communicator::broadcast(void* data, size_t bytes, int root, Type type) {
    const Turn turn(*this);
    check_root(root);
    const size_t piece = segment_.slot_bytes();
    char* const all = static_cast<char*>(data);
    begin(BROADCAST, type, Op::sum, root, bytes);
    for (size_t start = 0; start == 0 || start < bytes; start += piece) {
        // The root is at most one step ahead of the others: `next` waits until they have read the slot's last content.
        if (start != 0 && rank_ == root) next();
        else if (start != 0) ++step_;
        const size_t num = std::min(piece, bytes - start);
        if (rank_ == root) copy(slot(root), all + start, num);
        publish();
        if (start == 0) {
            wait_all(step_);
            check_calls();
        } else if (rank_ != root) {
            wait_for(root, step_);
        }
        if (rank_ != root) copy(all + start, slot(root), num);
    }
}

void Communicator::gather(const void* in, void* out, size_t bytes, int root, Type type) {
    const Turn turn(*this);
    check_root(root);
    const size_t piece = segment_.slot_bytes();
    char* const all = static_cast<char*>(out);
    begin(GATHER, type, Op::sum, root, bytes);
    for (size_t start = 0; start == 0 || start < bytes; start += piece) {
        if (start != 0) next();
        const size_t num = std::min(piece, bytes - start);
        const char* const own = static_cast<const char*>(in) + start;
        if (rank_ != root) copy(slot(rank_), own, num);
        publish();
        if (start == 0 || rank_ == root) wait_all(step_);
        if (start == 0) check_calls();
        for (int k = 0; k < size_ && rank_ == root; ++k)
            copy(all + k * bytes + start, k == rank_ ? own : slot(k), num);
    }
}

void Communicator::scatter(const void* in, void* out, size_t bytes, int root, Type type) {
    const Turn turn(*this);
    check_root(root);
    const size_t piece = segment_.slot_bytes() / size_ / 64 * 64;
    const char* const all = static_cast<const char*>(in);
    begin(SCATTER, type, Op::sum, root, bytes);
    for (size_t start = 0; start == 0 || start < bytes; start += piece) {
        if (start != 0 && rank_ == root) next();
        else if (start != 0) ++step_;
        const size_t num = std::min(piece, bytes - start);
        for (int k = 0; k < size_ && rank_ == root; ++k)
            if (k != rank_) copy(slot(root) + k * piece, all + k * bytes + start, num);
        publish();
        if (start == 0) {
            wait_all(step_);
            check_calls();
        } else if (rank_ != root) {
            wait_for(root, step_);
        }
        copy(static_cast<char*>(out) + start, rank_ == root ? all + rank_ * bytes + start : slot(root) + rank_ * piece, num);
    }
}

void Communicator::all_to_all(const void* in, const std::vector<uint64_t>& to, void* out,
                              const std::vector<uint64_t>& from, Type type) {
    const Turn turn(*this);
    if (to.size() != size_t(size_) || from.size() != size_t(size_))
        throw Failure("all_to_all needs as many lengths as there are ranks");
    const size_t piece = segment_.slot_bytes() / size_ / 64 * 64;
    begin(ALL_TO_ALL, type, Op::sum, -1, 0);
    // Exchange the lengths first, so that all ranks notice a wrong one.
    uint64_t* const lengths = reinterpret_cast<uint64_t*>(slot(rank_));
    for (int k = 0; k < size_; ++k) lengths[k] = to[k], lengths[size_ + k] = from[k];
    meet();
    uint64_t longest = 0;
    for (int k = 0; k < size_; ++k)
        for (int j = 0; j < size_; ++j) {
            const uint64_t sent = reinterpret_cast<uint64_t*>(slot(k))[j];
            const uint64_t wanted = reinterpret_cast<uint64_t*>(slot(j))[size_ + k];
            longest = std::max(longest, sent);
            if (sent != wanted)
                waiting_.fail("all_to_all: rank " + std::to_string(k) + " has " + std::to_string(sent) +
                              " bytes for rank " + std::to_string(j) + ", which wants " + std::to_string(wanted));
        }
    for (size_t start = 0; start < longest; start += piece) {
        next();
        size_t place = 0;
        for (int k = 0; k < size_; place += to[k++])
            if (k != rank_ && start < to[k])
                copy(slot(rank_) + k * piece, static_cast<const char*>(in) + place + start, std::min<size_t>(piece, to[k] - start));
        publish();
        wait_all(step_);
        place = 0;
        for (int k = 0; k < size_; place += from[k++])
            if (k != rank_ && start < from[k])
                copy(static_cast<char*>(out) + place + start, slot(k) + rank_ * piece, std::min<size_t>(piece, from[k] - start));
    }
    size_t source = 0, target = 0;
    for (int k = 0; k < rank_; ++k) source += to[k], target += from[k];
    copy(static_cast<char*>(out) + target, static_cast<const char*>(in) + source, to[rank_]);
}

// Exchanges rows of any length. `write(start)` fills this rank's slot with bytes of its row from `start` on; the row
// has `own` bytes.
template <class Write>
void Communicator::exchange_rows(std::string_view head, size_t own, const Write& write) {
    const size_t piece = segment_.slot_bytes();
    begin(EXCHANGE, Type::u8, Op::sum, -1, own);
    write(0);
    meet();
    size_t longest = 0;
    for (int k = 0; k < size_; ++k) {
        rows_[k] = k == rank_ ? Row{head.data(), head.size()} : Row{slot(k), segment_.call(step_, k).count};
        longest = std::max<size_t>(longest, segment_.call(step_, k).count);
    }
    if (longest <= piece) return;
    for (int k = 0; k < size_; ++k)
        if (k != rank_) {
            long_rows_[k].resize(rows_[k].size);
            copy(long_rows_[k].data(), rows_[k].data, std::min(piece, rows_[k].size));
            rows_[k].data = long_rows_[k].data();
        }
    for (size_t start = piece; start < longest; start += piece) {
        next();
        if (start < own) write(start);
        publish();
        wait_all(step_);
        for (int k = 0; k < size_; ++k)
            if (k != rank_ && start < rows_[k].size)
                copy(long_rows_[k].data() + start, slot(k), std::min(piece, rows_[k].size - start));
    }
}

void Communicator::exchange_rows(std::string_view head, std::string_view body) {
    exchange_rows(head, head.size() + body.size(), [&](size_t start) {
        const size_t end = std::min(head.size() + body.size(), start + segment_.slot_bytes());
        if (start < head.size()) copy(slot(rank_), head.data() + start, std::min(end, head.size()) - start);
        const size_t from = std::max(start, head.size());
        if (from < end) copy(slot(rank_) + (from - start), body.data() + (from - head.size()), end - from);
    });
}

bool Communicator::all_gave(std::string_view head, size_t size) const {
    for (int k = 0; k < size_; ++k)
        if (k != rank_ && (rows_[k].size != size || std::memcmp(rows_[k].data, head.data(), head.size()) != 0)) return false;
    return true;
}

const std::vector<Row>& Communicator::exchange(std::string_view head, std::string_view body) {
    const Turn turn(*this);
    exchange_rows(head, body);
    return rows_;
}

bool Communicator::average(std::string_view head, size_t size, const std::vector<Section>& sections,
                           const void* const* given, void* const* means) {
    const Turn turn(*this);
    if (head.size() + size > segment_.slot_bytes()) throw Failure("too much for a slot");
    exchange_rows(head, head.size() + size, [&](size_t) {
        copy(slot(rank_), head.data(), head.size());
        for (size_t i = 0; i < sections.size(); ++i)
            copy(slot(rank_) + head.size() + sections[i].start, given[i], sections[i].count * size_of(sections[i].type));
    });
    if (!all_gave(head, head.size() + size)) return false;
    std::vector<const void*> sources(size_);
    for (size_t i = 0; i < sections.size(); ++i) {
        // Read this rank's numbers from its slot too, not from `given`: two sections may share memory, and an earlier
        // section may have put its means there.
        for (int k = 0; k < size_; ++k)
            sources[k] = (k == rank_ ? slot(rank_) : rows_[k].data) + head.size() + sections[i].start;
        mean(sections[i].type, sources.data(), size_, means[i], sections[i].count);
    }
    return true;
}

}  // namespace lagom
