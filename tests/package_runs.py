"""Runs of the programs in tests/programs/packages, plainly and on ranks, and the differences between two runs."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tempfile
import time
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).parent / "programs" / "packages"
ROOT = HERE.parents[2]
PROGRAMS = sorted(path.stem for path in HERE.glob("*.py"))
_IN_SINGLE = (
    "best_by_trainer",
    "learner_of_fastai",
    "model_of_keras",
    "policy_of_baselines",
    "sentences_of_transformers",
)
"""Programs whose package computes in float32, wholly or in part."""
_BIAS_BEFORE_BATCHNORM = ("graphs_of_geometric", "loop_of_accelerate")
"""Programs with gradients that are zero but for rounding, which Adam divides by its ``eps`` of 1e-8."""
_LOSS_IN_SINGLE = ("adapter_of_peft",)
"""Programs in float64 whose loss is float32: where it is shared out, its gradient is rounded once more on 3 ranks."""
_TIMES = re.compile(r'^.*(runtime|per_second|real_accelerator).*\n?|"dur": [^,}]*', re.MULTILINE)
"""Matches lines that differ between any two runs."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Run(NamedTuple):
    """The result of a program."""

    code: int
    out: str
    err: str
    files: dict[str, bytes]
    seconds: float


@cache
def executed(python: str, program: str, *options: str, always_sliced: bool = False) -> Run:
    """Run the program, plainly without ``options``, by ``lagom run`` with them, in a folder of its own."""
    script = [str(HERE / f"{program}.py")]
    if always_sliced:
        script.insert(0, str(Path(__file__).parent / "always_sliced.py"))
    command = [python, *(["-m", "lagom.cli", "run", *options] if options else []), *script]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # Checkpoints hold the path of their folder: the same one for all runs.
    folder = Path(tempfile.gettempdir(), f"lagom-program-{os.getpid()}")
    folder.mkdir()
    try:
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
        seconds = time.perf_counter() - start
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    finally:
        shutil.rmtree(folder)
    return Run(done.returncode, done.stdout, done.stderr, files, seconds)


def tolerance(program: str) -> float:
    """Return the relative tolerance of what a program prints and writes.

    float32 has 6e-8; some ten steps of training make rounding of another order of sums about a hundred times as large.
    Programs that round what they print may differ by one in the last digit.
    """
    if program in _IN_SINGLE:
        return 2e-5
    if program in _LOSS_IN_SINGLE:
        return 1e-7
    if program in _BIAS_BEFORE_BATCHNORM:
        return 1e-9
    return 2e-6 if "round(" in (HERE / f"{program}.py").read_text() else 1e-10


def differences(found: Run, wanted: Run, tolerance: float) -> list[str]:
    """List the differences of a run in its output and in the contents of its files."""
    lines = _of_text("the output", found.out, wanted.out, tolerance)
    if found.files.keys() != wanted.files.keys():
        return [*lines, f"the files are {sorted(found.files)}, not {sorted(wanted.files)}"]
    for name, content in wanted.files.items():
        lines += _of_content(name, found.files[name], content, tolerance)
    return lines


def _of_content(name: str, found: bytes, wanted: bytes, tolerance: float) -> list[str]:
    if found == wanted:
        return []
    kind = name.rpartition(".")[2]
    if kind in ("json", "txt", "csv", "yaml"):
        return _of_text(name, found.decode(), wanted.decode(), tolerance)
    if _is_of_torch(wanted) and b"TrainingArguments" not in wanted:
        first, second = (torch.load(io.BytesIO(content), weights_only=False) for content in (found, wanted))
        return _of_values(name, first, second, tolerance)
    if kind == "safetensors":
        return _of_tensors(name, found, wanted, tolerance)
    # Of formats that are not read here (zip archives with times in them, pickles of whole objects) the size.
    return [] if abs(len(found) - len(wanted)) <= len(wanted) // 50 else [f"{name} has {len(found)} bytes"]


def _is_of_torch(content: bytes) -> bool:
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return False
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return any(name.endswith("/data.pkl") for name in archive.namelist())


def _of_tensors(name: str, found: bytes, wanted: bytes, tolerance: float) -> list[str]:
    """Read a safetensors file: 8 bytes with the length of the JSON, the JSON, and numbers."""
    size = int.from_bytes(wanted[:8], "little") + 8
    if found[:size] != wanted[:size] or len(found) != len(wanted):
        return [f"{name} holds other tensors"]
    kind = torch.float64 if b'"F64"' in wanted[:size] else torch.float32
    first, second = (torch.frombuffer(bytearray(content[size:]), dtype=kind) for content in (found, wanted))
    return (
        []
        if torch.allclose(first, second, tolerance, tolerance)
        else [f"{name} is off by {(first - second).abs().max()}"]
    )


def _of_values(name: str, found: Any, wanted: Any, tolerance: float) -> list[str]:
    if isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor):
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return [f"{name} is a tensor {tuple(found.shape)} of {found.dtype}"]
        limit = tolerance * wanted.double().abs().clamp(min=1)
        difference = (found.double() - wanted.double()).abs()
        alike = (difference <= limit) | (found == wanted) | (found.isnan() & wanted.isnan())
        return [] if bool(alike.all()) else [f"{name} is off by {difference[~alike].max()}"]
    if isinstance(found, dict) and isinstance(wanted, dict):
        lines = _of_text(f"the keys of {name}", str(list(found)), str(list(wanted)), tolerance)
        return lines + [
            line for key in found for line in _of_values(f"{name}/{key}", found[key], wanted.get(key), tolerance)
        ]
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        return [
            line for number, (one, other) in pairs for line in _of_values(f"{name}/{number}", one, other, tolerance)
        ]
    return _of_text(name, str(found), str(wanted), tolerance)


def _of_text(name: str, found: str, wanted: str, tolerance: float) -> list[str]:
    found, wanted = _TIMES.sub("", found), _TIMES.sub("", wanted)
    if _NUMBER.sub("#", found) != _NUMBER.sub("#", wanted):
        return [f"{name} is {found!r}, not {wanted!r}"]
    pairs = zip(_NUMBER.findall(found), _NUMBER.findall(wanted), strict=True)
    return [
        f"{name}: {a} instead of {b}" for a, b in pairs if abs(float(a) - float(b)) > tolerance * max(1, abs(float(b)))
    ]
