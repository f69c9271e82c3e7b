"""``count_words``, ``skip_words``: how far the global generators moved on, in words of the Mersenne Twister.

torch's generator on the CPU, numpy's legacy generator and that of ``random`` are Mersenne Twisters, whose states hold
624 words of 32 bits and the place of the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lagom.random_states import equal_state

NUM_WORDS = 624
"""Words of a twister's state; after as many it computes new ones."""
_MOST_BLOCKS = 4096
"""Largest number of times that a twister is moved on to find out how many words were drawn: 2.5 million words."""
_TORCH = struct.Struct("<QiiQ")
"""Seed, number of words left, whether it was seeded, and place of the next word: the beginning of torch's state."""
_TORCH_BYTES = 5056


@dataclass
class Twister:
    """The state of one generator."""

    words: np.ndarray[Any, Any]
    """Of shape (624,), uint32."""
    place: int
    """Number of words that are used up."""
    rest: object
    """Everything else, such as a normal number that is drawn but not used yet."""
    state: Callable[[Twister], Any]
    """Returns the generator's own form of a state."""

    def skip(self, count: int) -> Twister:
        """Return the state after ``count`` more words."""
        bits = self._bits()
        bits.random_raw(count, output=False)
        found = bits.state["state"]
        return Twister(found["key"], int(found["pos"]), self.rest, self.state)

    def words_until(self, later: Twister) -> int | None:
        """Return the number of words between this state and ``later``; None if it is no later state of this one."""
        if self.rest != later.rest:
            return None
        bits = self._bits()
        bits.random_raw(NUM_WORDS - self.place + 1, output=False)  # to the first word of the next block
        count = later.place - self.place
        if np.array_equal(self.words, later.words) and count >= 0:
            return count
        for num_blocks in range(1, _MOST_BLOCKS):
            if np.array_equal(bits.state["state"]["key"], later.words):
                return count + num_blocks * NUM_WORDS
            bits.random_raw(NUM_WORDS, output=False)
        return None

    def _bits(self) -> Any:
        bits = np.random.MT19937(0)
        bits.state = {"bit_generator": "MT19937", "state": {"key": self.words, "pos": self.place}}
        return bits


def _of_torch(state: torch.Tensor) -> Twister | None:
    content = state.numpy().tobytes()
    if len(content) != _TORCH_BYTES:
        return None
    seed, left, is_seeded, _ = _TORCH.unpack_from(content)
    end = _TORCH.size + 8 * NUM_WORDS
    words = np.frombuffer(content, np.uint64, NUM_WORDS, _TORCH.size).astype(np.uint32)

    def restore(twister: Twister) -> torch.Tensor:
        head = _TORCH.pack(seed, NUM_WORDS + 1 - twister.place, is_seeded, twister.place)
        bits = bytearray(head + twister.words.astype(np.uint64).tobytes() + content[end:])
        return torch.frombuffer(bits, dtype=torch.uint8)

    return Twister(words, NUM_WORDS + 1 - left, (seed, is_seeded, content[end:]), restore)


def _of_numpy(state: Any) -> Twister | None:
    if state[0] != "MT19937":
        return None
    rest = state[3:]
    return Twister(state[1], int(state[2]), rest, lambda one: ("MT19937", one.words, one.place, *rest))


def _of_random(state: Any) -> Twister:
    version, words, rest = state
    return Twister(
        np.array(words[:-1], np.uint32),
        words[-1],
        rest,
        lambda one: (version, (*one.words.tolist(), one.place), rest),
    )


_READERS: Mapping[str, Callable[[Any], Twister | None]] = {
    "torch": _of_torch,
    "numpy": _of_numpy,
    "random": _of_random,
}


def count_words(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int] | None:
    """Return how many words each generator has drawn between two ``random_states``, without those that drew none.

    Returns:
        None if a generator was seeded, has kept a number for the next draw, is no twister, or was loaded in between.
    """
    counts: dict[str, int] = {}
    if before.keys() != after.keys():
        return None
    for name, state in before.items():
        if equal_state(state, after[name]):
            continue
        read = _READERS.get(name)
        first, last = (None, None) if read is None else (read(state), read(after[name]))
        count = None if first is None or last is None else first.words_until(last)
        if not count:
            return None
        counts[name] = count
    return counts


def skip_words(states: Mapping[str, Any], counts: Mapping[str, int], times: int) -> dict[str, Any]:
    """Return ``states`` after ``times`` times the words of ``counts``."""
    found = dict(states)
    for name, count in counts.items():
        twister = _READERS[name](states[name])
        assert twister is not None
        if count * times:
            later = twister.skip(count * times)
            found[name] = later.state(later)
    return found
