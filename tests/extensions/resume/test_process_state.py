"""Settings of the process that go with a snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lagom.extensions.resume.process_state import first_settings, process_state, set_process_state


@pytest.mark.parametrize("place", ["run/sub", "run", "elsewhere"])
def test_the_working_directory_goes_on_in_that_of_the_new_attempt(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run/sub", "again/sub", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run")
    first = first_settings()
    monkeypatch.chdir(tmp_path / place)
    state = process_state(first)
    monkeypatch.chdir(tmp_path / "again")
    set_process_state(state, first_settings())
    assert Path.cwd() == tmp_path / place.replace("run", "again")


def test_autocast_goes_on_where_torch_has_the_kind_of_device() -> None:
    """A snapshot of a machine with an accelerator is resumed on one without."""
    first = first_settings()
    state = process_state(first)
    assert "cpu" in state["autocast"]
    there = {"cpu": (True, torch.bfloat16), "a kind that is not here": (True, torch.float16)}
    try:
        set_process_state({**state, "autocast": there}, first)
        assert torch.is_autocast_enabled("cpu")
    finally:
        set_process_state(state, first)
    assert not torch.is_autocast_enabled("cpu")
