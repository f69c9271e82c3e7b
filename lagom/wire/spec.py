"""``RunSpec``: the facts that a host process needs to run its ranks, pickled by the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lagom.plan import Plan
from lagom.restart.written_files import WrittenFiles

if TYPE_CHECKING:
    from lagom.restart.kept_snapshots import SnapshotPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A run, as the driver describes it to host processes."""

    run_id: str
    plan: Plan
    env: Mapping[str, str]
    """Environment variables that ranks get from the driver: all, or only those that the program has set."""
    whole_env: bool
    """Whether ``env`` replaces the host process's own environment, or is added to it."""
    cwd: str
    """The driver's working directory."""
    sys_path: tuple[str, ...]
    """The driver's ``sys.path``; for Spark without folders of installed packages."""
    argv: tuple[str, ...]
    """The driver's ``sys.argv``."""
    python: str
    """The driver's version of Python, such as "3.11"; pickled code needs the same version."""
    token: str
    """Path of a file by which a host process recognises the driver's own host, and finds the payload's path there.

    "" in a local run, whose host process inherits the payload.
    """
    payload_size: int
    """Bytes of the payload."""
    payload: bytes | None = None
    """The payload itself, if it is small or hosts have no other way to get it; None otherwise, and in a local run."""
    payload_sha256: str = ""
    """Digest of a payload that other hosts must fetch from the driver; else ""."""
    modules_zip: bytes = b""
    """Zip of the user's own modules, for hosts that do not see the driver's files."""
    packages_zip: bytes = b""
    """Zip of installed packages that hosts may lack."""
    shipped: tuple[str, ...] = ()
    """Names of the distributions in ``packages_zip``."""
    address: tuple[str, int] | None = None
    """Address on which the driver listens; None if hosts cannot reach it, and in a local run."""
    secret: bytes = field(default=b"", repr=False)
    """Secret of the run, by which tasks and the driver authenticate each other."""
    files: WrittenFiles | None = None
    """Files that earlier attempts have written; None if no attempt can follow, or the driver is unreachable."""
    certificate: str = ""
    """The driver's certificate (PEM); "" if the channel is not encrypted."""
    rank_certificate: str = field(default="", repr=False)
    """Key and certificate (PEM) for ranks of several hosts; "" if Spark does not encrypt."""
    snapshots: SnapshotPlace | None = None
    """Folder of rank 0's snapshots, and the snapshot from which ranks resume; None if none are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """One rank's place and resources, from its host process."""

    rank: int
    local_rank: int
    local_world_size: int
    ip: str
    """Address at which other ranks reach this one."""
    store: tuple[str, int] | None
    """Address of the store where ranks find each other; None on one host, where the store is a file in ``host_dir``."""
    store_fd: int | None
    """The store's listening socket, on rank 0 if the store has an address; else None."""
    control_fd: int
    """Connection to the host process."""
    outcome_fd: int
    """File for the function's result or error."""
    payload_fd: int
    stacks_fd: int | None
    """File for the stacks of a stuck rank and of its child processes."""
    notice_fd: int | None = None
    """File with one byte, which changes when the driver wants a snapshot; None if the rank takes none."""
    sigterm_fd: int | None = None
    """Pipe to the host process, to which the rank writes at SIGTERM; None if the run keeps no snapshots."""
    host_dir: str
    """Folder that the ranks of this host share during the run."""
    threads: int
    """Number of threads that the rank may use; 0 keeps torch's default."""
    gpu: str | None = None
    """Accelerator of the rank, as ``visible_devices`` in cluster.py names it, or several of NVIDIA's; None for any."""
    gpu_index: int = 0
    """Index of the rank's own GPU among NVIDIA's devices in ``gpu``."""
    cross_rank: int = 0
    """Place of the rank among the ranks that have its local rank on their hosts."""
    cross_size: int = 1
    """Number of hosts that have a rank of this local rank."""
    nccl: bool = False
    """Whether no two ranks share an accelerator, which NCCL refuses; meaningless for ranks on the CPU."""
    key: bytes = field(default=b"", repr=False)
    """Key by which ranks authenticate each other; derived from the run's secret."""
    certificate: str = field(default="", repr=False)
    """The ranks' key and certificate (PEM); "" on one host, or if connections between hosts are not encrypted."""
