"""Functions that move batches and modules to the rank's GPU, so that a program need not name the device."""

from __future__ import annotations

import copy
import functools
import weakref
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lagom.patching.object_reference import tensor_dictionary
from lagom.patching.replace import replaced
from lagom.run_state.batch_contents import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def move_to_device(data: Any, device: torch.device) -> Any:
    """Return ``data`` with its tensors on ``device``; lists, tuples and dicts keep their types, other objects stay.

    An object with a method ``to`` is moved by this method: packed sequences, batches of libraries, modules.
    """
    if isinstance(data, torch.Tensor):
        # With ``non_blocking`` the call does not wait for earlier work of the accelerator. It is safe: when the call
        # returns, memory that is not pinned has been read (see torch's tutorial on pin_memory and non_blocking).
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
    """Moves the modules of an optimizer's parameters to ``device``, when the program next reads a loader.

    A module that moved only when it is called could have parameters in the graph of a loss already, for example in a
    penalty, or in a forward of rows from elsewhere. Modules that no optimizer knows may belong to a data set, and run
    in its workers, on the CPU.

    Args:
        modules: iterates over all living modules that have run ``Module.__init__``.
        may_move: tells whether patches act in this process and thread; a forked process has no GPU.
    """

    def __init__(
        self, modules: Callable[[], Iterable[nn.Module]], device: torch.device, may_move: Callable[[], bool]
    ) -> None:
        self._modules = modules
        self._device = device
        self._may_move = may_move
        self._waiting = tensor_dictionary()
        """Parameters that optimizers got since the last move."""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that got these parameters."""

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Context manager in which optimizers and loaders are patched."""
        add, take = Optimizer.add_param_group, vars(Optimizer)["__setstate__"]
        iterate, following = DataLoader.__iter__, vars(_BaseDataLoaderIter)["__next__"]

        @torch._disable_dynamo
        @functools.wraps(add)
        def patched_add(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            add(optimizer, param_group)
            self._remember(optimizer)

        @functools.wraps(take)
        def patched_take(optimizer: Optimizer, state: dict[str, Any]) -> None:
            take(optimizer, state)
            self._remember(optimizer)

        @functools.wraps(iterate)
        def patched_iter(loader: Any) -> Any:
            iterator = iterate(loader)
            self._move()  # after workers have been forked
            return iterator

        @functools.wraps(following)
        def patched_next(iterator: Any) -> Any:
            self._move()
            return following(iterator)

        with (
            replaced(Optimizer, "add_param_group", patched_add),
            replaced(Optimizer, "__setstate__", patched_take),
            replaced(DataLoader, "__iter__", patched_iter),
            replaced(_BaseDataLoaderIter, "__next__", patched_next),
        ):
            yield

    def _remember(self, optimizer: Optimizer) -> None:
        groups = vars(optimizer).get("param_groups", ())
        on_cpu = [one for group in groups for one in group["params"] if isinstance(one, torch.Tensor) and one.is_cpu]
        if on_cpu:
            self._optimizers.add(optimizer)
            self._waiting.update((one, None) for one in on_cpu)

    def _move(self) -> None:
        if not self._waiting or not self._may_move():
            return
        with torch.inference_mode(False):  # parameters that are made in inference mode cannot be trained
            trained = [
                one
                for one in self._modules()
                if any(parameter in self._waiting for parameter in nn.Module.parameters(one))
            ]
            for module in trained:
                module.to(self._device)
            for optimizer in list(self._optimizers):
                _follow_parameters(optimizer)
        self._waiting.clear()
        self._optimizers.clear()


def _follow_parameters(optimizer: Optimizer) -> None:
    """Move the state that ``optimizer`` has loaded to its parameters' devices, as ``load_state_dict`` does."""
    held = vars(optimizer)
    on_cpu = () if any(_steps_on_device(group) for group in held["param_groups"]) else ("step",)
    for parameter, state in (held.get("state") or {}).items():
        if isinstance(parameter, torch.Tensor) and isinstance(state, dict):
            for name, value in state.items():
                if name not in on_cpu:
                    state[name] = move_to_device(value, parameter.device)


def _steps_on_device(group: dict[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


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
            with torch.inference_mode(False):
                module.to(self._device)

    def _find_state(self, module: nn.Module) -> torch.Tensor | None:
        state = next(chain(module.parameters(), module.buffers()), None)
        if isinstance(state, nn.Parameter):  # other tensors may stand for the parameters during one call
            key, states = id(module), self._states
            states[key] = weakref.ref(module, lambda _: states.pop(key, None)), state
        return state
