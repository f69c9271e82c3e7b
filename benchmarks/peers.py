"""What the benchmarks have in common: a quiet Spark session, and TorchDistributor called quietly."""

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
    """A session on ``master`` that prints nothing but errors."""
    logging.getLogger("lagom").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    # Spark starts python3 from PATH otherwise, which need not have torch.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", False)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def torch_distributor(function: Callable[..., Any], *args: object, world_size: int, local_mode: bool) -> Any:
    """What ``function(*args)`` returns on one of the ranks that pyspark's TorchDistributor starts."""
    distributor = TorchDistributor(num_processes=world_size, local_mode=local_mode, use_gpu=False)
    distributor.logger.setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        return distributor.run(function, *args)
