// A pseudo-random permutation of any size, computed at single places.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

// out[i] = the number at place start + i of the permutation of [0, n) that `key` selects; start + count is at most n.
// See Note [Order on the fly] in lagom/loaders/permutation.py, which has the same function in Python.
void permute(uint64_t n, uint64_t key, uint64_t start, size_t count, int64_t* out);

}  // namespace lagom
