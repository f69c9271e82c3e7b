"""An environment with packages that the project does not need, for tests that are run on request."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

_REQUIREMENTS = Path(__file__).parent / "programs" / "packages" / "requirements.txt"
_CONSTRAINTS = _REQUIREMENTS.with_name("constraints.txt")


def python_with_packages(config: pytest.Config) -> str:
    """Return the Python that has them, made once, in pytest's cache; ``LAGOM_TEST_PACKAGES`` names another one.

    torch, and all else that the project needs, is what this Python has.
    """
    if given := os.environ.get("LAGOM_TEST_PACKAGES"):
        return given
    faulthandler.cancel_dump_traceback_later()  # which would end the tests after two minutes
    return str(environment(config.cache.mkdir("packages-" + fingerprint())))


def fingerprint() -> str:
    """Return a hash of all that decides the packages, Python and torch included; it names the environment."""
    pins = _REQUIREMENTS.read_text() + _CONSTRAINTS.read_text()
    wanted = pins + Path(__file__).read_text() + sys.version + torch.__version__ + sys.prefix
    return hashlib.sha256(wanted.encode()).hexdigest()[:12]


def environment(folder: Path) -> Path:
    """Make the environment in ``folder`` unless it is there; return its Python."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "project.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        pinned = f"torch=={torch.__version__.partition('+')[0]}"
        pip: list[str | Path] = [python, "-m", "pip", "install", "-q", "-c", _CONSTRAINTS]
        subprocess.run([*pip, "-r", _REQUIREMENTS, pinned], check=True)
        if subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode:
            _stand_in_for_cuda(site)
        (folder / "ready").touch()
    return python


def _stand_in_for_cuda(site: Path) -> None:
    """Let the registry's torchvision, which is built for CUDA alone, load beside a torch without CUDA.

    Its operators for CPUs work. Those for CUDA name functions of two libraries that such a torch lacks: give it
    libraries by these names with functions that end the process, and load them before it.
    """
    listed: list[str | Path] = ["nm", "-D", "--undefined-only", site / "torchvision" / "_C.so"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    functions = [
        f"void {name}(void) {{ __builtin_trap(); }}" for name in names if name.startswith("_ZN") and "4cuda" in name
    ]
    paths = [site / "torchvision" / library for library in ("libc10_cuda.so", "libtorch_cuda.so")]
    for path, lines in zip(paths, (functions, []), strict=True):
        built: list[str | Path] = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, "-x", "c", "-"]
        subprocess.run(built, input="\n".join(lines), text=True, check=True)
    loaded = "; ".join(f"ctypes.CDLL({str(path)!r})" for path in paths)
    (site / "torchvision_without_cuda.pth").write_text(f"import ctypes; {loaded}\n")
