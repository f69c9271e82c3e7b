"""``Events``: moments of a run on a rank that extensions take part in, each published in one place of the trunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Event:
    """A moment at which subscribed functions are called, in the order in which they subscribed.

    Extensions subscribe in the order of ``extensions/registry.py``. A publisher tests ``call``, which is None without a
    subscriber: ``if (call := events.batch_asked.call) is not None: call(iterator)``. docs/decisions/091 has the cost.
    """

    __slots__ = ("_subscribers", "call")

    def __init__(self) -> None:
        self.call: Callable[..., None] | None = None
        """Calls all subscribers; None if there is none."""
        self._subscribers: list[Callable[..., None]] = []

    def subscribe(self, function: Callable[..., None]) -> None:
        """Call ``function`` with the arguments of the event from now on."""
        self._subscribers.append(function)
        self.call = function if len(self._subscribers) == 1 else self._call_all

    def _call_all(self, *args: Any) -> None:
        for function in self._subscribers:
            function(*args)


class Chain:
    """Functions that each wrap what the one before has made; the last to be added is the outermost."""

    def __init__(self) -> None:
        self._wrappers: list[Callable[..., Any]] = []

    def add(self, wrapper: Callable[..., Any]) -> None:
        """Let ``wrapper`` wrap what the others have made."""
        self._wrappers.append(wrapper)

    def wrap(self, made: Any, *args: Any) -> Any:
        """Return ``made``, wrapped by all; each gets ``args`` as well."""
        for wrapper in self._wrappers:
            made = wrapper(made, *args)
        return made


class Events:
    """The events of one rank; the text below each says when it is published, and with what.

    In a run of one rank, parameters and forwards are published only where a setting or an accelerator makes lagom patch
    torch for them, and backwards only if an extension has subscribed before torch is patched.
    """

    def __init__(self) -> None:
        self.patched = Event()
        """torch is patched for the run; with the ``ExitStack`` whose contexts end before the patches."""
        self.pass_begun = Event()
        """A pass over a loader begins; with its iterator and the loader."""
        self.batch_asked = Event()
        """The program asks for a batch; with the iterator."""
        self.batch_given = Event()
        """The program gets a batch; with the iterator, the batch and the digest of its samples (b"" without one)."""
        self.pass_exhausted = Event()
        """The iterator of a pass has no more batches; with the iterator."""
        self.pass_ended = Event()
        """The session has recorded the end of a pass; without arguments."""
        self.reported = Event()
        """The program has reported a metric by ``reporter``; with the step and the value."""
        self.returned = Event()
        """The program has returned, and the ranks have not waited for each other yet; without arguments."""
        self.function = Chain()
        """Makers of the function that a rank calls; with the maker before, the call, lagom's own objects that the
        program may hold by name, and the ``ExitStack`` of the call."""
        self.parameter_made = Event()
        """The program has made a parameter; with the parameter."""
        self.forward_begun = Event()
        """An outermost forward begins; with the module."""
        self.micro_batch_begun = Event()
        """The forward of one micro-batch begins, also where a backward repeats it; without arguments."""
        self.backward_begun = Event()
        """An outermost backward of the program begins; with its leaves."""
        self.backward_ended = Event()
        """A backward has ended, and its gradients are reduced unless that is postponed; without arguments."""
        self.program_joins = Event()
        """All ranks call ``init_process_group``, after which patches are off; without arguments."""

    @property
    def follows_backwards(self) -> bool:
        """Whether backwards have a subscriber."""
        return self.backward_begun.call is not None or self.backward_ended.call is not None
