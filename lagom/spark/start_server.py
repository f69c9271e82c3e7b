"""The command of an executor's fork server: imports lagom from the folder that the workers use, and runs the server."""

import functools
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


def find_spec(root: str, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
    """Find lagom in ``root``, before the finder of an editable installation; as spark/spark_task.py does."""
    if name.partition(".")[0] != "lagom":
        return None
    return importlib.machinery.PathFinder.find_spec(name, [root] if path is None else path)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    sys.meta_path.insert(0, types.SimpleNamespace(find_spec=functools.partial(find_spec, sys.argv[1])))
    from lagom.spark.executor_server import main

    main()
