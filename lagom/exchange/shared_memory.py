"""``shared``: makes shared memory for the ranks of each host, communicators over it, and the ``MemoryTransport``."""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
import struct
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lagom.control_groups import available_cores
from lagom.exchange.background import DONE
from lagom.exchange.native import OPERATIONS, TYPES, native, reason_without_native
from lagom.exchange.sockets.handshake import End, admit, introduce, process_of
from lagom.exchange.transport import Transport, are_dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagom.exchange.background import CompletedWork
    from lagom.exchange.native import Communicator
    from lagom.exchange.sockets.connect import GatherTexts

SLOT_BYTES = 1 << 19
"""Bytes of a slot, which a rank fills before other ranks read it. Each rank has two slots, small enough for caches."""
_MAIL = 1 << 16
"""Bytes of a piece of a message between two ranks."""
_SPIN_S = 2e-6
"""Seconds that a rank spins for another before it yields to other processes, if each rank has its own core."""
_YIELDS = (200, 10)
"""Yields before a rank sleeps, where each rank has its own core, and where ranks share cores. See Note [Waiting]."""
_PURPOSE = "shared memory"
_TIMEOUT_S = 60.0
"""Seconds that the first rank waits for the next rank to ask for the memory, and that others wait for its answer."""
_SIZE = struct.Struct("<I")
_Process = tuple[int, int]
"""The pid of a process, and the time at which it was started."""


def shared(
    rank: int,
    all_gather: GatherTexts,
    timeout_s: float,
    number: int = 1,
    key: bytes = b"",
) -> tuple[list[list[int]], list[Communicator]] | str:
    """Return the ranks of each host, and ``number`` communicators of this host's ranks; a collective.

    If some rank cannot share memory, all ranks return the reason as a text. A communicator numbers the ranks of its
    host from 0. With several hosts, a rank alone on its host has no communicator. See Note [Handing round].

    Args:
        all_gather: gathers a text of every rank before the ranks are connected.
        timeout_s: how long an exchange will wait for a rank.
        key: secret of the run's ranks.

    Raises:
        OSError, RuntimeError: when a rank ends during the call.
    """
    answers = [json.loads(part) for part in all_gather(json.dumps(_answer()).encode())]
    homes = _homes(answers)
    if isinstance(homes, str):
        return homes
    peers = next(home for home in homes if rank in home)
    number = number if len(homes) == 1 or len(peers) > 1 else 0
    made = _joined(rank, peers, all_gather, timeout_s, number, key)
    return made if isinstance(made, str) else (homes, made)


def _homes(answers: list[dict[str, Any]]) -> list[list[int]] | str:
    """Group ranks by host, in the order of their first rank; or return the reason why no memory is shared."""
    found: dict[str, list[int]] = {}
    for peer, answer in enumerate(answers):
        if answer["reason"]:
            return f"{answer['reason']} (rank {peer})"
        found.setdefault(answer["home"], []).append(peer)
    return list(found.values())


def _joined(
    rank: int,
    peers: list[int],
    all_gather: GatherTexts,
    timeout_s: float,
    number: int,
    key: bytes,
) -> list[Communicator] | str:
    fds: list[int] = []
    problem = ""
    try:
        try:
            processes = _handed_round(rank, peers, all_gather, number, key, fds)
            spin_s, yields = _patience(len(peers))
            place = peers.index(rank)
            made = [native().join(fd, place, processes, timeout_s, spin_s, yields) for fd in fds]
        except (OSError, RuntimeError) as error:
            problem = f"{error} (rank {rank})"
        problems = [part.decode() for part in all_gather(problem.encode()) if part]
        if problems:
            return problems[0]
    finally:
        for fd in fds:
            os.close(fd)
    _all.update(made)
    return made


def _answer() -> dict[str, Any]:
    if native() is None:
        return {"reason": reason_without_native() or "lagom was installed without its compiled part"}
    try:
        found = home()
    except OSError as error:
        return {"reason": f"this system does not say which host it is: {error}"}
    return {"reason": "", "home": found}


def home() -> str:
    """Return a text that is equal for two processes exactly if they can reach each other's Unix sockets and pids.

    They can if they have the same boot, network and pid namespaces, and user.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.stat(f"/proc/self/ns/{space}").st_ino for space in ("net", "pid")]
    return f"{boot} {spaces} {os.geteuid()}"


def _patience(num_ranks: int) -> tuple[float, int]:
    return (_SPIN_S, _YIELDS[0]) if num_ranks <= available_cores() else (0.0, _YIELDS[1])


def _handed_round(
    rank: int, peers: list[int], all_gather: GatherTexts, number: int, key: bytes, fds: list[int]
) -> list[_Process]:
    """Append descriptors of ``number`` memory files to ``fds``; return the processes of ``peers``, this host's ranks.

    The caller closes the descriptors, also if this raises an error.
    """
    size = len(peers)
    if number == 0:
        all_gather(b"", wanted=())
        return []
    if rank != peers[0]:
        name, nonce = json.loads(all_gather(b"", wanted=peers[:1])[peers[0]])
        received, processes = _received(bytes.fromhex(name), key + bytes.fromhex(nonce), rank, peers[0], number)
        fds += received
        return processes
    nonce = secrets.token_bytes(16)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind(b"")  # the kernel chooses an abstract name
            listener.listen(1024)
        except OSError:
            all_gather(json.dumps(["", ""]).encode(), wanted=())  # nobody can connect to an empty name
            raise
        trouble: Exception | None = None
        try:
            fds.extend(native().create(size, SLOT_BYTES, _MAIL) for _ in range(number))
        except RuntimeError as error:
            trouble = error
            while fds:
                os.close(fds.pop())
        all_gather(json.dumps([listener.getsockname().hex(), nonce.hex()]).encode(), wanted=())
        there: dict[int, socket.socket] = {}
        for peer, connection in admit([listener], key + nonce, End(rank, _PURPOSE), _TIMEOUT_S) if size > 1 else ():
            stack.enter_context(connection)
            if peer in peers:
                there[peer] = connection
            if len(there) == size - 1:
                break
        if trouble is not None:
            raise trouble  # the other ranks see that the connection ends
        processes = _started([os.getpid(), *(process_of(there[peer]) for peer in peers[1:])])
        text = json.dumps(processes).encode()
        for connection in there.values():
            connection.settimeout(_TIMEOUT_S)
            socket.send_fds(connection, [_SIZE.pack(len(text))], fds)
            connection.sendall(text)
    return processes


def _received(name: bytes, key: bytes, rank: int, giving: int, number: int) -> tuple[list[int], list[_Process]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as giver:
        giver.settimeout(_TIMEOUT_S)
        giver.connect(name)
        introduce(giver, key, End(rank, _PURPOSE), giving, _TIMEOUT_S)
        head, fds, _, _ = socket.recv_fds(giver, _SIZE.size, number)
        try:
            if len(fds) != number or len(head) != _SIZE.size:
                raise OSError("the first rank of this host has no shared memory")
            for fd in fds:
                os.set_inheritable(fd, False)
            text = b""
            while len(text) < _SIZE.unpack(head)[0]:
                if not (part := giver.recv(_MAIL)):
                    raise OSError("the first rank of this host hung up")
                text += part
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
    return list(fds), [(pid, started) for pid, started in json.loads(text)]


def _started(pids: Sequence[int]) -> list[_Process]:
    """Return ``pids`` with the times at which the processes were started.

    Raises:
        OSError: when a process has ended, since its pid may be given to another process. Not if /proc tells no times.
    """
    found = [(pid, int(native().started(pid))) for pid in pids]
    if found[0][1] and not all(started for _, started in found):
        raise OSError("a rank of this host has ended")
    return found


_all: weakref.WeakSet[Any] = weakref.WeakSet()


def _forget_all() -> None:
    for communicator in list(_all):
        communicator.forget()


# Forget the communicators in a fork: a loader worker takes no part in its rank's exchanges, and its own end must not
# count as the end of the rank.
os.register_at_fork(after_in_child=_forget_all)


# Note [Handing round]
#
# The memory is a file without a name (a memfd) of mode 0600: nobody can open it by name, and the kernel frees it when
# the last process that has it ends, however that process ends. Only if a container forbids memfd, the file is in
# /dev/shm, TMPDIR or /tmp. The first rank of a host creates the file and sends its descriptor over a Unix socket. A
# receiver must belong to the same user according to the kernel, and must prove that it knows the run's key and the
# nonce that the first rank has gathered; see handshake.py. The kernel also says the pid of each receiver, so that no
# rank has to tell its pid to all others. A process that is forked from a rank does not inherit the mapping.


# Note [Waiting]
#
# A yield costs 0.2 us if no other process needs the core; otherwise the awaited rank can run on the core. A rank that
# spins on a core that the awaited rank needs delays both. Measured for an exchange of 4 KB between 2 ranks on 2 cores,
# beside a third busy process: 112 us with 100 us of spinning, 2.5 us with yields. Without the third process both take
# 1 us.


_U8 = TYPES[torch.uint8]


class MemoryTransport(Transport):
    """Passes the addresses of tensors to the communicator ``memory``; an exchange is done when its method returns."""

    memory: Communicator

    def __init__(self, memory: Communicator) -> None:
        self.memory = memory

    def carries(self, operation: str, tensors: Sequence[torch.Tensor], reduction: str | None = "") -> bool:
        """Return whether the tensors are dense, on the CPU, and, in a reduction, of types that C++ reduces."""
        return are_dense(tensors) and (reduction == "" or _reduced(reduction).issuperset([t.dtype for t in tensors]))

    def all_reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> CompletedWork:
        self.memory.all_reduce(tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], OPERATIONS[reduction])
        return DONE

    def broadcast(self, tensor: torch.Tensor, root: int) -> CompletedWork:
        self.memory.broadcast(tensor.data_ptr(), tensor.nbytes, root, type_code(tensor))
        return DONE

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> CompletedWork:
        self.memory.all_gather(part.data_ptr(), whole.data_ptr(), part.nbytes, type_code(part))
        return DONE

    def reduce_scatter(self, out: torch.Tensor, given: torch.Tensor, reduction: str = "sum") -> CompletedWork:
        code, operation = TYPES[out.dtype], OPERATIONS[reduction]
        self.memory.reduce_scatter(given.data_ptr(), out.data_ptr(), out.numel(), code, operation)
        return DONE

    def all_to_all_rows(self, out: torch.Tensor, given: torch.Tensor) -> CompletedWork:
        sizes = [given.nbytes // len(given)] * len(given)
        self.memory.all_to_all(given.data_ptr(), sizes, out.data_ptr(), sizes, type_code(given))
        return DONE

    def set_timeout(self, timeout_s: float) -> None:
        self.memory.set_timeout(timeout_s)

    def abort(self, rank: int) -> None:
        self.memory.abort(f"rank {rank} aborted its process group")

    def close(self) -> None:
        self.memory.close()


def type_code(tensor: torch.Tensor) -> int:
    """Return the code of the tensor's type, which the ranks compare; the code of uint8 for types without a code."""
    return TYPES.get(tensor.dtype, _U8)


@functools.cache
def _reduced(reduction: str | None) -> frozenset[torch.dtype]:
    """Return the types that C++ can reduce by ``reduction``; none if it is None."""
    if reduction is None:
        return frozenset()
    return frozenset(dtype for dtype, code in TYPES.items() if native().has(code, OPERATIONS[reduction]))


# Note [Shared memory]
#
# When all ranks are processes of one host, CPU tensors go through memory that they share; see csrc/communicator.hpp.
# The first exchange finds out, on all ranks together, whether this is possible: if one rank lacks the compiled part, no
# rank uses shared memory. When ranks are on several hosts, ``HostTransport`` and ``HostMessages`` use the shared memory
# of each host; see Note [Several hosts] in hosts.py. ``all_reduce_aside``, whose order is independent of other
# exchanges, has a memory and a thread of its own.
