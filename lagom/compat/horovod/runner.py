"""``HorovodRunner`` and ``run``: a function written for Horovod, on the ranks of a lagom run."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError
from lagom.world import place_in_run

Launcher = Literal["auto", "spark", "local"]


class HorovodRunner:
    """Databricks' runner, by its interface.

    Args:
        np: number of ranks. On the Spark cluster where a session is active, else on this machine; 0: all task slots.
            A negative number: so many ranks on the driver's machine.
        driver_log_verbosity: whose output is shown as it comes: "all", or "log_callback_only", which is rank 0's here.

    Raises:
        ValueError: for anything else.
    """

    def __init__(self, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if not isinstance(np, int) or isinstance(np, bool):
            raise ValueError(f"HorovodRunner(np={np!r}); want the number of processes, negative for the driver's own")
        if driver_log_verbosity not in ("all", "log_callback_only"):
            raise ValueError(f"driver_log_verbosity is {driver_log_verbosity!r}; want 'all' or 'log_callback_only'")
        if np == 0:
            warnings.warn(
                "HorovodRunner(np=0) takes all task slots of the cluster, and is deprecated: how many there are "
                "depends on which executors have registered. Set np to the number of processes you need.",
                FutureWarning,
                stacklevel=2,
            )
        self.num_processor = np
        self.driver_log_verbosity = driver_log_verbosity

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` on every rank; returns what rank 0's returned."""
        log: Literal["all", "rank0"] = "all" if self.driver_log_verbosity == "all" else "rank0"
        launcher: Launcher = "local" if self.num_processor < 0 else "auto"
        return _values(main, (), kwargs, abs(self.num_processor) or None, launcher, log)[0]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """``fn(*args, **kwargs)`` on every rank, as ``horovod.spark.run`` does; what each returned, in rank order.

    Args:
        num_proc: number of ranks; one for each task slot if not given.
        env: variables that ranks find in their environment.
        verbose: 0: nothing; 1: rank 0's output is shown as it comes; 2: every rank's.

    Raises:
        NotImplementedError: for what has no counterpart here, by its name.
    """
    del start_timeout, use_gloo, prefix_output_with_timestamp, nics
    _refuse(use_mpi=use_mpi, extra_mpi_args=extra_mpi_args, stdout=stdout, stderr=stderr, executable=executable)
    return _values(fn, args, kwargs or {}, num_proc, "auto", "all" if verbose > 1 else "rank0", env)


def local_run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    hosts: str | None = None,
    np: int | None = None,
    verbose: int | None = None,
    **others: Any,
) -> list[Any]:
    """``func(*args, **kwargs)`` on ranks of this machine, as ``horovod.run`` does; what each returned, in order."""
    _refuse(**{name: value for name, value in others.items() if name not in _WITHOUT_EFFECT})
    for host in (hosts or "localhost").split(","):
        if (name := host.partition(":")[0]) not in ("localhost", "127.0.0.1", socket.gethostname()):
            raise NotImplementedError(
                f"horovod.run(hosts={hosts!r}): {name} is another machine; use horovod.spark.run with a SparkSession"
            )
    return _values(func, args, kwargs or {}, num_proc or np or 1, "local", "all" if verbose else "rank0")


_WITHOUT_EFFECT = ("use_gloo", "start_timeout", "disable_cache", "network_interface", "network_interfaces", "slots")


def _refuse(**settings: Any) -> None:
    for name, value in settings.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}={value!r} is not served by lagom; leave it out (docs/horovod.md)")


@dataclass(frozen=True, eq=False)
class _Returned:
    """Keeps what ranks return from being compared and averaged: Horovod hands out each rank's own."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Returned)

    __hash__ = None  # type: ignore[assignment]


def _call(main: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], env: dict[str, str]) -> _Returned:
    os.environ.update(env)
    return _Returned(main(*given, **named))


def _values(
    main: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num: int | None,
    launcher: Launcher,
    log: Literal["all", "rank0"],
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    if not callable(main):
        raise ValueError(f"{main!r} was given to be run on the ranks; want the function itself")
    if (place := place_in_run()) is not None and place.world_size > 1:
        raise LagomError(f"a run was begun on rank {place.rank} of another; call the function itself there")
    config = TorchDistributedConfig(
        # Among the parameters of the run, where it is told from a function's code that it is distributed by itself.
        hparams={"main": main, "given": tuple(args), "named": dict(kwargs), "env": dict(env or {})},
        world_size=num,
        launcher=launcher,
        log=log,
        timeline={**os.environ, **(env or {})}.get("HOROVOD_TIMELINE") or False,
        name=getattr(main, "__name__", "horovod"),
    )
    return [each.value for each in experiment.lagom(_call, config).per_rank]
