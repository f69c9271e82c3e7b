"""The GPUs of CUDA_VISIBLE_DEVICES; those of nvidia-smi are in ``tests/driver/test_local.py``."""

from __future__ import annotations

import importlib.metadata

import pytest

from lagom import cluster


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
