"""``TorchDistributedConfig``: settings of one run of a training function, data-parallel over ranks."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lagom.extensions.registry import EXTENSIONS, ExtensionSettings
from lagom.settings import check_one_of, explain_fields, is_int, is_seconds

Launcher = Literal["auto", "spark", "local", "inline"]
Collectives = Literal["auto", "gloo"]
Batches = Literal["split", "whole", "per_rank"]
Evaluation = Literal["gathered", "replicated", "sharded"]
Compression = Literal["fp16", "bf16"]
Reduction = Literal["mean", "adasum"]
LrScaling = Literal["linear"]
Log = Literal["rank0", "all"]
Packages = Literal["installed", "ship"]
MixedPrecision = bool | Literal["bf16", "fp16"]

RUN_DIR = "~/.lagom/runs"


@explain_fields
@dataclass(frozen=True, kw_only=True, eq=False)
class TorchDistributedConfig(ExtensionSettings):
    """Settings of a run. Every field is optional.

    Raises:
        ValueError: when a field has a value it cannot have; nothing has been started then.
    """

    module: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    """A module class, a factory that returns a module, or a list of these (GANs, actor-critic)."""
    train_set: Any = field(default=None, repr=False)
    """A ``Dataset``, a callable that makes one on the rank, or a Spark DataFrame, which becomes a
    ``lagom.data.ParquetDataset``. Anything else, such as a path, reaches the function unchanged."""
    test_set: Any = field(default=None, repr=False)
    """Like ``train_set``."""
    dataset: Sequence[Any] | None = field(default=None, repr=False)
    """``[train_set, test_set]``, in place of the two fields."""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    """Given to the function as ``hparams``, and entry by entry to the parameters that its signature names."""
    world_size: int | None = None
    """Number of ranks. None: on a cluster one per task slot, or per accelerator (GPU) of it; on this machine one per
    accelerator, or per core without any."""
    launcher: Launcher = "auto"
    """Place of the ranks. "spark"; "local": processes on this machine; "inline": one rank in this very process, for a
    debugger; "auto": Spark if a session is active, else local."""
    mixed_precision: MixedPrecision = False
    """Runs forwards in "bf16", or in "fp16" with scaled gradients. True: bf16 if the device has it, else fp16."""
    micro_batches: int | None = None
    """Runs each training forward in this many parts of a rank's batch, one after another, and again in the backward:
    less memory, the same weights. Only for modules whose rows are independent."""
    batches: Batches = "whole"
    """Rows of a training batch that the program sees. "whole": every rank sees all of it, and computes its rows of a
    module's forward: right for any program. "split": each rank sees its share: right where the loss is a mean over
    samples, and faster. "per_rank": ``batch_size`` is each rank's own, as with DDP."""
    evaluation: Evaluation = "gathered"
    """How test sets are evaluated. "gathered": each rank computes its rows of a model's outputs where that saves
    time, and all see whole batches; "replicated": every rank computes everything; "sharded": each sees its share."""
    share_loading: Literal["auto"] | bool = "auto"
    """Loads each sample once, where every rank sees whole batches: a loader's workers serve all ranks of the host, and
    without workers each rank loads a part of each batch. "auto": if the first batches show that the program cannot
    notice; True: also if a data set counts, caches or prints; False: every rank loads every sample."""
    collectives: Collectives = "auto"
    """How ranks exchange CPU tensors. "auto": on one host through shared memory (through Unix sockets if lagom was
    installed without its compiled part), between hosts through lagom's own sockets, and through gloo what these do not
    carry; "gloo": through gloo."""
    gradient_compression: Compression | None = None
    """How gradients travel between ranks. "fp16" and "bf16" halve the bytes. None: unchanged."""
    reduction: Reduction = "mean"
    """How the gradients of all ranks are combined: "mean"; or "adasum", which adds gradients that point differently."""
    lr_scaling: LrScaling | None = None
    """"linear" multiplies the learning rates that optimizers are made with by the number of ranks, for
    ``batches="per_rank"``, where a batch is that much larger. None: the program's rates."""
    allow_unencrypted_collectives: bool = False
    """Lets ranks on several hosts exchange gradients and data unencrypted although Spark's encryption is on. If False,
    they encrypt, and gloo and NCCL, which cannot, are an error. For networks that are private, or encrypted
    themselves."""
    packages: Packages = "installed"
    """Installed packages that the program imports and executors of Spark lack. "installed": an error names all of them
    before a rank starts; "ship": those without compiled parts, and what they require, are sent with each run. For
    larger ones `lagom pack` makes an archive."""
    sync_batchnorm: bool = True
    """In training, BatchNorm uses the statistics of the whole batch, not of a rank's share."""
    seed: int | None = None
    """Seed of torch's, numpy's and random's generators, equal on all ranks. None: ranks start from the states in the
    calling process, which continues from where the run ends, as after a plain call."""
    name: str | None = None
    """Shown in Spark's UI and in the result. None: the function's name."""
    description: str = ""
    """Free text, kept with the result."""
    log: Log = "rank0"
    """Ranks whose output is shown as it comes: "rank0", as in one process; or "all", each line after its rank."""
    run_dir: str | os.PathLike[str] | None = field(default_factory=lambda: os.environ.get("LAGOM_RUN_DIR", RUN_DIR))
    """Each run gets a folder of its own here, with its settings, versions, ranks, their output, progress and result as
    text. None keeps nothing. A URL ("s3://bucket/runs") is opened by fsspec or pyarrow. The environment variable
    LAGOM_RUN_DIR replaces the default."""
    hb_interval: float = 1.0
    """Seconds between two progress reports of a rank."""
    stall_timeout_s: float = 60.0
    """Seconds without progress (no batch, forward, backward or output) after which a rank is named, with its Python
    stack and the ranks that wait for it. math.inf: never."""
    timeout_s: float | None = None
    """Seconds without progress after which a rank ends the run with a StallError. None: never."""
    max_failures: int = 3
    """How often a run restarts after it has lost a rank, an executor or a host (killed, out of memory, cut off). An
    exception of the program ends the run at once. 0: never. docs/survive.md says which files the program then finds."""
    min_world_size: int | None = None
    """The fewest ranks with which a run on Spark restarts when executors are gone. None: 1; with
    ``batches="per_rank"`` or ``lr_scaling``, and for programs that are distributed already, the number of ranks of the
    run."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("launcher", Launcher),
            ("batches", Batches),
            ("evaluation", Evaluation),
            ("collectives", Collectives),
            ("reduction", Reduction),
            ("log", Log),
            ("packages", Packages),
        ):
            check_one_of(name, getattr(self, name), get_args(choices))
        check_one_of("share_loading", self.share_loading, ("auto", False, True))
        check_one_of("sync_batchnorm", self.sync_batchnorm, (False, True))
        check_one_of("allow_unencrypted_collectives", self.allow_unencrypted_collectives, (False, True))
        if str(self.gradient_compression) == "powersgd":
            raise ValueError("gradient_compression='powersgd' is gone; use 'fp16' or 'bf16'")
        check_one_of("gradient_compression", self.gradient_compression, (None, *get_args(Compression)))
        check_one_of("lr_scaling", self.lr_scaling, (None, *get_args(LrScaling)))
        check_one_of("mixed_precision", self.mixed_precision, (False, True, "bf16", "fp16"))
        self._check_micro_batches()
        self._check_module()
        self._check_data()
        self._check_numbers()
        self._check_texts()
        for extension in EXTENSIONS:
            extension.settings.check(self)

    def _check_micro_batches(self) -> None:
        num = self.micro_batches
        if str(num) == "auto":
            raise ValueError("micro_batches='auto' is gone; use a number of parts of a batch, such as micro_batches=4")
        if num is not None and (not is_int(num) or num < 1):
            raise ValueError(f"micro_batches is {num!r}; want a number of parts of a batch, at least 1, or None")

    def _check_module(self) -> None:
        modules = self.module if isinstance(self.module, (list, tuple)) else [self.module]
        for module in modules:
            if is_module(module):
                kind = type(module).__name__
                raise ValueError(
                    f"module is an instance of {kind}; want what makes one: the class, module={kind}, or a function, "
                    f"module=lambda: {kind}(...)"
                )
            if module is not None and not callable(module):
                raise ValueError(
                    f"module is {reprlib.repr(module)}; want a module class, a factory such as models.resnet50, "
                    "or a list of these"
                )

    def _check_data(self) -> None:
        if not isinstance(self.hparams, Mapping):
            raise ValueError(
                f"hparams is a {type(self.hparams).__name__}; want a dict from names to values, such as {{'lr': 1e-3}}"
            )
        if unnamed := [key for key in self.hparams if not isinstance(key, str)]:
            raise ValueError(f"hparams has the key {unnamed[0]!r}; its keys are names, so strings")
        if self.dataset is None:
            return
        if self.train_set is not None or self.test_set is not None:
            raise ValueError("dataset=[train_set, test_set] replaces train_set and test_set; give one or the other")
        if not isinstance(self.dataset, (list, tuple)) or len(self.dataset) != 2:
            given = type(self.dataset).__name__
            if isinstance(self.dataset, (list, tuple)):
                given += f" of {len(self.dataset)}"
            raise ValueError(
                f"dataset is a {given}; want the list [train_set, test_set], or train_set= for one data set alone"
            )

    def _check_numbers(self) -> None:
        if self.world_size is not None and (not is_int(self.world_size) or self.world_size < 1):
            raise ValueError(f"world_size is {self.world_size!r}; want a number of ranks, at least 1, or None for all")
        if self.launcher == "inline" and self.world_size not in (None, 1):
            raise ValueError(f"launcher='inline' is one rank in this process, but world_size is {self.world_size}")
        if self.seed is not None and (not is_int(self.seed) or not 0 <= self.seed < 2**32):
            raise ValueError(f"seed is {self.seed!r}; want an int from 0 to 2**32 - 1, or None")
        if not is_seconds(self.hb_interval):
            raise ValueError(f"hb_interval is {self.hb_interval!r}; want seconds, more than 0 and finite")
        if not is_seconds(self.stall_timeout_s) and self.stall_timeout_s != math.inf:
            raise ValueError(f"stall_timeout_s is {self.stall_timeout_s!r}; want seconds, more than 0, or math.inf")
        if self.timeout_s is not None and not is_seconds(self.timeout_s):
            raise ValueError(f"timeout_s is {self.timeout_s!r}; want seconds, more than 0, or None for no limit")
        if not is_int(self.max_failures) or self.max_failures < 0:
            raise ValueError(f"max_failures is {self.max_failures!r}; want how often to restart, at least 0")
        least, asked = self.min_world_size, self.world_size
        if least is not None and (not is_int(least) or least < 1 or (asked is not None and least > asked)):
            most = f" and at most world_size, {asked}" if asked is not None else ""
            raise ValueError(f"min_world_size is {least!r}; want a number of ranks, at least 1{most}, or None")

    def _check_texts(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise ValueError(f"name is {self.name!r}; want a str, or None for the function's name")
        if self.run_dir is not None and not isinstance(self.run_dir, (str, os.PathLike)):
            raise ValueError(f"run_dir is {self.run_dir!r}; want the path or URL of a folder, or None to keep nothing")
        if not isinstance(self.description, str):
            raise ValueError(f"description is {self.description!r}; want a str")

    def gradient_changes(self) -> str:
        """Return the settings that change gradients or rates, as in a call; "" without one."""
        changes = {
            "gradient_compression": self.gradient_compression,
            "reduction": self.reduction if self.reduction != "mean" else None,
            "lr_scaling": self.lr_scaling,
        }
        return ", ".join(f"{name}={value!r}" for name, value in changes.items() if value is not None)


def is_module(value: object) -> bool:
    """Return whether ``value`` is an instance of torch.nn.Module."""
    # By name: a driver does not import torch for this.
    return any(
        (kind.__module__, kind.__name__) == ("torch.nn.modules.module", "Module") for kind in type(value).__mro__
    )
