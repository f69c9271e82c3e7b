"""``HorovodRunner`` and ``run``: start a function written for Horovod on the ranks of a lagom run."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError
from lagom.world import place_in_run


class HorovodRunner:
    """Runs a Horovod function on ranks of lagom, with the interface of Databricks' ``HorovodRunner``.

    Args:
        np: number of ranks, on the Spark cluster where a session is active, else on this machine. 0 takes all task
            slots; a negative number starts as many ranks on the driver's machine.
        driver_log_verbosity: "all" shows the output of all ranks, "log_callback_only" that of rank 0.

    Raises:
        ValueError: for other values.
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
        """Call ``main(**kwargs)`` on every rank and return the value of rank 0.

        Raises:
            ValueError: if ``main`` is not callable.
            LagomError: on a rank of a run on several ranks.
            Exception: as ``experiment.lagom``.
        """
        launcher: Literal["auto", "local"] = "local" if self.num_processor < 0 else "auto"
        shows_all = self.driver_log_verbosity == "all"
        return _call_on_ranks(main, (), kwargs, abs(self.num_processor) or None, launcher, shows_all)[0]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    verbose: int = 1,
    **others: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank, like ``horovod.spark.run``; return all values in rank order.

    Args:
        num_proc: number of ranks; one for each task slot if not given.
        env: environment variables for the ranks.
        verbose: above 1 shows the output of all ranks, otherwise that of rank 0.

    Raises:
        NotImplementedError: for a setting that lagom does not serve.
        Exception: as ``HorovodRunner.run``.
    """
    _refuse(others)
    return _call_on_ranks(fn, args, kwargs or {}, num_proc, "auto", verbose > 1, env)


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
    """Call ``func(*args, **kwargs)`` on ranks of this machine, like ``horovod.run``; return all values in order.

    Args:
        num_proc: number of ranks, as ``np``; 1 if neither is given.
        verbose: whether to show the output of all ranks, and not only that of rank 0.

    Raises:
        NotImplementedError: for a setting that lagom does not serve, such as another machine in ``hosts``.
        Exception: as ``HorovodRunner.run``.
    """
    _refuse(others)
    for host in (hosts or "localhost").split(","):
        if (name := host.partition(":")[0]) not in ("localhost", "127.0.0.1", socket.gethostname()):
            raise NotImplementedError(
                f"horovod.run(hosts={hosts!r}): {name} is another machine; use horovod.spark.run with a SparkSession"
            )
    return _call_on_ranks(func, args, kwargs or {}, num_proc or np or 1, "local", bool(verbose))


def log_to_driver(message: object) -> None:
    """Print at most 4000 characters. The driver shows the output of rank 0; with log="all" that of all ranks."""
    sys.stdout.write(str(message)[:4000] + "\n")
    sys.stdout.flush()


_WITHOUT_EFFECT = (
    "disable_cache",
    "network_interface",
    "network_interfaces",
    "nics",
    "prefix_output_with_timestamp",
    "slots",
    "start_timeout",
    "use_gloo",
)


def _refuse(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if value is not None and value is not False and name not in _WITHOUT_EFFECT:
            raise NotImplementedError(f"{name}={value!r} is not served by lagom; leave it out (docs/horovod.md)")


@dataclass(frozen=True, eq=False)
class _Returned:
    """Wraps a rank's return value, since lagom would compare and average the values themselves."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Returned)

    __hash__ = None  # type: ignore[assignment]


def _call(main: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], env: dict[str, str]) -> _Returned:
    os.environ.update(env)
    return _Returned(main(*given, **named))


def _call_on_ranks(
    main: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    world_size: int | None,
    launcher: Literal["auto", "local"],
    shows_all: bool,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    if not callable(main):
        raise ValueError(f"{main!r} was given to be run on the ranks; want the function itself")
    if (place := place_in_run()) is not None and place.world_size > 1:
        raise LagomError(f"a run was begun on rank {place.rank} of another; call the function itself there")
    config = TorchDistributedConfig(
        # Passed as parameters of the run, where lagom looks for functions that are distributed already.
        hparams={"main": main, "given": tuple(args), "named": dict(kwargs), "env": dict(env or {})},
        world_size=world_size,
        launcher=launcher,
        log="all" if shows_all else "rank0",
        timeline={**os.environ, **(env or {})}.get("HOROVOD_TIMELINE") or False,
        name=getattr(main, "__name__", "horovod"),
    )
    return [each.value for each in experiment.lagom(_call, config).per_rank]
