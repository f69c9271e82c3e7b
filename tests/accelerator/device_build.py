"""Builds the test device's C++ once for each state of its sources and each torch, into build/accelerator."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "csrc"
MODULE = "lagomtest_device"
_OPTIONS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall")
_ENTRY_POINT = "[torch.backends]\nlagomtest = tests.accelerator.device_module:load\n"


def folder() -> Path:
    """Return the folder for the sources as they are: on PYTHONPATH, it is an installed backend of torch's."""
    text = hashlib.sha256(f"{version('torch')} {sys.version} {_OPTIONS} {_ENTRY_POINT}".encode())
    for path in sorted(SOURCES.iterdir()):
        text.update(path.read_bytes())
    return ROOT / "build" / "accelerator" / text.hexdigest()[:16]


def library() -> Path:
    """Return the compiled module, which the first call builds."""
    found = folder() / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not found.exists():
        found.parent.parent.mkdir(parents=True, exist_ok=True)
        with (found.parent.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not found.exists():
                _build(found)
    return found


def can_build() -> bool:
    """Return whether the device is built, or there is a compiler to build it with."""
    return bool(shutil.which(_compiler())) or library_exists()


def library_exists() -> bool:
    """Return whether the device is built."""
    return (folder() / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}").exists()


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _build(target: Path) -> None:
    """Compile all sources, two at a time, and move the finished folder to its place."""
    if not shutil.which(_compiler()):
        raise RuntimeError(f"there is no C++ compiler {_compiler()!r} for the test device; install one, or set CXX")
    spec = find_spec("torch")  # not imported: it would load the device
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    include = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    with tempfile.TemporaryDirectory(dir=target.parent.parent) as made:
        scratch = Path(made)
        waiting = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
        objects = [scratch / f"{source.stem}.o" for source in waiting]
        running: list[subprocess.Popen[str]] = []
        for source, target_object in zip(waiting, objects, strict=True):
            command = [_compiler(), *_OPTIONS, *(f"-isystem{path}" for path in include)]
            running.append(_start([*command, "-c", str(source), "-o", str(target_object)]))
            if len(running) == (os.cpu_count() or 1):
                _finish(running.pop(0))
        for process in running:
            _finish(process)
        package = scratch / "package"
        info = package / "lagomtest-1.0.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: lagomtest\nVersion: 1.0\n")
        info.joinpath("entry_points.txt").write_text(_ENTRY_POINT)
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        _finish(_start([_compiler(), "-shared", *map(str, objects), "-o", str(package / target.name), *libraries]))
        package.rename(target.parent)


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> None:
    _, text = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the test device does not compile:\n{text}")


if __name__ == "__main__":
    print(library())
