"""``MixedDevices``: what a program that knows of no GPU makes on the CPU meets what lagom has moved to the GPU."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

# By name: a patch of lagom's may be in a function's place.
_OF_CPU = frozenset(("numpy", "__array__", "__repr__", "__format__"))
"""Functions of one tensor that give what only the CPU has, or what a program without a GPU would print."""
_ANY_DEVICES = frozenset(("to", "copy_", "type_as", "backward", "grad", "__set__"))
"""Functions that take tensors of different devices by themselves, or the very tensors that they are given."""
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_LENGTHS = frozenset(("_pack_padded_sequence", "_pad_packed_sequence"))
_CPU, _GPU = 1, 2


@contextmanager
def meet_on(device: torch.device) -> Iterator[None]:
    """Let tensors of the CPU meet those on ``device``; what is saved or pickled is a tensor of the CPU."""
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.serialization, "location_tag", lambda _: "cpu"))
        stack.enter_context(MixedDevices(device))
        yield


class MixedDevices(TorchFunctionMode):
    """Moves tensors, where a function of torch gets some on the CPU and others not. See Note [Mixed devices].

    Args:
        device: where they meet, unless the function writes to a tensor on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, with tensors that can meet."""
        kwargs = kwargs or {}
        found = _devices(args) | _devices(kwargs.values()) if kwargs else _devices(args)
        if found & _GPU:
            name = getattr(func, "__name__", "")
            if name in _OF_CPU:
                return func(args[0].cpu(), *args[1:], **kwargs)
            if name in _LENGTHS or (name in _RECURRENT and isinstance(args[3], (list, tuple))):
                return func(args[0], args[1].cpu(), *args[2:], **kwargs)  # lengths, which torch wants on the CPU
            if found & _CPU and name not in _ANY_DEVICES:
                place = _written(name, args, kwargs) or self._device
                return func(*_moved(args, place), **{key: _moved(value, place) for key, value in kwargs.items()})
        return func(*args, **kwargs)


def _devices(values: Iterable[Any]) -> int:
    """Return which of ``_CPU`` and ``_GPU`` the tensors in ``values`` are on; of a long list the first value tells."""
    found = 0
    for value in values:
        if isinstance(value, Tensor):
            found |= _CPU if value.is_cpu else _GPU
        elif type(value) is tuple or (type(value) is list and value and isinstance(value[0], (Tensor, list, tuple))):
            found |= _devices(value)
    return found


def _written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Return the device of the tensor that a function writes to or indexes, if it does."""
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out.device
    in_place = name.endswith("_") != name.endswith("__") or name in ("__setitem__", "__getitem__")
    if not (in_place or name.startswith("__i")) or not args:
        return None
    first = args[0][0] if type(args[0]) in (list, tuple) and args[0] else args[0]  # _foreach_add_() writes to a list
    return first.device if isinstance(first, Tensor) else None


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        # Memory that is pinned is read later, and the program may write to it before.
        return value.to(device, non_blocking=value.is_cpu and not value.is_pinned())
    if type(value) in (list, tuple):
        return type(value)([_moved(part, device) for part in value])
    return value


# Note [Mixed devices]
#
# On GPUs lagom moves batches of loaders, and the modules that get them, to the rank's own. A program that knows of no
# GPU has more tensors: the weights of a loss, a mask, a hidden state, the whole test set. Where one of these meets a
# tensor on the GPU, it follows it there, and its gradient comes back; an operation in place on a tensor of the CPU has
# its operands come there. So a program whose code names no GPU runs as it is. What it saves, pickles, prints or turns
# into an array is as from the CPU: a checkpoint loads on a machine without a GPU.
#
# torch calls a mode for each of its functions: about 2 us each. So it is there only where the code of the program, by
# its names and words, knows neither "cuda" nor "gpu" nor "accelerator"; all others place their tensors themselves.
#
# Two limits: an array of a tensor on the GPU is a copy, and a program that writes to it does not change the tensor;
# and torch takes the mode away during a backward, so hooks and backwards of the program's own find what is there.
