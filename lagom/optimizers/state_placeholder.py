"""``StatePlaceholder``: base class for what an extension puts in place of an optimizer's state."""

from __future__ import annotations


class StatePlaceholder:
    """Lies in ``vars(optimizer)["state"]`` while the state is elsewhere."""

    def num_bytes(self) -> int:
        """Return the bytes of state that this rank keeps for the optimizer."""
        raise NotImplementedError
