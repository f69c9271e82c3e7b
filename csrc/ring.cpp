#include "ring.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>

namespace lagom {
namespace {

using Clock = std::chrono::steady_clock;

class Stream {
  public:
    Stream(int following, int preceding, std::string head, const std::vector<Outgoing>& outs, const std::vector<Incoming>& backs,
           Type type, char* scratch, size_t scratch_size, double timeout_s)
        : following_(following), preceding_(preceding), head_(std::move(head)), outs_(outs), backs_(backs), type_(type),
          scratch_(scratch), most_(scratch_size), timeout_(timeout_s), ready_(backs.size(), 0) {}

    Streamed run() {
        Clock::time_point last = Clock::now();
        bool comes = true, is_late = false;
        while (!all_sent() || !all_received()) {
            bool moved = !all_sent() && send_some();
            if (!end_ && comes && !all_received()) {
                const bool took = receive_some();
                comes = !has_all_;
                moved = moved || took;
            }
            if (end_) return *end_;
            if (moved) {
                last = Clock::now();
                is_late = false;
            } else if (is_late) {
                return {Ending::late, 0, {}, {}};
            } else if (!all_sent() || !all_received()) {
                const int found = wait(last + std::chrono::duration_cast<Clock::duration>(timeout_));
                is_late = found == 0;
                comes = is_late || found < 0;  // after a timeout too: less than SO_RCVLOWAT may have come
            }
        }
        return {Ending::done, 0, {}, {}};
    }

  private:
    bool all_sent() const { return out_ == outs_.size(); }
    bool all_received() const { return back_ == backs_.size(); }

    // Number of bytes of the current outgoing message, head included, that can be sent now.
    size_t ready() const {
        const Outgoing& out = outs_[out_];
        return head_.size() + (out.after < 0 ? out.size : ready_[size_t(out.after)]);
    }

    // Whether to wait for more bytes before sending, since each send wakes the receiver, however short it is.
    bool waits() const { return ready() - sent_ < std::min(most_, head_.size() + outs_[out_].size - sent_); }

    bool send_some() {
        if (waits()) return false;
        const Outgoing& out = outs_[out_];
        std::string head = head_of(out.size);
        iovec parts[2] = {};
        int num = 0;
        if (sent_ < head.size()) parts[num++] = {head.data() + sent_, head.size() - sent_};
        const size_t start = std::max(sent_, head.size()) - head.size();
        if (const size_t count = ready() - head.size() - start)
            parts[num++] = {const_cast<char*>(out.data) + start, count};
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = size_t(num);
        const ssize_t count = sendmsg(following_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count < 0) return failed();
        sent_ += size_t(count);
        if (sent_ == head.size() + out.size) {
            ++out_;
            sent_ = 0;
        }
        return true;
    }

    bool receive_some() {
        const Incoming& back = backs_[back_];
        char head[LONGEST_HEAD];
        const bool has_head = found_.size() == head_.size();
        char* const to = !has_head ? head : back.adds ? scratch_ + held_ : back.data + place_;
        const size_t room = !has_head ? head_.size() - found_.size()
                            : back.adds ? std::min(most_ - held_, back.size - place_)
                                        : back.size - place_;
        const ssize_t count = room ? recv(preceding_, to, room, MSG_DONTWAIT) : 0;
        has_all_ = count < 0 || size_t(count) < room;
        if (count < 0) return failed();
        if (count == 0 && room) {
            end_ = Streamed{Ending::gone, 0, {}, {}};
        } else if (!has_head) {
            found_.append(head, size_t(count));
            const std::string wanted = head_of(back.size);
            if (found_.size() == head_.size() && found_ != wanted) end_ = Streamed{Ending::differs, 0, found_, wanted};
        } else {
            take(back, size_t(count));
        }
        if (found_.size() == head_.size() && place_ == back.size) {
            ++back_;
            found_.clear();
            place_ = held_ = 0;
        }
        return true;
    }

    void take(const Incoming& back, size_t count) {
        place_ += count;
        size_t& ready = ready_[back_];
        if (!back.adds) {
            ready = place_;
            return;
        }
        held_ += count;
        const size_t size = size_of(type_), num = held_ / size;
        char* const totals = back.data + ready;
        const void* const sources[] = {totals, scratch_};
        if (num) reduce(type_, Op::sum, sources, 2, totals, nullptr, num);
        ready += num * size;
        held_ -= num * size;
        std::memmove(scratch_, scratch_ + num * size, held_);
    }

    // Handles the errno of a failed call; returns false, since no bytes have moved.
    bool failed() {
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) end_ = Streamed{Ending::gone, errno, {}, {}};
        return false;
    }

    // Waits until there is something to receive (returns -1), or the next host takes more bytes (1), or `deadline` (0).
    int wait(Clock::time_point deadline) {
        const bool sends = !all_sent() && !waits(), receives = !all_received();
        if (receives) wake_for();
        pollfd all[2] = {{receives ? preceding_ : -1, POLLIN, 0}, {sends ? following_ : -1, POLLOUT, 0}};
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count() + 1;
        const int found = poll(all, 2, int(std::clamp<int64_t>(left, 0, 1 << 30)));
        if (found < 0) return errno == EINTR ? 1 : (failed(), 1);
        return found == 0 ? 0 : all[0].revents ? -1 : 1;
    }

    // Sets the number of bytes for which the system wakes this thread. While the head is missing, wait for the head
    // only: if the message is not the expected one, no more bytes may come.
    void wake_for() {
        const size_t missing = head_.size() - found_.size();
        const int wanted = int(missing ? missing : std::min(backs_[back_].size - place_, most_));
        if (wanted != least_) setsockopt(preceding_, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
        least_ = wanted;
    }

    std::string head_of(uint64_t size) const {
        std::string made = head_;
        std::memcpy(made.data() + SIZE_AT, &size, sizeof size);
        return made;
    }

    const int following_, preceding_;
    const std::string head_;
    const std::vector<Outgoing>& outs_;
    const std::vector<Incoming>& backs_;
    const Type type_;
    char* const scratch_;
    const size_t most_;
    const std::chrono::duration<double> timeout_;
    size_t out_ = 0, sent_ = 0;    // index of the message being sent, and its bytes sent so far, head included
    size_t back_ = 0, place_ = 0;  // index of the message being received, and its bytes so far, without the head
    size_t held_ = 0;              // bytes in `scratch_` that are not yet a whole number
    std::string found_;            // the part of the head that has come so far
    std::vector<size_t> ready_;    // bytes of each incoming message that have come and been added
    int least_ = 0;
    bool has_all_ = false;  // the last recv found no more bytes
    std::optional<Streamed> end_;
};

}  // namespace

Streamed stream(int following, int preceding, std::string head, const std::vector<Outgoing>& outs,
                const std::vector<Incoming>& backs, Type type, char* scratch, size_t scratch_size, double timeout_s) {
    return Stream(following, preceding, std::move(head), outs, backs, type, scratch, scratch_size, timeout_s).run();
}

}  // namespace lagom
