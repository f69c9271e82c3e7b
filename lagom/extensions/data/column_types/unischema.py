"""Reads petastorm's schema of a data set, without petastorm and without running code from the data set.

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
    """Type, shape and codec of one column, as petastorm's schema describes them."""

    name: str
    dtype: np.dtype[Any] | None
    """Type of the numbers; None for decimals."""
    shape: tuple[int | None, ...]
    """Shape of a cell, with None for sizes that differ from row to row."""
    codec: str | None
    """Class name of petastorm's codec; None if cells are stored without encoding."""
    nullable: bool


def read_fields(home: Any, folder: str) -> dict[str, UnischemaField] | None:
    """Read the fields of the data set in ``folder``, by name; return None if petastorm did not write it.

    Args:
        home: pyarrow's file system.

    Raises:
        DataError: if the schema cannot be read.
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
    """Return the fields in a pickled Unischema; ``path`` is the file's, for errors.

    Raises:
        DataError: if the pickle is damaged, or contains anything but a schema.
    """
    try:
        schema = _Unpickler(io.BytesIO(pickled)).load()
        fields = vars(schema)["_fields"]
        return {name: _field(tuple(field)) for name, field in fields.items()}
    except Exception as error:  # damaged pickles raise many kinds of errors
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
    """Replaces a class of petastorm or Spark in a pickle: keeps its arguments, and does nothing."""

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
    """Unpickles only the names that a schema needs; any other name is an error."""

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
        # New classes for each pickle, since a pickle may set attributes of classes.
        return self._stand_ins.setdefault(name, type(name, (_Inert,), {}))

    def _restored(self, name: str, fields: Any, values: Any) -> _Inert:
        """Make an object in place of a named tuple that pyspark has pickled in its own way."""
        del fields
        return self._stand_in(name)(*values)

    def _reconstructed(self, kind: Any, base: Any, state: Any) -> Any:
        """Make an object as pickle's old protocols do, if its class is a stand-in."""
        if kind not in self._stand_ins.values():
            raise pickle.UnpicklingError(f"it makes an object of {kind}")
        return kind(*(state if base is tuple else ()))


# Note [Unischema]
#
# Petastorm stores a pickle of its Unischema in the key-value metadata of the file _common_metadata. Ordinary unpickling
# would run any code that somebody put there; petastorm's own unpickler allows all of builtins, with eval. lagom's
# unpickler resolves the names of petastorm's and Spark's classes to classes that do nothing, and those of two functions
# that rebuild objects to functions of its own. It allows numpy's dtype and scalar types, object, OrderedDict and
# Decimal; any other name is an error. The few callables that a pickle can reach only make such objects.
