"""``RunSpec``: all that a host process must know to run its ranks; small, and pickled by the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lagom.plan import Plan
from lagom.restart.kept_snapshots import SnapshotPlace
from lagom.restart.written_files import WrittenFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A run, as the driver describes it to host processes."""

    run_id: str
    plan: Plan
    env: Mapping[str, str]
    """Environment variables that ranks get from the driver: all, or those that its program has set."""
    whole_env: bool
    """True if ``env`` replaces the host process's own environment, instead of adding to it."""
    cwd: str
    """The driver's working directory."""
    sys_path: tuple[str, ...]
    """The driver's ``sys.path``."""
    argv: tuple[str, ...]
    """The driver's ``sys.argv``."""
    python: str
    """The driver's Python, as "3.11"; pickled code needs the same."""
    token: str
    """Path that opens the payload on the driver's own host only."""
    payload_size: int
    """Bytes of the payload."""
    payload: bytes | None = None
    """The payload itself, if it is small."""
    payload_sha256: str = ""
    """Digest of a payload that other hosts must fetch."""
    passes_payload_on: bool = False
    """True if hosts that have fetched the payload give it to others."""
    modules_zip: bytes = b""
    """The user's own modules, for hosts that do not see the driver's files."""
    address: tuple[str, int] | None = None
    """Address on which the driver listens; None if hosts cannot reach it."""
    secret: bytes = field(default=b"", repr=False)
    """Secret of the run, which ranks prove to the driver."""
    files: WrittenFiles | None = None
    """Files that earlier attempts of this run have written; None if the run begins only once."""
    certificate: str = ""
    """The driver's certificate (PEM), if the channel is encrypted."""
    rank_certificate: str = field(default="", repr=False)
    """The ranks' key and certificate (PEM), if hosts encrypt what they send each other."""
    snapshots: SnapshotPlace | None = None
    """Folder of rank 0's snapshots, and the snapshot that ranks go on from; None if none are kept."""
    losses_left: int = 0
    """How many losses of ranks this run may yet go on after."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """One rank's place and resources, from its host process."""

    rank: int
    local_rank: int
    local_world_size: int
    ip: str
    """Address at which other ranks reach this one."""
    store: tuple[str, int] | None
    """Address of the store where ranks find each other; None on one host, where it is a file in ``host_dir``."""
    store_fd: int | None
    """Rank 0 only: the store's listening socket."""
    control_fd: int
    """Connection to the host process."""
    outcome_fd: int
    """File for the function's result or error."""
    payload_fd: int
    stacks_fd: int | None
    """File for the stacks of a stuck rank, and of the processes that it started."""
    host_dir: str
    """Folder that the ranks of this host share during the run."""
    threads: int
    """Number of threads that the rank may use; 0 keeps torch's default."""
    gpu: str | None = None
    """Value of CUDA_VISIBLE_DEVICES."""
    gpu_index: int = 0
    """Index of the rank's own GPU among these."""
    nccl: bool = False
    """True if every rank has a GPU to itself; NCCL refuses ranks that share one, gloo does not."""
    twin_fd: int | None = None
    """Connection to the host process for the rank's sleeping twins; None if it has none."""
    twins_due: memoryview | None = None
    """Memory of all ranks of the host, which says when the next twins are due."""
    key: bytes = field(default=b"", repr=False)
    """Key by which ranks authenticate each other; derived from the run's secret."""
    certificate: str = field(default="", repr=False)
    """The ranks' key and certificate (PEM), if they are on several hosts and encrypt what these send each other."""
