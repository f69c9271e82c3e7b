"""Programs for packages that the project does not need, in an environment with these: one process against ranks.

One command: pytest -m soak tests/programs/test_packages.py. The environment is made once, in pytest's cache; the
variable LAGOM_TEST_PACKAGES names the Python of another one.
"""

from __future__ import annotations

import faulthandler
import io
import os
import re
import subprocess
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.packages import python_with_packages

HERE = Path(__file__).parent / "packages"
ROOT = HERE.parents[2]
PROGRAMS = sorted(path.stem for path in HERE.glob("*.py"))
SETTINGS = ("default", "split", "whole")
_NO_TRAINING = r"called a model and ran no backward\(\): it was no training.*use batches='whole'"
SAID = {
    ("classifier_of_skorch", "split"): _NO_TRAINING,
    ("engines_of_ignite", "split"): _NO_TRAINING,
    ("engines_of_monai", "split"): _NO_TRAINING,
    ("model_of_keras", "split"): _NO_TRAINING,
    ("private_by_opacus", "split"): r"DivergenceError: the parameter .* no longer has the same values on all ranks",
}
"""The error where a setting is not for a program, by program and setting."""
TOLERANCE = 2e-5
"""Relative, of float32, which keras and transformers compute in; the programs round what they print."""
_TIMES = re.compile(r'^.*(runtime|per_second|real_accelerator).*\n?|"dur": [^,}]*', re.MULTILINE)
"""Matches lines that differ between any two runs."""
_LOSS = re.compile(r"""(['"])(train_loss|loss|total_flos)\1: ['"]?[\d.]+""")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class Run(NamedTuple):
    """The result of a program."""

    code: int
    out: str
    err: str
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def python(pytestconfig: pytest.Config) -> str:
    """The Python that has the packages."""
    return python_with_packages(pytestconfig)


@cache
def executed(python: str, program: str, *options: str) -> Run:
    """The program, plainly without ``options``, by ``lagom run`` with them, in a folder of its own."""
    command = [python, *(["-m", "lagom.cli", "run", *options] if options else []), str(HERE / f"{program}.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return Run(done.returncode, done.stdout, done.stderr, files)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks_give_what_one_process_gives_or_say_why_not(
    python: str, program: str, num_ranks: int, setting: str
) -> None:
    faulthandler.cancel_dump_traceback_later()  # which would end the tests after two minutes
    plain = executed(python, program)
    assert plain.code == 0, plain.err
    options = [] if setting == "default" else ["--batches", setting]
    run = executed(python, program, "-n", str(num_ranks), *options)
    if (program, setting) in SAID:
        assert run.code != 0
        assert re.search(SAID[program, setting], run.err), run.err
        return
    assert run.code == 0, run.err
    if setting == "split":
        run, plain = without_running_losses(run), without_running_losses(plain)
    assert differences(run, plain) == []


def without_running_losses(run: Run) -> Run:
    """A run without the training losses that it tells, which are those of rank 0's share, as docs/batches.md says."""
    texts = {
        name: _LOSS.sub("", content.decode()).encode() for name, content in run.files.items() if name.endswith(".json")
    }
    return run._replace(out=_LOSS.sub("", run.out), files=run.files | texts)


def differences(found: Run, wanted: Run) -> list[str]:
    """List the differences of a run in its output and in the contents of its files."""
    lines = _of_text("the output", found.out, wanted.out)
    if found.files.keys() != wanted.files.keys():
        return [*lines, f"the files are {sorted(found.files)}, not {sorted(wanted.files)}"]
    for name, content in wanted.files.items():
        lines += _of_content(name, found.files[name], content)
    return lines


def _of_content(name: str, found: bytes, wanted: bytes) -> list[str]:
    if found == wanted:
        return []
    kind = name.rpartition(".")[2]
    if kind in ("json", "txt"):
        return _of_text(name, found.decode(), wanted.decode())
    if kind in ("pt", "pth") and zipfile.is_zipfile(io.BytesIO(wanted)) and b"TrainingArguments" not in wanted:
        first, second = (torch.load(io.BytesIO(content), weights_only=False) for content in (found, wanted))
        return _of_text(name, _shown(first), _shown(second))
    if kind == "safetensors":
        return _of_tensors(name, found, wanted)
    # Of formats that are not read here (zip archives with times in them, pickles of whole objects) the size.
    return [] if abs(len(found) - len(wanted)) <= len(wanted) // 50 else [f"{name} has {len(found)} bytes"]


def _of_tensors(name: str, found: bytes, wanted: bytes) -> list[str]:
    """Read a safetensors file: 8 bytes with the length of the JSON, the JSON, and numbers."""
    size = int.from_bytes(wanted[:8], "little") + 8
    if found[:size] != wanted[:size] or len(found) != len(wanted):
        return [f"{name} holds other tensors"]
    kind = torch.float64 if b'"F64"' in wanted[:size] else torch.float32
    first, second = (torch.frombuffer(bytearray(content[size:]), dtype=kind) for content in (found, wanted))
    return (
        []
        if torch.allclose(first, second, TOLERANCE, TOLERANCE)
        else [f"{name} is off by {(first - second).abs().max()}"]
    )


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.flatten().tolist())
    if isinstance(value, dict):
        return " ".join(f"{key}: {_shown(item)}" for key, item in value.items())
    return " ".join(map(_shown, value)) if isinstance(value, (list, tuple)) else str(value)


def _of_text(name: str, found: str, wanted: str) -> list[str]:
    found, wanted = _TIMES.sub("", found), _TIMES.sub("", wanted)
    if _NUMBER.sub("#", found) != _NUMBER.sub("#", wanted):
        return [f"{name} is {found!r}, not {wanted!r}"]
    pairs = zip(_NUMBER.findall(found), _NUMBER.findall(wanted), strict=True)
    return [
        f"{name}: {a} instead of {b}" for a, b in pairs if abs(float(a) - float(b)) > TOLERANCE * max(1, abs(float(b)))
    ]
