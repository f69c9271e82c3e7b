"""Petastorm's schema of a data set, read without petastorm and without running anything that the data set brings.

See Note [Unischema].
"""

from __future__ import annotations

import decimal
import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from lagom.errors import DataError

_KEY = b"dataset-toolkit.unischema.v1"
_PACKAGES = ("petastorm", "av.ml.dataset_toolkit", "av.experimental.deepdrive.dataset_toolkit")
_CODECS = ("ScalarCodec", "NdarrayCodec", "CompressedNdarrayCodec", "CompressedImageCodec")
_OLD_NUMPY = {"unicode_": "str_", "string_": "bytes_", "unicode": "str_", "bool": "bool_", "bool8": "bool_"}


@dataclass(frozen=True)
class UnischemaField:
    """A field of a Unischema."""

    name: str
    dtype: np.dtype[Any] | None
    """None for decimals."""
    shape: tuple[int | None, ...]
    """None where it differs from row to row."""
    codec: str | None
    """The name of its class; None: stored as it is."""
    nullable: bool


def found(home: Any, folder: str) -> dict[str, UnischemaField] | None:
    """The fields of the data set in ``folder``, by name; None where petastorm did not write it.

    Raises:
        DataError: when its schema cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder.rstrip("/") + "/_common_metadata"
    try:
        with home.open_input_file(path) as source:
            metadata = pq.read_schema(source).metadata or {}
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return loads(metadata[_KEY], path) if _KEY in metadata else None


def loads(pickled: bytes, path: str) -> dict[str, UnischemaField]:
    """The fields in a pickled Unischema, found in the file ``path``.

    Raises:
        DataError: when there is anything in it but a schema.
    """
    try:
        schema = _Unpickler(io.BytesIO(pickled)).load()
        fields = vars(schema)["_fields"]
        return {name: _field(tuple(field)) for name, field in fields.items()}
    except Exception as error:  # from any byte that is wrong
        raise DataError(f"petastorm's schema in {path} cannot be read: {error}") from error


def _field(args: tuple[Any, ...]) -> UnischemaField:
    name, dtype, shape = args[:3]
    codec = type(args[3]).__name__ if len(args) > 3 and args[3] is not None else None
    is_decimal = dtype is decimal.Decimal
    return UnischemaField(
        name=str(name),
        dtype=None if is_decimal else np.dtype(dtype),
        shape=tuple(None if size is None else int(size) for size in shape),
        codec=codec,
        nullable=bool(args[4]) if len(args) > 4 else False,
    )


class _Inert:
    """Stands for a class of petastorm's or Spark's: keeps what it is given, and does nothing."""

    def __new__(cls, *args: Any) -> _Inert:
        self = object.__new__(cls)
        self.__dict__["args"] = args
        return self

    def __init__(self, *args: Any) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(self.__dict__["args"])

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class _Unpickler(pickle.Unpickler):
    """Knows the names that a schema needs, and no others."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._stand_ins: dict[str, type[_Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if any(module == package or module.startswith(package + ".") for package in _PACKAGES):
            if name in ("Unischema", "UnischemaField", *_CODECS):
                return self._stand_in(name)
        elif module == "pyspark.sql.types" and name.endswith("Type") and name.isidentifier():
            return self._stand_in(name)
        elif (module, name) == ("pyspark.serializers", "_restore"):
            return self._restored
        elif module in ("copy_reg", "copyreg") and name == "_reconstructor":
            return self._reconstructed
        elif module in ("builtins", "__builtin__") and name == "object":
            return object
        elif (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        elif (module, name) == ("decimal", "Decimal"):
            return decimal.Decimal
        elif module == "numpy":
            kind = getattr(np, _OLD_NUMPY.get(name, name), None)
            if kind is np.dtype or (isinstance(kind, type) and issubclass(kind, np.generic)):
                return kind
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is none of petastorm's schema classes; lagom runs no code that a data "
            "set brings"
        )

    def _stand_in(self, name: str) -> type[_Inert]:
        # New ones each time: a pickle may set attributes of what it finds.
        return self._stand_ins.setdefault(name, type(name, (_Inert,), {}))

    def _restored(self, name: str, fields: Any, values: Any) -> _Inert:
        """What pyspark makes of a named tuple that it has pickled its own way."""
        del fields
        return self._stand_in(name)(*values)

    def _reconstructed(self, kind: Any, base: Any, state: Any) -> Any:
        """An object as old protocols of pickle have it."""
        if kind not in self._stand_ins.values():
            raise pickle.UnpicklingError(f"it makes an object of {kind}")
        return kind(*(state if base is tuple else ()))


# Note [Unischema]
#
# Petastorm keeps a pickle of its Unischema in the key-value metadata of the file _common_metadata. To unpickle it as
# usual would run whatever somebody put there; petastorm's own unpickler allows all of builtins, eval among them.
# Here its names are answered with classes that do nothing, numpy's scalar types, OrderedDict and Decimal; any other
# name is an error. The few callables that a pickle can reach this way make such objects and nothing else.
