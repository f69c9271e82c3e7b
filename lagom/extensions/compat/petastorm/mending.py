"""Changes to petastorm's modules once they have run: sharding in a lagom run, Spark jobs, processes and pickles."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from . import travel
from .finder import view


def mend(module: ModuleType) -> None:
    """Apply the changes to ``module`` of petastorm, which has just run."""
    for change in _CHANGES.get(module.__name__, ()):
        change(module)


def _place() -> Any:
    """Return this process's place in a lagom run that shards the program's data; None elsewhere."""
    world = sys.modules.get("lagom.world")
    place = None if world is None else world.place_in_run()
    if place is None or place.world_size == 1:
        return None
    distributed = sys.modules.get("torch.distributed")
    # A program that is distributed already shards by itself.
    return None if distributed is not None and distributed.is_initialized() else place


def _shard_readers(module: Any) -> None:
    """Let readers give each rank its row groups, unless the program chooses a shard or every rank has whole batches."""
    for name in ("make_reader", "make_batch_reader"):
        setattr(module, name, _shard(getattr(module, name)))


def _shard(make: Any) -> Any:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        place = _place()
        if place is not None and place.divides_batches:
            given = signature.bind_partial(*args, **options).arguments
            if given.get("cur_shard") is None and given.get("shard_count") is None:
                options |= {"cur_shard": place.rank, "shard_count": place.world_size}
        return make(*args, **options)

    return made


def _weigh_batches(module: Any) -> None:
    """Weight batches of petastorm's loaders like those of a data set that shards itself."""
    for kind in (module.LoaderBase, module.InMemBatchedDataLoader):
        kind.__iter__ = _weigh(kind.__iter__)


def _weigh(plain: Any) -> Any:
    @functools.wraps(plain)
    def iterated(self: Any) -> Any:
        batches = plain(self)
        return batches if _place() is None else iter(_loader(batches))

    return iterated


def _loader(batches: Any) -> Any:
    from torch.utils.data import DataLoader, IterableDataset

    class Shard(IterableDataset[Any]):
        """One pass over a loader of petastorm."""

        lagom_sharded = True

        def __iter__(self) -> Any:
            return batches

    return DataLoader(Shard(), batch_size=None, collate_fn=lambda batch: batch)


def _ship_to_executors(module: Any) -> None:
    """Let Spark's executors import petastorm through this package: they run functions that refer to it."""
    name, parameter = _JOBS[module.__name__]
    plain = getattr(module, name)
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def shipping(*args: Any, **options: Any) -> Any:
        spark = signature.bind(*args, **options).arguments[parameter]
        travel.ship(getattr(spark, "sparkContext", spark))
        return plain(*args, **options)

    setattr(module, name, shipping)


_JOBS = {
    "petastorm.etl.dataset_metadata": ("_init_spark", "spark"),
    "petastorm.etl.rowgroup_indexing": ("build_rowgroup_index", "spark_context"),
    "petastorm.spark_utils": ("dataset_as_rdd", "spark_session"),
}
"""For each module, the function that runs or precedes a Spark job, and its argument for the session or context."""


def _start_processes(module: Any) -> None:
    """Let pool processes, which are new interpreters, import petastorm through this package."""

    def popen(args: list[str], executable: str) -> Any:
        path = os.pathsep.join(filter(None, [travel.archive(), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(args, executable=executable, env={**os.environ, "PYTHONPATH": path})

    module.subprocess = SimpleNamespace(Popen=popen)


_BUILTINS = ("object", "set", "frozenset", "list", "dict", "tuple", "int", "float", "complex", "bool", "str", "bytes")
_SCHEMAS = ("petastorm.unischema", "petastorm.codecs", "petastorm.etl.rowgroup_indexers")
_OTHERS = (
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("decimal", "Decimal"),
    ("copyreg", "_reconstructor"),
    ("copy_reg", "_reconstructor"),
    ("pyspark.serializers", "_restore"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
)


def _open_only_schemas(module: Any) -> None:
    """Restrict pickles of data sets to the parts of schemas and indexes; petastorm admits all builtins."""
    import numpy as np

    kind = module.RestrictedUnpickler
    plain = kind.find_class

    def find_class(self: Any, package: str, name: str) -> Any:
        if package == "numpy":
            cls = getattr(view("numpy"), name, None)
            if cls is bool:
                cls = np.bool_
            if isinstance(cls, type) and (cls is np.dtype or issubclass(cls, np.generic)):
                return cls
        elif (
            (package in ("builtins", "__builtin__") and name in _BUILTINS)
            or (package == "pyspark.sql.types" and name.endswith("Type") and name.isidentifier())
            or (package, name) in _OTHERS
        ):
            return plain(self, package, name)
        elif package in _SCHEMAS and name.isidentifier():
            cls = plain(self, package, name)
            if isinstance(cls, type) and cls.__module__ == package:
                return cls
        raise module.pickle.UnpicklingError(f"a data set's pickle names {package}.{name}, which is no part of a schema")

    kind.find_class = find_class


_CHANGES: dict[str, tuple[Any, ...]] = {
    "petastorm.reader": (_shard_readers,),
    "petastorm.pytorch": (_weigh_batches,),
    **dict.fromkeys(_JOBS, (_ship_to_executors,)),
    "petastorm.etl.legacy": (_open_only_schemas,),
    "petastorm.workers_pool.exec_in_new_process": (_start_processes,),
}
