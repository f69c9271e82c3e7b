"""GPUs of CUDA_VISIBLE_DEVICES and devices that torch lists; tests/driver/test_local.py has those of nvidia-smi."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lagom import cluster
from tests.fake_accelerator import plugin
from tests.sources import ROOT


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ("-1", ()),
        (" -1 ", ()),
        ("0,-1,1", ("0",)),
        ("NoDevFiles", ()),
        ("none", ()),
        ("3,,4", ("3",)),
        (",3", ()),
        ("3, 4,", ("3", "4")),
        ("GPU-1f,GPU-2f", ("GPU-1f", "GPU-2f")),
        ("MIG-a/1/0, -1, MIG-b", ("MIG-a/1/0",)),
    ],
)
def test_devices_from_the_first_invalid_one_on_are_not_visible(
    mask: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert cluster.visible_gpus() == names


def listed(folder: Path, mask: str = "", **settings: str) -> tuple[list[str], str]:
    """Return ``visible_devices()`` of a new Python, and the log, where ``folder`` is on the path."""
    text = "import json; from lagom import cluster; print(json.dumps(cluster.visible_devices()))"
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    found = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": mask, **settings}
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=found, check=True)
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


def test_devices_of_a_package_are_taken_before_nvidias_and_that_is_told(tmp_path: Path) -> None:
    """As torch itself takes them, which has one kind of accelerator in a process."""
    folder = plugin(tmp_path)
    (folder / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "version = m.version\n"
        "m.version = lambda name: '2.13.0+cu130' if name == 'torch' else version(name)\n"
    )
    assert listed(folder) == (["hpu:0", "hpu:1"], "")
    devices, log = listed(folder, mask="0,1")
    assert devices == ["hpu:0", "hpu:1"]
    assert log.startswith(
        "lagom: this machine has NVIDIA's GPUs and 'hpu' devices: torch's accelerator is 'hpu', so ranks train on "
        "these; set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    )
    devices, log = listed(folder, mask="0,1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (devices, log) == (["0", "1"], "")


def test_a_package_that_fails_when_torch_loads_it_is_told(tmp_path: Path) -> None:
    folder = plugin(tmp_path)
    (folder / "fake_maker.py").write_text("def load():\n    raise RuntimeError('no driver of the maker')\n")
    devices, log = listed(folder)
    assert devices == []
    assert "a new Python with torch could not list this machine's accelerators (RuntimeError: Failed to load" in log
    assert "so ranks do not use them" in log
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in log
