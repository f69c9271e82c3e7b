// Messages that go round a ring of hosts in clear. lagom/collectives/sockets/ring_stream.py has the encrypted ones.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "arithmetic.hpp"

namespace lagom {

// To the next host.
struct Outgoing {
    const char* data;
    size_t size;
    int after;  // which incoming message these bytes are, which go on as they come; -1 for none
};

// From the host before.
struct Incoming {
    char* data;
    size_t size;
    bool adds;  // to what is there
};

enum class Ending { done, late, gone, differs };

struct Streamed {
    Ending ending;
    int error;                  // of the system's, where a neighbour is gone; 0 if it hung up
    std::string found, wanted;  // the head of a message that differs, and of the expected one
};

// Sends and receives all messages, each list in its order, through connections that do not block. Before a message stands
// `head`, with the message's size at `SIZE_AT`. `scratch` takes what is added, of `scratch_size` bytes at once.
constexpr size_t SIZE_AT = 8, LONGEST_HEAD = 64;
Streamed stream(int following, int preceding, std::string head, const std::vector<Outgoing>& outs,
                const std::vector<Incoming>& backs, Type type, char* scratch, size_t scratch_size, double timeout_s);

}  // namespace lagom
