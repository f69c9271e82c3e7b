"""Functions that move batches and modules to the rank's GPU, so that a program need not name the device."""

from __future__ import annotations

import copy
import weakref
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.weak import WeakIdKeyDictionary

from lagom.patching.replace import replaced
from lagom.run_state.nested_tensors import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def move_to_device(data: Any, device: torch.device) -> Any:
    """Return ``data`` with its tensors on ``device``; containers keep their types, other objects are not changed.

    An object with a method ``to`` is moved by this method: packed sequences, batches of libraries, modules.
    """
    if isinstance(data, torch.Tensor):
        # With ``non_blocking`` the call does not wait for earlier work of the GPU. It is safe: when the call returns,
        # CUDA has read memory that is not pinned.
        return data.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(type(data), "to", None)):
        return data.to(device)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_to_device(part, device) for part in data))
    if type(data) in (list, tuple):
        return type(data)(move_to_device(part, device) for part in data)
    if isinstance(data, dict):
        moved = copy.copy(data)  # a copy keeps attributes, such as those of a ``state_dict()``
        moved.update((key, move_to_device(part, device)) for key, part in data.items())
        return moved
    return data


class TrainedModules:
    """Moves the modules whose parameters optimizers get to ``device``, when a loader gives the next batch.

    A module that moved only when it is called could have parameters in the graph of a loss already, for example in a
    penalty, or in a forward of rows from elsewhere. Modules that no optimizer knows may belong to a data set, and run
    in its workers, on the CPU.

    Args:
        modules: iterates over all living modules that have run ``Module.__init__``.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]], device: torch.device) -> None:
        self._modules = modules
        self._device = device
        self._waiting = WeakIdKeyDictionary()
        """Parameters that optimizers got since the last move, each with its optimizer."""

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Context manager in which optimizers and loaders are patched."""
        add, following = Optimizer.add_param_group, vars(_BaseDataLoaderIter)["__next__"]

        def add_and_remember(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            add(optimizer, param_group)
            self._waiting.update(
                (one, weakref.ref(optimizer)) for one in optimizer.param_groups[-1]["params"] if one.is_cpu
            )

        def move_and_take(iterator: Any) -> Any:
            if self._waiting:
                self._move()
            return following(iterator)

        with (
            replaced(Optimizer, "add_param_group", add_and_remember),
            replaced(_BaseDataLoaderIter, "__next__", move_and_take),
        ):
            yield

    def _move(self) -> None:
        trained = [one for one in self._modules() if any(parameter in self._waiting for parameter in one.parameters())]
        optimizers = {id(found): found for one in self._waiting.values() if (found := one()) is not None}
        self._waiting.clear()
        for module in trained:
            module.to(self._device)
        for optimizer in optimizers.values():
            _follow_parameters(optimizer)


def _follow_parameters(optimizer: Optimizer) -> None:
    """Move the state that ``optimizer`` has loaded to its parameters' devices, as ``load_state_dict`` does."""
    for parameter, state in vars(optimizer)["state"].items():
        if isinstance(parameter, torch.Tensor) and isinstance(state, dict):
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():  # a number of steps stays on the CPU
                    state[name] = value.to(parameter.device)


class InputFollower:
    """Moves a module from the CPU to ``device`` when it is called with an input on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, tuple[weakref.ref[nn.Module], torch.Tensor]] = {}
        """A parameter of each module, by the module's id: a search takes longer than all other work here."""

    def follow(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move ``module``, which is about to be called, if it is on the CPU and an input is on the device.

        ``Module.to`` keeps the Parameter objects, so optimizers made earlier stay valid. Inside a transform of
        torch.func a module cannot be moved, nor can parameters that the program has computed (as for
        ``torch.func.functional_call``): there ``MixedDevices`` moves each parameter where it is used.
        """
        known = self._states.get(id(module))
        state = known[1] if known is not None else self._find_state(module)
        if state is None or not state.is_cpu or state.grad_fn is not None:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if any(tensor.device.type == self._device.type for tensor in tensors((args, kwargs))):
            module.to(self._device)

    def _find_state(self, module: nn.Module) -> torch.Tensor | None:
        state = next(chain(module.parameters(), module.buffers()), None)
        if isinstance(state, nn.Parameter):  # other tensors may stand for the parameters during one call
            key, states = id(module), self._states
            states[key] = weakref.ref(module, lambda _: states.pop(key, None)), state
        return state
