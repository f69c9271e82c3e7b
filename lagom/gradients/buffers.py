"""``BufferSync``: keeps the buffers of trained modules equal on all ranks, by copies from rank 0."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from lagom.exchange.transport import bytes_of
from lagom.gradients.checksum import checksums
from lagom.patching.object_reference import HiddenReference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from lagom.exchange.group import Group
    from lagom.run_state.leaves import Leaves

Key = tuple[int, str]
"""A buffer's name, equal on all ranks: the least number of a parameter in its outermost module, and its path there."""


class BufferSync:
    """Finds buffers, and copies those of rank 0 to the other ranks.

    BatchNorm registers its buffers in ``KnownTensors.synchronised_buffers``. If a module has such a buffer, none of its
    buffers is copied; they are only compared. See Note [Divergence] in divergence.py.

    Args:
        modules: returns all modules of the program.
        synchronised: a mapping whose keys are the buffers that lagom keeps equal itself (those of BatchNorm).
    """

    def __init__(
        self,
        group: Group,
        leaves: Leaves,
        modules: Callable[[], Iterable[nn.Module]],
        synchronised: Mapping[Any, None],
    ) -> None:
        self.strict: dict[Key, str] = {}
        """Names, for errors, of the buffers that must be equal on all ranks."""
        self._group = group
        self._leaves = leaves
        self._modules = modules
        self._synchronised = synchronised
        self._owners: dict[Key, tuple[weakref.ref[nn.Module], str]] = {}
        self._followers: dict[Key, tuple[weakref.ref[nn.Module], str]] = {}
        """Module and name of each buffer that follows rank 0's."""
        self._seen: dict[Key, tuple[HiddenReference[torch.Tensor], int]] = {}
        """Each such buffer, and its version when it was last copied."""
        self._restless: set[Key] = set()
        """Buffers to copy after every backward, since they change without a new version."""
        self._agreed: list[Key] | None = None
        """Buffers to copy next, after ranks have exchanged which ones changed; else None."""

    def find_buffers(self, trained: set[int]) -> None:
        """Find the buffers of outermost modules with a trained parameter; ``trained`` has parameters' numbers."""
        self._owners.clear()
        self.strict.clear()
        for inside, number in self._outermost_modules(trained):
            for path, module in inside:
                owned = module.__dict__.get("_buffers") or {}
                strict = any(b is not None and b in self._synchronised for b in owned.values())
                for name in owned:
                    key = (number, f"{path}.{name}" if path else name)
                    self._owners[key] = (weakref.ref(module), name)
                    if strict:
                        self.strict[key] = f"{type(inside[0][1]).__name__}.{key[1]}"
        self._followers = {key: owner for key, owner in self._owners.items() if key not in self.strict}

    def checksums(self, everything: bool = False) -> dict[Key, tuple[str, int]]:
        """Return kind (type and shape) and checksum of buffers.

        Args:
            everything: whether to include the buffers of ``find_changed``, which may differ until they are copied.
        """
        skipped = set() if everything else set(self.find_changed())
        return checksums({key: b for key, b in _living_buffers(self._owners) if key not in skipped})

    def find_changed(self) -> list[Key]:
        """Return the buffers to copy from rank 0.

        These are the buffers on which ranks have just agreed, else those that have changed here since the last copy.
        """
        if self._agreed is not None or not self._followers:
            return self._agreed or []
        changed = []
        for key, buffer in _living_buffers(self._followers):
            seen = self._seen.get(key)
            if seen is None or seen[0]() is not buffer or seen[1] != buffer._version or key in self._restless:
                changed.append(key)
        return sorted(changed)

    def agree(self, rows: list[tuple[Mapping[Key, tuple[str, int]], list[Key]]], *, compare: bool) -> None:
        """Decide which buffers to broadcast: those that all ranks have in one kind, and that have changed on any rank.

        Args:
            rows: for each rank, kind and checksum of its buffers, and the buffers that have changed.
            compare: whether to broadcast also the buffers whose checksums differ although no rank has noticed a change,
                now and after every backward.
        """
        common = {
            key
            for key in set.intersection(*(set(held) for held, _ in rows)) - set(self.strict)
            if len({held[key][0] for held, _ in rows}) == 1
        }
        if compare:
            changed = {key for _, row in rows for key in row}
            different = {key for key in common if len({held[key][1] for held, _ in rows}) > 1}
            self._restless |= different - changed
        self._agreed = sorted(common & ({key for _, row in rows for key in row} | self._restless))
        for key, buffer in _living_buffers(self._followers):
            self._seen[key] = (HiddenReference(buffer), buffer._version)

    def broadcast_changed(self) -> None:
        """Broadcast the changed buffers from rank 0; a collective if there are any. All ranks must agree on them."""
        keys = set(self.find_changed()) if self._followers else None
        self._agreed = None
        if not keys:
            return
        changed = [(key, buffer) for key, buffer in _living_buffers(self._followers) if key in keys]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for key, buffer in sorted(changed, key=lambda pair: pair[0]):
            self._seen[key] = (HiddenReference(buffer), buffer._version)
            by_device.setdefault(buffer.device, []).append(buffer)
        for buffers in by_device.values():
            self._broadcast(buffers)

    def _broadcast(self, buffers: list[torch.Tensor]) -> None:
        parts = [bytes_of(b.detach().contiguous()) for b in buffers]
        flat = torch.cat(parts)
        self._group.broadcast(flat)
        if self._group.rank == 0:
            return
        for buffer, part in zip(buffers, torch.split(flat, [len(part) for part in parts]), strict=True):
            # .data keeps the version: a graph that is retained for another backward may have saved the buffer.
            buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _outermost_modules(self, trained: set[int]) -> Iterator[tuple[list[tuple[str, nn.Module]], int]]:
        """Yield for each outermost trained module all modules in it by path, and the least number of a parameter."""
        modules = [module for module in self._modules() if module.__dict__.get("_modules") is not None]
        inner = {id(child) for module in modules for child in module.__dict__["_modules"].values()}
        for module in modules:
            if id(module) in inner:
                continue
            inside = list(_walk_modules(module))
            parameters = [p for _, part in inside for p in part.__dict__.get("_parameters", {}).values()]
            numbers = [number for p in parameters if p is not None and (number := self._leaves.known(p)) is not None]
            if not trained.isdisjoint(numbers):
                yield inside, min(numbers)


def _walk_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module once for each module, in another order than ``named_modules``; modules need no hash."""
    seen = set()
    pending = [("", root)]
    while pending:
        path, module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            children = module.__dict__.get("_modules") or {}
            pending += [(f"{path}.{name}" if path else name, c) for name, c in children.items() if c is not None]


def _living_buffers(owners: Mapping[Key, tuple[weakref.ref[nn.Module], str]]) -> Iterator[tuple[Key, torch.Tensor]]:
    for key, (ref, name) in owners.items():
        module = ref()
        buffer = module.__dict__["_buffers"].get(name) if module is not None else None
        if buffer is not None and buffer.layout == torch.strided and not is_lazy(buffer):
            yield key, buffer
