"""``recorded_calls``: records the program's calls of torch, outside all other patches. See Note [Timing]."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lagom.exchange.torch_backend.arguments import listed
from lagom.exchange.torch_backend.shared_group import SharedProcessGroup
from lagom.patching.importers import Importers
from lagom.patching.replace import replaced
from lagom.watch import spans as kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.watch.spans import Spans


@contextmanager
def recorded_calls(spans: Spans) -> Iterator[None]:
    """Record loaders, backwards, steps and exchanges of distributed programs; enter this after all other patches."""
    begin = spans.timed(kinds.DATA, "begin a pass", vars(DataLoader)["__iter__"])
    with ExitStack() as stack:
        stack.enter_context(kinds.current(spans))
        stack.enter_context(replaced(DataLoader, "__iter__", begin))
        stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", _next_batch(spans)))
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", _backward(spans)))
        stack.enter_context(_recorded_steps(spans))
        stack.enter_context(_recorded_exchanges(spans))
        try:
            yield
        finally:
            spans.finish()


def _next_batch(spans: Spans) -> Callable[[Any], Any]:
    original = vars(_BaseDataLoaderIter)["__next__"]
    wait = spans.timed(kinds.DATA, "wait for data", original)

    @functools.wraps(original)
    def following(self: Any) -> Any:
        start = spans.clock()
        data = wait(self)
        spans.batch(start)
        return data

    return following


def _backward(spans: Spans) -> Callable[..., Any]:
    original = torch.autograd._engine_run_backward
    accumulate = spans.timed(kinds.BACKWARD, "backward", original)
    differentiate = spans.timed(kinds.BACKWARD, "autograd.grad", original)

    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **options: Any) -> Any:
        if not options.get("accumulate_grad", False):
            return differentiate(outputs, *args, **options)
        spans.backward(spans.clock())
        return accumulate(outputs, *args, **options)

    return run_backward


@contextmanager
def _recorded_steps(spans: Spans) -> Iterator[None]:
    """Record steps of all optimizers, with torch's global hooks, so that the optimizers themselves do not change."""
    begun: dict[int, int] = {}

    def begin(optimizer: Any, *_: Any) -> None:
        begun[id(optimizer)] = spans.clock()

    def end(optimizer: Any, *_: Any) -> None:
        if (start := begun.pop(id(optimizer), None)) is not None:
            spans.add(kinds.OPTIMIZER, f"{type(optimizer).__name__}.step", start)

    handles = [
        optimizers.register_optimizer_step_pre_hook(begin),
        optimizers.register_optimizer_step_post_hook(end),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_MESSAGES = ("send", "recv", "isend", "irecv")
_EXCHANGES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    *_MESSAGES,
)
_importers = Importers(distributed_c10d, *_EXCHANGES)


@contextmanager
def _recorded_exchanges(spans: Spans) -> Iterator[None]:
    """Record calls of ``torch.distributed``, except for groups of lagom's backend, which record their collectives."""
    recorded = {name: _recorded_exchange(spans, name, getattr(distributed_c10d, name)) for name in _EXCHANGES}
    with ExitStack() as stack:
        for module, name in _importers.find():
            stack.enter_context(replaced(module, name, recorded[name]))
        yield


def _recorded_exchange(spans: Spans, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        group = options.get("group") or next((one for one in args if isinstance(one, dist.ProcessGroup)), None)
        group = group if group is not None else dist.group.WORLD
        if group is None or isinstance(group, SharedProcessGroup):
            return original(*args, **options)
        given = [one for one in (*args, *options.values()) if isinstance(one, (list, torch.Tensor))][-1:]
        size = sum(one.nbytes for one in (listed(given[0]) if given else []) if isinstance(one, torch.Tensor))
        shown = f"{name} (begun)" if options.get("async_op") else name
        stream = "" if name in _MESSAGES else _stream(group)
        return spans.timed(kinds.COLLECTIVE, shown, original, size, stream)(*args, **options)

    return call


def _stream(group: Any) -> str:
    try:
        return f"group {group.group_name}"
    except Exception:  # a group that torch does not know
        return ""


# Note [Timing]
#
# If there is a timeline, each package of lagom records its own work in its own code: exchanges, forwards and copies to
# a device. Work that torch does without lagom is recorded here: loaders, backwards, steps, and exchanges of programs
# that are distributed already, in which lagom's own patches do nothing. Steps are recorded by torch's global hooks of
# optimizers, all else by wrappers of torch's functions. Both are installed when the run begins. Without a timeline
# there are none, so nothing is even checked.
#
# Times are those of the program's thread. On a GPU the thread mostly launches work: slow work shows where the program
# waits for it, usually in a copy to the host or in an exchange.
