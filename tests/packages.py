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


def python_with_packages(config: pytest.Config) -> str:
    """The Python that has them, made once, in pytest's cache; ``LAGOM_TEST_PACKAGES`` names that of another one.

    torch, and all else that the project needs, is what this Python has.
    """
    if given := os.environ.get("LAGOM_TEST_PACKAGES"):
        return given
    wanted = _REQUIREMENTS.read_text() + sys.version + torch.__version__ + sys.prefix
    folder = config.cache.mkdir("packages-" + hashlib.sha256(wanted.encode()).hexdigest()[:12])
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        faulthandler.cancel_dump_traceback_later()  # which would end the tests after two minutes
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "project.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        pinned = f"torch=={torch.__version__.partition('+')[0]}"
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", _REQUIREMENTS, pinned], check=True)
        (folder / "ready").touch()
    return str(python)
