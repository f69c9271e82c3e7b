"""The states of the global random generators, as one value; reading them loads no library."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

LIBRARIES = frozenset(("random", "numpy", "torch"))
"""Names of generators on the CPU; all others are kinds of accelerators."""


def random_states() -> dict[str, Any]:
    """Return the states of random's generator, and of numpy's and torch's if they are loaded.

    Those of accelerators are under torch's name of their kind, such as "xpu".
    """
    states: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
        from lagom.accelerators import generator_states  # it imports torch

        states |= generator_states()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators to ``states``, from ``random_states``."""
    random.setstate(states["random"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "torch" in states:
        import torch

        torch.set_rng_state(states["torch"])
        if states.keys() - LIBRARIES:
            from lagom.accelerators import set_generator_states

            set_generator_states(states)


def equal_random_states(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether ``left`` and ``right`` have the same generators, in the same states."""
    return left.keys() == right.keys() and all(equal_state(state, right[name]) for name, state in left.items())


def equal_state(left: Any, right: Any) -> bool:
    """Return whether two states of one generator are equal."""
    if hasattr(left, "equal"):  # a tensor: torch's
        return bool(left.equal(right))
    if isinstance(left, list):  # an accelerator's, one for each device
        return len(left) == len(right) and all(map(equal_state, left, right))
    if isinstance(left[0], str):  # numpy's: a name, an array, and numbers
        return bool((left[1] == right[1]).all()) and left[2:] == right[2:]
    return bool(left == right)


def state_digest(state: Any) -> str:
    """Return a text that is equal for equal states of one generator."""
    if hasattr(state, "equal"):  # as in ``equal_state``
        state = state.numpy().tobytes()
    elif isinstance(state, list):
        state = [one.numpy().tobytes() for one in state]
    elif isinstance(state[0], str):
        state = (state[0], state[1].tobytes(), *state[2:])
    return hashlib.blake2b(repr(state).encode(), digest_size=16).hexdigest()


def start_random_states(states: Mapping[str, Any]) -> None:
    """Start a rank's generators from the driver's ``states``.

    On the driver, a library that is not loaded yet would seed itself from the operating system when it is loaded. On
    ranks, the call's ``entropy``, equal on all ranks, seeds such a library.
    """
    import torch

    from lagom.accelerators import current_accelerator, seed_generators

    if "torch" not in states:
        seed_torch(states["entropy"])
    if "numpy" not in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(states["entropy"])
    set_random_states(states)
    device = current_accelerator()
    if device is not None and device.type not in states:
        seed_generators(torch.initial_seed())  # the seed of the driver, whose manual_seed seeds accelerators too


def seed_torch(seed: int) -> None:
    """Seed torch's generators, as ``torch.manual_seed`` does; without an accelerator, only the CPU's.

    ``torch.manual_seed`` formats a stack for each kind of accelerator even in a build without any, which takes a new
    rank 10 ms.
    """
    import torch

    from lagom.accelerators import current_accelerator

    if current_accelerator() is not None:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
