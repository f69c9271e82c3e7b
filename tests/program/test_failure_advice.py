"""``lagom.program.failure_advice``: the program's error stays as it is, and one line below it says what to do."""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.plan import Package
from lagom.program.failure_advice import advice

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes below an error")


def reads_rank() -> str:
    return os.environ["RANK"]


def makes_sampler() -> Any:
    from torch.utils.data.distributed import DistributedSampler

    data: Any = [1, 2, 3]
    return DistributedSampler(data)


def reduces() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def raised(function: Callable[[], Any]) -> Exception:
    """Return the error that ``function`` raises."""
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it has raised nothing")


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (reads_rank, "RANK is not set, since this program starts no process group"),
        (makes_sampler, "drop DistributedSampler, DDP and calls of torch.distributed"),
        (reduces, "or call init_process_group before them"),
    ],
)
def test_half_ported_code_gets_its_own_error_and_one_line(function: Callable[[], Any], wanted: str) -> None:
    plain = raised(function)
    found = raised(lambda: experiment.lagom(function, TorchDistributedConfig(launcher="inline", run_dir=None)))
    assert (type(found), found.args) == (type(plain), plain.args)
    shown = "".join(traceback.format_exception(found))
    last = shown.rstrip().splitlines()[-1]
    assert shown.count("lagom: ") == 1
    assert last.startswith("lagom: ")
    assert wanted in last
    assert advice(plain, (), already_distributed=True) == ""


def test_other_errors_get_no_line() -> None:
    settings: dict[str, int] = {}
    for function in (lambda: settings["RANK"], lambda: os.environ["MY_RANK"], lambda: int("x"), lambda: next(iter(()))):
        assert advice(raised(function), [Package(name="torch")]) == ""
    assert advice(raised(lambda: __import__("no_such_package")), [Package(name="torch")]) == ""


def test_all_packages_that_a_rank_lacks_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The packages are the driver's: the function takes away the rank's way to them."""
    folder = tmp_path / "site-packages"
    for name in ("lacking_a", "lacking_b"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))

    def train(place: str) -> None:
        sys.path[:] = [entry for entry in sys.path if entry != place]
        sys.path_importer_cache.clear()
        import lacking_a  # type: ignore[import-not-found]  # noqa: F401
        import lacking_b.part  # type: ignore[import-not-found]  # noqa: F401

    config = TorchDistributedConfig(launcher="local", world_size=2, run_dir=None, hparams={"place": str(folder)})
    found = raised(lambda: experiment.lagom(train, config))
    assert (type(found), str(found)) == (ModuleNotFoundError, "No module named 'lacking_a'")
    assert "".join(traceback.format_exception(found)).rstrip().splitlines()[-1] == (
        f"lagom: {platform.node()} lacks lacking_a and lacking_b in its Python, {sys.executable}, and the driver has "
        "them: install them there; or send the driver's environment ('lagom pack' makes the archive and prints Spark's "
        "settings); or, for packages without compiled parts, set packages='ship'"
    )
