"""``MixedDevices``: lets operations of a program that knows of no GPU get tensors of both the CPU and the GPU."""

from __future__ import annotations

import copy
import functools
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lagom.patching.replace import replaced
from lagom.run_state.device_moves import TrainedModules, move_to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn

# Functions are known by name, since a patch of lagom may have replaced the function itself.
_OF_CPU = frozenset(("numpy", "__array__", "__repr__", "__format__"))
"""Functions that get a copy on the CPU: their result exists only there, or must print as on a machine without a GPU."""
_ANY_DEVICES = frozenset(("to", "copy_", "type_as", "backward", "grad", "__set__"))
"""Functions that accept tensors of different devices, or that need the same tensor objects and no copies."""
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_LENGTHS = frozenset(("_pack_padded_sequence", "_pad_packed_sequence"))
_SET_GRADIENT = vars(torch._C.TensorBase)["grad"].__set__
_CPU, _GPU = 1, 2


@contextmanager
def meet_on(
    device: torch.device, modules: Callable[[], Iterable[nn.Module]], may_move: Callable[[], bool]
) -> Iterator[None]:
    """Context manager in which operations may mix tensors of the CPU and ``device``; all are saved as CPU tensors.

    Args:
        modules: iterates over all living modules that have run ``Module.__init__``.
        may_move: tells whether patches act in this process and thread.
    """
    run, mode = torch.autograd._engine_run_backward, MixedDevices(device)

    @torch._disable_dynamo
    def run_backward(outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **options: Any) -> Any:
        pairs = zip(outputs, gradients, strict=True)
        gradients = tuple(one.to(out.device) if _are_tensors(one, out) else one for out, one in pairs)
        with mode:  # torch leaves it while it calls ``backward``; hooks and functions of the program need it
            return run(outputs, gradients, *args, **options)

    with ExitStack() as stack:
        stack.enter_context(TrainedModules(modules, device, may_move).moved())
        stack.enter_context(replaced(torch.serialization, "location_tag", lambda _: "cpu"))
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", run_backward))
        stack.enter_context(replaced(torch.export, "export", _export_from_cpu(torch.export.export)))
        stack.enter_context(mode)
        yield


def _export_from_cpu(export: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.export.export`` for a copy on the CPU: else the exported program would copy tensors to a GPU."""
    cpu = torch.device("cpu")

    @functools.wraps(export)
    def export_copy(mod: nn.Module, args: Any, kwargs: Any = None, **options: Any) -> Any:
        if not all(one.is_cpu for one in chain(mod.parameters(), mod.buffers())):
            mod = copy.deepcopy(mod).to(cpu)
        return export(mod, move_to_device(args, cpu), move_to_device(kwargs, cpu), **options)

    return export_copy


class MixedDevices(TorchFunctionMode):
    """Moves tensors if a function of torch gets some on the CPU and some on the GPU. See Note [Mixed devices].

    Args:
        device: the device to which they are moved, unless the function writes to or indexes a tensor on the CPU.
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
        """Call ``func``, with all tensors on one device if it needs that."""
        kwargs = kwargs or {}
        kind = self._device.type
        devices = _devices(args, kind) | _devices(kwargs.values(), kind) if kwargs else _devices(args, kind)
        if devices & _GPU:
            name = getattr(func, "__name__", "")
            if name in _OF_CPU:
                return func(args[0].cpu(), *args[1:], **kwargs)
            if name in _LENGTHS or (name in _RECURRENT and isinstance(args[3], (list, tuple))):
                return func(args[0], args[1].cpu(), *args[2:], **kwargs)  # torch requires the lengths on the CPU
            if devices & _CPU and func == _SET_GRADIENT:
                return func(args[0], args[1].to(args[0].device))
            if devices & _CPU and name not in _ANY_DEVICES:
                place = _written(name, args, kwargs) or self._device
                return func(*_moved(args, place), **{key: _moved(value, place) for key, value in kwargs.items()})
        return func(*args, **kwargs)


def _devices(values: Iterable[Any], kind: str) -> int:
    """Return which of the CPU and devices of ``kind`` the tensors in ``values`` are on, as flags.

    A list is searched only if its first value may be a tensor or contain one.
    """
    devices = 0
    for value in values:
        if isinstance(value, Tensor):
            devices |= _CPU if value.is_cpu else _GPU * (value.device.type == kind)
        elif type(value) is tuple or (type(value) is list and value and isinstance(value[0], (Tensor, list, tuple))):
            devices |= _devices(value, kind)
    return devices


def _written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Return the device of the tensor that the function ``name`` writes to or indexes; None for other functions."""
    out, name = kwargs.get("out"), name.partition(".")[0]
    if isinstance(out, (list, tuple)):
        out = out[0]
    if isinstance(out, Tensor):
        return out.device
    in_place = name.endswith("_") != name.endswith("__") or name in ("__setitem__", "__getitem__")
    if not (in_place or name.startswith("__i")) or not args:
        return None
    first = args[0][0] if type(args[0]) in (list, tuple) and args[0] else args[0]  # _foreach_add_() writes to a list
    return first.device if isinstance(first, Tensor) else None


def _are_tensors(*values: Any) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        if value.is_meta:
            return value
        # Wait for a copy from pinned memory: it is read after the call, and the program may write to it before.
        # A tensor of a transform of torch.func cannot be asked whether it is pinned.
        waits = not value.is_cpu or torch._C._functorch.is_functorch_wrapped_tensor(value) or value.is_pinned()
        return value.to(device, non_blocking=not waits)
    if type(value) in (list, tuple):
        return type(value)([_moved(part, device) for part in value])
    return value


# Note [Mixed devices]
#
# In runs on GPUs, lagom moves the batches of loaders, and the modules that are trained or called with them, to the
# rank's GPU. A program that does not know of the GPU makes other tensors on the CPU: the weights of a loss, a mask, a
# hidden state, the whole test set. If an operation gets such a tensor and a tensor on the GPU, the CPU tensor is copied
# to the GPU, and autograd brings its gradient back to the CPU. If the operation writes in place to a CPU tensor, or
# indexes it, the other operands are copied to the CPU instead. So a program whose code names no GPU runs unchanged.
# Tensors that it saves, pickles, prints or turns into arrays are CPU tensors, so that a checkpoint loads on a machine
# without a GPU.
#
# torch calls a function mode for each of its functions, which takes about 2 us. So the mode is entered only if the
# program's code has no word for the device (``names_device`` in program/detect_distributed.py); other programs place
# their tensors themselves.
#
# torch leaves the mode while it calls a function, so that what C++ calls back, such as hooks that pack saved tensors,
# gets tensors of different devices. In a backward the mode is entered again, for hooks and backward functions.
#
# There are limits. An array of a tensor on the GPU is a copy: a program that writes to the array does not change the
# tensor. A gradient on the CPU that is assigned to a parameter on the GPU is copied too. Threads of the program have no
# mode.
