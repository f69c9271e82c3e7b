"""``RunSpec``: everything the host process must know to hold its ranks of a run; small, and pickled by the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lagom.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A run, as the driver describes it to the processes that hold its ranks."""

    run_id: str
    plan: Plan
    env: Mapping[str, str]
    """Environment variables of the driver that ranks get: all of them, or the ones its program has set."""
    whole_env: bool
    """``env`` replaces the host process's own environment, rather than adding to it."""
    cwd: str
    """The driver's working directory."""
    sys_path: tuple[str, ...]
    """The driver's ``sys.path``."""
    argv: tuple[str, ...]
    """The driver's ``sys.argv``."""
    python: str
    """The driver's Python, as "3.11"; pickled code needs the same."""
    token: str
    """Path that opens the payload on the driver's own host, and nowhere else."""
    payload_size: int
    """Bytes of the payload."""
    payload: bytes | None = None
    """The payload itself, when it is small."""
    payload_sha256: str = ""
    """Digest of a payload that other hosts must fetch."""
    modules_zip: bytes = b""
    """The user's own modules, for hosts that do not see the driver's files."""
    address: tuple[str, int] | None = None
    """Where the driver listens; None: it cannot be reached."""
    secret: bytes = field(default=b"", repr=False)
    """Opens the driver's channel."""
    certificate: str = ""
    """The driver's, PEM, where the channel is encrypted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """One rank's place and means, as its host process hands them to it."""

    rank: int
    local_rank: int
    local_world_size: int
    ip: str
    """Own address, where other ranks reach this one."""
    store: tuple[str, int] | None
    """Address of the store where ranks find each other; None on one host, where it is a file in ``host_dir``."""
    store_fd: int | None
    """Rank 0 only: the store's listening socket."""
    control_fd: int
    """Connection to the host process."""
    outcome_fd: int
    """File for what the function returns or raises."""
    payload_fd: int
    stacks_fd: int | None
    """File for the stacks of a rank that is stuck, and of what it has started."""
    host_dir: str
    """Folder that the ranks of this host share during the run."""
    threads: int
    """Threads that the rank may use; 0: as they are."""
    gpu: str | None = None
    """What CUDA_VISIBLE_DEVICES becomes."""
    gpu_index: int = 0
    """Which of these is the rank's own."""
    nccl: bool = False
    """Every rank has a GPU to itself; NCCL refuses ranks that share one, gloo does not."""
    key: bytes = field(default=b"", repr=False)
    """By which ranks know each other; made of the run's secret."""
