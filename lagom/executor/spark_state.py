"""``SparkState``: what pyspark tells the program of a task, carried from the Python worker to the ranks."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkState:
    """State of pyspark in a task's Python worker."""

    files: str
    """Folder of the files of ``SparkContext.addFile``."""
    context: bytes
    """Pickled ``TaskContext``: unpickling imports pyspark, which most programs do not need."""

    @classmethod
    def of_worker(cls) -> SparkState:
        """Return the state in this Python worker."""
        from pyspark import SparkFiles, TaskContext

        return cls(files=SparkFiles.getRootDirectory(), context=pickle.dumps(TaskContext.get()))

    def restore(self, pyspark: ModuleType) -> None:
        """Have ``SparkFiles`` and ``TaskContext`` of ``pyspark`` answer as in the worker."""
        pyspark.SparkFiles._root_directory = self.files
        pyspark.SparkFiles._is_running_on_worker = True
        pyspark.TaskContext._setTaskContext(pickle.loads(self.context))
