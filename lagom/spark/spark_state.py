"""``SparkState``: carries pyspark's state of a task (files, ``TaskContext``) from the Python worker to the ranks."""

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
    """Pickled ``TaskContext``, unpickled only if the program imports pyspark, since unpickling imports it."""

    @classmethod
    def of_worker(cls) -> SparkState:
        """Return the state in this Python worker."""
        from pyspark import SparkFiles, TaskContext

        return cls(files=SparkFiles.getRootDirectory(), context=pickle.dumps(TaskContext.get()))

    def restore(self, pyspark: ModuleType) -> None:
        """Set ``SparkFiles`` and ``TaskContext`` of the module ``pyspark`` to the worker's state."""
        pyspark.SparkFiles._root_directory = self.files
        pyspark.SparkFiles._is_running_on_worker = True
        pyspark.TaskContext._setTaskContext(pickle.loads(self.context))
