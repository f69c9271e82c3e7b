"""An extension is a folder and a line of ``lagom/extensions/registry.py``."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lagom.config import torch_distributed
from lagom.extensions import registry

LINE = "from counted_zeros import Zeros\n"
FOLDER = '''
from dataclasses import dataclass

from lagom.extension import Extension, Settings


@dataclass(frozen=True, kw_only=True, eq=False)
class ZerosSettings(Settings):
    """Fields of the config for counting zeros."""

    title = "Zeros"

    count_zeros: bool = False
    """Counts zeros."""

    @staticmethod
    def check(config):
        """See ``Settings``."""
        if config.count_zeros == "yes":
            raise ValueError("count_zeros is 'yes'; want True or False")


class Zeros(Extension):
    """Counts zeros."""

    name = "zeros"
    settings = ZerosSettings
'''


def test_one_import_line_registers_an_extension_and_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs and the command line know extensions by ``EXTENSIONS`` alone."""
    path = tmp_path / "counted_zeros.py"
    path.write_text(FOLDER)
    _executed("counted_zeros", str(path), FOLDER, monkeypatch)
    before, end, after = Path(registry.__file__).read_text().partition("# isort: on\n")
    assert end
    added = _executed("lagom.extensions.registry", registry.__file__, before + LINE + end + after, monkeypatch)
    assert [each.name for each in added.EXTENSIONS] == [*(each.name for each in registry.EXTENSIONS), "zeros"]
    config = _executed("config", torch_distributed.__file__, Path(torch_distributed.__file__).read_text(), monkeypatch)
    assert config.TorchDistributedConfig(count_zeros=True, seed=1).count_zeros
    assert "\nZeros:\n    count_zeros: Counts zeros." in config.TorchDistributedConfig.__doc__
    with pytest.raises(ValueError, match="want True or False"):
        config.TorchDistributedConfig(count_zeros="yes")


def _executed(name: str, path: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module with ``text``, which stands in for the module ``name`` until the test ends."""
    module = types.ModuleType(name)
    module.__file__ = path
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(text, path, "exec"), vars(module))
    return module


def test_extensions_come_in_the_order_of_their_lines() -> None:
    lines = Path(registry.__file__).read_text().partition("# isort: off\n")[2].partition("# isort: on\n")[0]
    folders = [line.split()[1].rpartition(".")[2] for line in lines.splitlines()]
    assert [each.name for each in registry.EXTENSIONS] == folders
