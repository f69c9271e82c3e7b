"""``stack_dump``: a stack says what an exchange is for."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

import lagom
from lagom.on_rank import stack_dump

ROOT = Path(lagom.__file__).parent


@pytest.mark.parametrize(
    ("file", "purpose"),
    [
        ("extensions/zero/optimizer_group.py", "state that is shared out"),
        ("forward/rows/whole_batch.py", "outputs of a forward"),
        ("forward/batchnorm.py", "BatchNorm's statistics"),
        ("forward/batchnorm_arithmetic.py", "BatchNorm's statistics"),
        ("gradients/buffers.py", "buffers"),
        ("gradients/gradient_averager.py", "gradients"),
        ("gradients/autograd_grad.py", "gradients"),
        ("batches/sampler_sync.py", "the order of a data loader"),
        ("batches/self_sharded.py", "sizes of batches"),
        ("distributed/init_process_group.py", "init_process_group"),
        ("gradients/divergence.py", "where each rank is"),
        ("session/session.py", ""),
    ],
)
def test_an_exchange_is_named_by_the_file_that_asks_for_it(file: str, purpose: str) -> None:
    assert (ROOT / file).is_file()
    frames: list[types.FrameType] = []
    exec(compile("frames.append(frame())", str(ROOT / file), "exec"), {"frames": frames, "frame": sys._getframe})
    # sys._getframe() called from there gives the frame of the compiled code.
    assert stack_dump.doing(frames[0]).purpose == purpose
