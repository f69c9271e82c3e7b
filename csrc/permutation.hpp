// A pseudo-random order of any number of things, evaluated where it is asked for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lagom {

// out[i] = what stands at place start + i in the order of [0, n) that `key` chooses; start + count is at most n. See
// Note [Order on the fly] in lagom/loaders/permutation.py, which has the same in Python.
void permute(uint64_t n, uint64_t key, uint64_t start, size_t count, int64_t* out);

}  // namespace lagom
