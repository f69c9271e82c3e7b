"""``load`` and ``settings``: import DeepSpeed without its output, and configure it for a loop of one process."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lagom.errors import LagomError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

REMEDY = "pip install 'lagom-spark[deepspeed]' on the driver and on every executor, or use backend='torch'"
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")


def settings(config: Mapping[str, Any] | None, zero_lvl: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return DeepSpeed's configuration: the user's, with ``zero_lvl`` as stage and defaults for an unmodified loop.

    Without ``gradient_accumulation_steps``, gradients accumulate until the program steps.

    Args:
        config: ``deepspeed_config`` of the run.
        say: shows a line to the user, if ``config`` names another stage.
    """
    merged = copy.deepcopy(dict(config or {}))
    zero = dict(merged.get("zero_optimization") or {})
    if zero.get("stage", zero_lvl) != zero_lvl:
        say(f"deepspeed_config asks for stage {zero['stage']} and zero_lvl is {zero_lvl}, which counts")
    merged["zero_optimization"] = zero | {"stage": zero_lvl}
    for key in (*_BATCH_KEYS, "gradient_accumulation_steps"):
        if merged.get(key) == "auto":
            del merged[key]
    if "gradient_accumulation_steps" not in merged and zero_lvl:
        # Not at level 0: there each backward averages the whole accumulated gradient, which is right as it is: the part
        # that is averaged already does not change.
        merged.setdefault("managed_gradient_accumulation", False)
    if not any(key in merged for key in _BATCH_KEYS):
        merged["train_micro_batch_size_per_gpu"] = 1  # only for DeepSpeed's reports: the program makes loaders
    # lagom tests optimizers itself, with probe_optimizer.
    merged.setdefault("zero_allow_untested_optimizer", True)
    merged.setdefault("zero_force_ds_cpu_optimizer", False)
    merged.setdefault("steps_per_print", 1 << 60)
    merged.setdefault("gradient_clipping", 0.0)  # DeepSpeed's default is 1
    return merged


@contextmanager
def unimportable(name: str) -> Iterator[None]:
    """Make imports of the package ``name`` fail in the context, unless it is imported already.

    DeepSpeed's autotuner imports MLflow if it is installed, which takes longer than all of DeepSpeed.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def load(device: str) -> Any:
    """Import DeepSpeed for a kind of device, such as "cpu", restore what the import changes, and return it.

    The import changes the environment, and whether torch.distributions check their arguments: torch's compiler, which
    DeepSpeed imports, turns these checks off for the whole process.

    Raises:
        LagomError: if DeepSpeed is not installed, or its import fails.
    """
    from torch.distributions import Distribution

    checks_arguments = Distribution._validate_args
    wanted = {"DS_ACCELERATOR": device, "DS_LOG_LEVEL": "warning"}
    with environment(**(wanted | {key: os.environ[key] for key in wanted if key in os.environ})):
        try:
            with _quietly(), warnings.catch_warnings(), unimportable("mlflow"):
                warnings.simplefilter("ignore")
                import deepspeed

                # Else the first engine would import this module, and torch's compiler, which turns the checks off.
                import deepspeed.runtime.zero.muon.muon_optimizer
        except ImportError as error:
            raise LagomError(
                f"backend='deepspeed' needs DeepSpeed, which does not import: {error}; {REMEDY}"
            ) from error
    Distribution.set_default_validate_args(checks_arguments)
    deepspeed.utils.logger.setLevel("WARNING")
    return deepspeed


def check_nvme(config: Mapping[str, Any]) -> None:
    """Check at once that DeepSpeed can build its op for NVMe, if ``config`` offloads there.

    Raises:
        LagomError: if DeepSpeed cannot build the op on this machine.
    """
    zero = config["zero_optimization"]
    asks = [name for name in ("offload_optimizer", "offload_param") if (zero.get(name) or {}).get("device") == "nvme"]
    if not asks:
        return
    from deepspeed.accelerator import get_accelerator

    with _quietly():
        builder = get_accelerator().create_op_builder("AsyncIOBuilder")
        able = builder is not None and builder.is_compatible(verbose=False)
    if not able:
        raise LagomError(
            f"deepspeed_config asks for NVMe ({', '.join(asks)}), whose op DeepSpeed cannot build here: it needs a C++ "
            "compiler, and libaio with its headers (libaio-dev or libaio-devel), on every executor; offload to 'cpu' "
            "instead"
        )


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for the length of a block, then restore the whole environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def as_imported(module: ModuleType) -> Iterator[None]:
    """Restore the dicts and Nones among the globals of ``module`` after a block.

    DeepSpeed caches process groups there, which would be invalid in the next run of this process.
    """
    kept = {name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, (dict, type(None)))}
    try:
        yield
    finally:
        vars(module).update({name: value for name, value in kept.items() if not name.startswith("__")})


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set one environment variable for the length of a block, and restore only that one."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextmanager
def _quietly() -> Iterator[None]:
    """Send standard error to /dev/null: DeepSpeed's import runs compilers to look for libraries, and they complain."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
