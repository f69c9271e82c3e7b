"""Pictures that a function shows on a rank, in the notebook that called it."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.notebooks.kernel import Notebook
from tests.packages import python_with_packages

PROGRAM = """
%matplotlib inline
import matplotlib.pyplot as plt
import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig

def train():
    plt.plot([1, 2, 3])
    plt.show()
    plt.figure(figsize=(30, 30), dpi=300).add_subplot().imshow([[lagom.rank(), 1]])
    plt.show()
    plt.plot([3, 2, 1])  # is shown at the end of a cell
    return len(plt.get_fignums())

experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=2)).per_rank
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_what_rank_0_shows_is_seen_and_kept(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    with Notebook(tmp_path, python_with_packages(pytestconfig)) as notebook:
        cell = notebook.run(PROGRAM)
        assert cell.error == ""
        assert cell.value["text/plain"] == "(1, 1)"
        pictures = [base64.b64decode(one["image/png"]) for one in cell.displays if "image/png" in one]
        assert [picture[:8] for picture in pictures] == [b"\x89PNG\r\n\x1a\n"] * 3
        (folder,) = (tmp_path / "runs").iterdir()
        assert [(folder / f"picture-{number}.png").read_bytes() for number in (1, 2, 3)] == pictures
