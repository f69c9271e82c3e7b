// Unencrypted messages around a ring of hosts. lagom/exchange/sockets/ring_stream.py has the encrypted ones.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "arithmetic.hpp"

namespace lagom {

// A message to the next host.
struct Outgoing {
    const char* data;
    size_t size;
    int after;  // index of the incoming message whose bytes are forwarded as they come; -1: none
};

// A message from the previous host.
struct Incoming {
    char* data;
    size_t size;
    bool adds;  // whether its numbers are added to those in `data`
};

enum class Ending { done, late, gone, differs };

struct Streamed {
    Ending ending;
    int error;                  // errno if a neighbour is gone; 0 if it closed the connection
    std::string found, wanted;  // if a message differs: its head, and the expected head
};

// Sends and receives all messages, each list in its order, through non-blocking connections. Each message begins with
// `head`, which has the message's size at `SIZE_AT`. Numbers that are added are received into `scratch`, up to
// `scratch_size` bytes at once.
constexpr size_t SIZE_AT = 8, LONGEST_HEAD = 64;
Streamed stream(int following, int preceding, std::string head, const std::vector<Outgoing>& outs,
                const std::vector<Incoming>& backs, Type type, char* scratch, size_t scratch_size, double timeout_s);

}  // namespace lagom
