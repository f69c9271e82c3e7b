"""Shared by benchmarks: a Spark session and a call of TorchDistributor, both without their output."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession


@contextlib.contextmanager
def spark(master: str) -> Iterator[SparkSession]:
    """Open a Spark session on ``master`` that prints only errors."""
    logging.getLogger("lagom").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    # Otherwise Spark starts python3 from PATH, which may have no torch.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", False)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def torch_distributor(function: Callable[..., Any], *args: object, world_size: int, local_mode: bool) -> Any:
    """Run ``function(*args)`` on ranks of pyspark's TorchDistributor, and return the value of one of them."""
    distributor = TorchDistributor(num_processes=world_size, local_mode=local_mode, use_gpu=False)
    distributor.logger.setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        return distributor.run(function, *args)
