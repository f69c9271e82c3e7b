"""``Transports``: chooses the transport for each exchange of a run's ranks, and connects it when it is first needed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from lagom.exchange.native import UNUSABLE
from lagom.exchange.shared_memory import MemoryTransport, shared
from lagom.exchange.sockets.encryption import NO_CREDENTIALS, Credentials
from lagom.exchange.torch_transport import TorchTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from lagom.exchange.host_messages import HostMessages
    from lagom.exchange.native import Communicator
    from lagom.exchange.sockets.connect import GatherTexts
    from lagom.exchange.sockets.mesh import Mesh
    from lagom.exchange.transport import Messages, Transport

_KEPT: list[dist.ProcessGroup] = []
"""Groups that are never destroyed: gloo's threads may still use their tensors, and then destruction can deadlock."""

log = logging.getLogger("lagom")


class Transports:
    """Chooses and connects the transports between the ranks of a run.

    Modules for other transports than memory are imported when they are needed: on one host with the compiled part, CPU
    tensors need none.

    A method that returns transports, or the exchange of messages, is a collective if these are not connected yet.

    Args:
        all_gather: gathers a text of every rank before the ranks are connected.
        gloo: makes a process group for any tensors, from a name, a rank and a world size.
        timeout_s: how long a rank waits for another.
        nccl: makes a process group for tensors on accelerators, such as NCCL's, from a name; None if ranks have no
            accelerator, share one, or have one without a backend.
        credentials: key and certificates that the run's ranks share.
        ip: address at which ranks on other hosts reach this one.
        shares_memory: whether CPU tensors may go through shared memory and lagom's own sockets; otherwise they go over
            gloo.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        all_gather: GatherTexts,
        gloo: Callable[[str, int, int], dist.ProcessGroup],
        timeout_s: float,
        *,
        nccl: Callable[[str], dist.ProcessGroup] | None,
        credentials: Credentials,
        ip: str,
        shares_memory: bool,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._all_gather = all_gather
        self._make_gloo = gloo
        self._timeout_s = timeout_s
        self._make_nccl = nccl
        self._nccl = TorchTransport(nccl("nccl")) if nccl is not None else None
        self._credentials = credentials
        self._ip = ip
        self._shares_memory = shares_memory
        self._fast: Sequence[Transport] | None = None
        self._messages: Mesh | HostMessages | None = None
        self._gloo: dict[str, TorchTransport] = {}
        self._opened: list[Transport] = []
        self.memory: Communicator | None = None
        """Communicator over memory that all ranks share; None without such memory, and before the first exchange."""

    @property
    def has_fast(self) -> bool:
        """Whether shared memory or ``HostTransport`` sums CPU tensors; False before ``connect``, equal on all ranks."""
        return bool(self._fast)

    @property
    def has_gpus(self) -> bool:
        """Whether every rank has an accelerator to itself, and a backend carries its tensors."""
        return self._nccl is not None

    @property
    def device_group_class(self) -> str | None:
        """Name of the class of the process group for tensors on accelerators; None without."""
        return self._nccl.group_class if self._nccl is not None else None

    @property
    def connected_messages(self) -> Messages | None:
        """The exchange of messages; None if it is not connected yet."""
        return self._messages if self.memory is None else self.memory

    def choose(self, operation: str, tensor: torch.Tensor, reduction: str = "") -> Transport:
        """Return the transport that carries ``tensor`` in ``operation``."""
        if tensor.is_cpu:
            if (fast := self.connect()) and fast[0].carries(operation, (tensor,), reduction):
                return fast[0]
            if (mesh := self._mesh()) is not None:
                from lagom.exchange.mesh_transport import MeshTransport

                return MeshTransport(mesh, self._rank, self._world_size)
            return self._connect_gloo("gloo")
        if self._nccl is not None:
            return self._nccl
        from lagom.exchange.staged_transport import StagedTransport

        return StagedTransport(self.choose)

    def connect(self) -> Sequence[Transport]:
        """Return two transports of ``connect_memory``; an empty sequence if ranks cannot or may not share memory.

        The second is for exchanges that need not keep the order of the first. See Note [Shared memory] in
        shared_memory.py.
        """
        if self._fast is None:
            self._fast = ()
            if self._shares_memory:
                parts = connect_memory(self._rank, self._all_gather, self._ip, self._timeout_s, 2, self._credentials)
                if not isinstance(parts, str):
                    self._fast, self.memory = parts, parts[0].memory
                    self._opened += parts
                elif self._rank == 0 and not self.has_gpus:
                    level = logging.WARNING if parts.startswith(UNUSABLE) else logging.INFO
                    log.log(level, "CPU tensors are not exchanged through shared memory: %s", parts)
        return self._fast

    def messages(self) -> Messages:
        """Return the exchange of messages: through memory of all ranks, else by sockets, with several hosts by both."""
        if self._fast is None:
            self.connect()
        return self._connect_messages() if self.memory is None else self.memory

    def host_messages(self) -> HostMessages | None:
        """Return the exchange of messages over several hosts; None on one host."""
        messages = self.messages()
        if self.memory is not None:
            return None
        from lagom.exchange.host_messages import HostMessages

        return messages if isinstance(messages, HostMessages) else None

    def connect_aside(self, device: torch.device) -> Transport:
        """Return a transport for tensors on ``device`` whose exchanges are ordered independently of all others.

        Args:
            device: the CPU, or an accelerator if every rank has one to itself.
        """
        if device.type != "cpu" and self._make_nccl is not None:
            by_nccl = TorchTransport(self._make_nccl("nccl aside"))
            # NCCL and others connect at their first exchange. Run one now, and not in the midst of a backward.
            by_nccl.all_reduce(torch.zeros(1, device=device)).wait()
            return by_nccl
        if fast := self.connect():
            return fast[1]
        if self._mesh() is None:
            return self._connect_gloo("aside")
        from lagom.exchange.mesh_transport import MeshTransport
        from lagom.exchange.sockets.mesh import Mesh

        aside = self._make_messages()
        assert isinstance(aside, Mesh)
        self._opened.append(MeshTransport(aside, self._rank, self._world_size))
        return self._opened[-1]

    def close(self) -> None:
        """Close the connections to the other ranks, except those of gloo and of the accelerators' backend."""
        if self._messages is not None:
            self._messages.close()
        for transport in self._opened:
            transport.close()

    def _connect_messages(self) -> Mesh | HostMessages:
        if self._messages is None:
            self._messages = self._make_messages()
        return self._messages

    def _make_messages(self) -> Mesh | HostMessages:
        from lagom.exchange.host_messages import connect_messages
        from lagom.exchange.hosts import HostTransport

        first = self._fast[0] if self._fast else None
        hosts = first if isinstance(first, HostTransport) else None
        return connect_messages(self._rank, self._ip, self._all_gather, self._credentials, self._timeout_s, hosts)

    def _mesh(self) -> Mesh | None:
        """Return the mesh for tensors that shared memory does not carry; None if they go over gloo. See Note [Gloo]."""
        if not self._shares_memory or (self._fast and self.memory is None):
            return None
        from lagom.exchange.sockets.mesh import Mesh

        found = self._connect_messages()
        return found if isinstance(found, Mesh) else None

    def _connect_gloo(self, name: str) -> TorchTransport:
        """Return the transport over the gloo group ``name``, which the first call makes. See Note [Gloo]."""
        if name not in self._gloo:
            self._gloo[name] = TorchTransport(self._keep_gloo(name, self._rank, self._world_size))
        return self._gloo[name]

    def _keep_gloo(self, name: str, rank: int, size: int) -> dist.ProcessGroup:
        _KEPT.append(self._make_gloo(name, rank, size))
        return _KEPT[-1]


def connect_memory(
    rank: int,
    all_gather: GatherTexts,
    ip: str,
    timeout_s: float,
    number: int = 1,
    credentials: Credentials = NO_CREDENTIALS,
) -> Sequence[Transport] | str:
    """Connect the ranks, and return ``number`` transports; all ranks call this together.

    On one host this is a ``MemoryTransport``; on several, a ``HostTransport``, which uses shared memory within each.
    If ranks cannot share memory, return the reason as a string.

    Args:
        all_gather: gathers a text of every rank before the ranks are connected.
        ip: address at which other hosts reach this one.
        timeout_s: how long an exchange will wait for a rank.
        credentials: key and certificates that the run's ranks share.

    Raises:
        OSError, RuntimeError: when a rank ends during the call, or cannot be reached.
    """
    transport = shared(rank, all_gather, timeout_s, number, credentials.key)
    if isinstance(transport, str):
        return transport
    homes, near = transport
    if len(homes) > 1:
        from lagom.exchange.hosts import connect_hosts

        return connect_hosts(rank, homes, near, number, ip, all_gather, credentials, timeout_s)
    return [MemoryTransport(one) for one in near]


# Note [Gloo]
#
# gloo listens at a port for as long as it lives, accepts every connection without proof, and adds up whatever arrives.
# So ``Group`` makes a gloo group only when no other transport can carry the tensors: if the config asks for gloo
# (collectives="gloo"); with several hosts, for the rare operations and types that ``HostTransport`` does not carry, or
# for all of them if lagom was installed without its compiled part. On one host, tensors that shared memory does not
# carry go through Unix sockets: tensors of types that csrc/arithmetic.hpp does not have, or all tensors without the
# compiled part. The backend "lagom" of torch makes its gloo group when it first needs gloo, if its ranks share memory
# on one host; else at once, or never in a run that encrypts between hosts (torch_backend/registration.py).
