"""``Pickler``: cloudpickle for what travels between driver and ranks: tensors, classes of a notebook, functions."""

from __future__ import annotations

import copyreg
import ctypes
import functools
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _tracker

from lagom.errors import PayloadError

_Cached = type(functools.lru_cache(print))
OUT_OF_BAND = 1 << 16
"""Bytes from which a buffer is stored beside the pickle; copying a smaller buffer into the pickle costs less."""
_NO_FILE = "<dynamic-code>"
_by_value: set[str] = set()


@contextmanager
def pickled_by_value(modules: Iterable[types.ModuleType]) -> Iterator[None]:
    """Pickle functions and classes of ``modules`` by value in the context; those of ``__main__`` always are."""
    registered = [module for module in modules if module.__name__ != "__main__"]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
        _by_value.add(module.__name__)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
            _by_value.discard(module.__name__)


def classes_received() -> dict[type, str]:
    """Return the classes that this process has unpickled or pickled by value so far, with cloudpickle's ids of them."""
    return dict(_tracker._DYNAMIC_CLASS_TRACKER_BY_CLASS)


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle with torch's storages pickled out of band; never imports torch."""

    def __init__(
        self,
        stream: io.BytesIO,
        out_of_band: Callable[[pickle.PickleBuffer], Any],
        own_classes: Mapping[type, str],
        by_reference: bool = False,
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=out_of_band)
        self._by_reference = by_reference
        if by_reference:
            self.dispatch_table = copyreg.dispatch_table
        self._storages: dict[tuple[str, int, int], _Storage] = {}
        self._own_classes = own_classes

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and value in self._own_classes:
            return _class_at_home, (self._own_classes[value], value.__qualname__)
        if isinstance(value, types.CodeType):
            make, given = _tracker._code_reduce(value)
            # cloudpickle 3.1.3 drops the file's name, by which tracebacks, debuggers and TorchScript find the source.
            return make, tuple(value.co_filename if one == _NO_FILE else one for one in given)
        if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
            # cloudpickle does not know modules of a subclass of ModuleType, such as torch.backends.cudnn.
            name: str = value.__name__
            if sys.modules.get(name) is value:
                return importlib.import_module, (name,)
        if type(value).__name__ in ("Accumulator", "Broadcast") and is_sparks(value):
            raise pickle.PicklingError("it has its value in Spark's own functions only")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.storage.TypedStorage):
            return _typed_storage, (self._storage(value._untyped_storage), value.dtype)
        if torch is not None and isinstance(value, torch.UntypedStorage):
            # Tensors of dtypes without typed storages, such as float8, have an untyped storage. It travels as a typed
            # storage of bytes, from which torch takes the untyped storage again.
            return _typed_storage, (self._storage(value), torch.uint8)
        if self._by_reference:
            numpy = sys.modules.get("numpy")
            return value.__reduce_ex__(4) if numpy is not None and isinstance(value, numpy.ndarray) else NotImplemented
        if type(value) is _Cached and (
            value.__module__ in _by_value or _tracker._lookup_module_and_qualname(value) is None
        ):
            # cloudpickle leaves a function with lru_cache to pickle, which would look it up in the reader's __main__.
            settings = value.cache_parameters()
            return _cached, (value.__wrapped__, settings["maxsize"], settings["typed"])
        return super().reducer_override(value)

    def _storage(self, storage: Any) -> _Storage:
        # Tensors that share memory must share it after unpickling too: they get one _Storage, which pickle writes once.
        key = (storage.device.type, storage.data_ptr(), storage.nbytes())
        if key not in self._storages or storage.nbytes() == 0:
            self._storages[key] = _Storage(storage)
        return self._storages[key]


class _Storage:
    """Stands for a torch storage in a pickle; unpickles as the storage."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        cpu = self._storage if self._storage.device.type == "cpu" else self._storage.cpu()
        memory = memoryview((ctypes.c_char * cpu.nbytes()).from_address(cpu.data_ptr() or 0)) if cpu.nbytes() else b""
        # ctypes borrows the memory; the storage must outlive the parcel.
        return _untyped_storage, (pickle.PickleBuffer(_kept(memory, cpu)), self._storage.device.type)


def _class_at_home(class_id: str, name: str) -> type:
    try:
        found: type = _tracker._DYNAMIC_CLASS_TRACKER_BY_ID[class_id]
    except KeyError:
        raise PayloadError(f"the class {name} went out from here, but is no longer here") from None
    return found


def _kept(memory: memoryview | bytes, owner: object) -> memoryview:
    """Return ``memory`` as bytes that keep ``owner`` alive."""
    if isinstance(memory, bytes):
        return memoryview(memory)
    array: Any = memory.obj
    array._owner = owner
    return memoryview(array).cast("B")


def _untyped_storage(buffer: Any, device: str) -> Any:
    import torch

    view = memoryview(buffer)
    if view.nbytes == 0:
        return torch.UntypedStorage(0)
    if view.readonly:
        view = memoryview(bytearray(view))
    memory = torch.frombuffer(view, dtype=torch.uint8)
    if view.nbytes < OUT_OF_BAND:
        memory = memory.clone()  # torch aligns its own memory, and results of a library's sums may depend on alignment
    storage = memory.untyped_storage()
    if device == "cpu":
        return storage
    from lagom.accelerators import available_accelerator

    here = available_accelerator()
    if here is None or here.type != device:
        return storage
    return memory.to(here).untyped_storage()  # a storage's own ``to`` asks for functions that not every kind has


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def is_sparks(value: object) -> bool:
    """Return whether ``value`` is an object of PySpark."""
    return type(value).__module__.partition(".")[0] in ("pyspark", "py4j")


# Note [Classes of __main__]
#
# A notebook's class travels by value. If it also came back by value, cloudpickle would find the driver's class by its
# id and set all attributes of the rank's copy on the driver's class: its methods would from then on see the rank's
# globals instead of the notebook's, and class attributes that the rank changed would change in the notebook. So a rank
# sends such classes back by their id alone.
