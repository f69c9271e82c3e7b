"""``snapshot``: finds the current files of an Iceberg table, from its metadata, with the package pyiceberg.

The format is https://iceberg.apache.org/spec/.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from lagom.errors import DataError, LagomError
from lagom.extensions.data.sources.mapped_columns import MappedColumns, described_by_id
from lagom.extensions.data.sources.table_snapshot import TableSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from lagom.extensions.data.sources.table_snapshot import Files

METADATA = ".metadata.json"
_OF_CATALOG = re.compile(r"\d+-.*\.metadata\.json")
"""Names of metadata files that a catalog has had written; without a catalog they are v1, v2, ..."""
_REMEDY = "pass Spark's DataFrame of the table in its place: train_set=spark.read.table(...)"


def snapshot(home: Any, path: str) -> tuple[str, TableSnapshot] | None:
    """Read the version of an Iceberg table that a metadata file describes.

    Args:
        home: pyarrow's file system.
        path: the metadata file (``*.metadata.json``), or the folder of a table whose ``version-hint.text`` names it.

    Returns:
        The folder of the table, and its version; None if ``path`` is neither.

    Raises:
        DataError: if the metadata cannot be read, or the table uses features that lagom does not support.
        LagomError: if pyiceberg is not installed.
    """
    file = path if path.endswith(METADATA) else _hinted(home, path)
    if file is None:
        return None
    try:
        import pyiceberg.table  # noqa: F401  (to see whether it is installed)
    except ImportError as error:
        raise LagomError(
            f"{path} is an Iceberg table, whose metadata is read with pyiceberg: pip install 'lagom-spark[iceberg]'. "
            "Or make the ParquetDataset on a driver that has it, and hand it over (train_set=): ranks then need none"
        ) from error
    folder = posixpath.dirname(posixpath.dirname(file))
    try:
        return folder, _read(home, folder, file)
    except DataError:
        raise
    except Exception as error:  # pyiceberg raises errors of many classes for what it cannot read
        why = [*str(error).splitlines(), repr(error)][0]
        raise _error(
            folder, f"has metadata that pyiceberg cannot read: {why}; if Spark can read it, {_REMEDY}"
        ) from error


def _hinted(home: Any, folder: str) -> str | None:
    """Return the metadata file of a table without a catalog: the newest from ``version-hint.text`` on."""
    from pyarrow import fs

    def is_file(path: str) -> bool:
        return bool(home.get_file_info(path).type == fs.FileType.File)

    hint = f"{folder}/metadata/version-hint.text"
    try:
        if not is_file(hint):
            return None
        with home.open_input_stream(hint) as source:
            text = source.read().decode().strip()
        infos = home.get_file_info(fs.FileSelector(f"{folder}/metadata"))
    except OSError as error:
        raise DataError(f"{folder} cannot be reached: {error}") from error
    if not text.isdecimal():
        return _in(folder, text.removesuffix(METADATA))
    if others := [info.base_name for info in infos if _OF_CATALOG.fullmatch(info.base_name)]:
        told = f"has {hint}, and metadata of a catalog ({max(others)}); name the current metadata file"
        raise _error(folder, told)
    version, hinted = int(text), None
    # A writer makes the metadata file first, so the hint may be of the version before, as Iceberg's readers know.
    while is_file(path := _in(folder, f"v{version}")) or is_file(path := _in(folder, f"v{version}.gz")):
        hinted, version = path, version + 1
    return hinted or _in(folder, f"v{version}")


def _in(folder: str, name: str) -> str:
    return f"{folder}/metadata/{name}{METADATA}"


def _read(home: Any, folder: str, file: str) -> TableSnapshot:
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.io.pyarrow import PyArrowFile
    from pyiceberg.serializers import FromInputFile
    from pyiceberg.table import StaticTable

    metadata = FromInputFile.table_metadata(PyArrowFile(file, file, home))
    reads = _file_io(home, folder, metadata.location.rstrip("/"))
    table = StaticTable(("table",), metadata, file, reads, NoopCatalog("none"))
    tasks = list(table.scan().plan_files())
    if strange := next((task.file for task in tasks if task.file.file_format.name != "PARQUET"), None):
        raise _error(folder, f"has files that are no Parquet ({strange.file_path}); {_REMEDY}")
    fields, types = described_by_id(table.schema().as_struct())
    if defaults := [field.name for field in _all_fields(table.schema()) if field.initial_default is not None]:
        raise _error(folder, f"has a default for {defaults[0]} in files without this column; {_REMEDY}")
    files: Files = [(reads.below(task.file.file_path), task.file.file_size_in_bytes, ()) for task in tasks]
    mapped = MappedColumns(fields, types, by_id=True, needed=frozenset(_partitioned(table)))
    return TableSnapshot("iceberg", files, {}, types, mapped, _deleted(tasks, reads))


def _all_fields(schema: Any) -> Iterable[Any]:
    return [schema.find_field(number) for number in schema.field_ids]


def _partitioned(table: Any) -> set[str]:
    """Return the columns whose values are also in the metadata. Files that came from Hive lack these columns."""
    from pyiceberg.transforms import IdentityTransform

    sources = [
        part.source_id
        for spec in table.specs().values()
        for part in spec.fields
        if isinstance(part.transform, IdentityTransform)
    ]
    return {field.name for field in table.schema().fields if field.field_id in sources}


def _deleted(tasks: Iterable[Any], reads: Any) -> Mapping[str, NDArray[np.int64]]:
    """Return the deleted rows of each file that has some, from position delete files and deletion vectors."""
    known: dict[str, dict[str, Any]] = {}
    deleted: dict[str, NDArray[np.int64]] = {}
    for task in tasks:
        rows: list[Any] = []
        for file in task.delete_files:
            if file.file_path not in known:
                known[file.file_path] = _positions(file, reads)
            rows += known[file.file_path].get(task.file.file_path, ())
        if rows:
            deleted[reads.below(task.file.file_path)] = np.unique(np.array(rows, np.int64))
    return deleted


def _positions(file: Any, reads: Any) -> dict[str, list[int]]:
    """Return the deleted rows that a delete file names, by the location of the data file."""
    import pyarrow.parquet as pq
    from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    from pyiceberg.table.puffin import PuffinFile

    with reads.new_input(file.file_path).open() as source:
        if file.file_format.name == "PUFFIN":
            vectors = deletion_vectors_from_puffin_file(PuffinFile(source.read()))
            return {vector.referenced_data_file: vector.to_vector().to_pylist() for vector in vectors}
        if file.file_format.name != "PARQUET":
            raise ValueError(f"deleted rows are in a file that is no Parquet ({file.file_path})")
        table = pq.read_table(source, columns=["file_path", "pos"])
    positions: dict[str, list[int]] = {}
    for place, row in zip(table["file_path"].to_pylist(), table["pos"].to_pylist(), strict=True):
        positions.setdefault(place, []).append(row)
    return positions


def _file_io(home: Any, folder: str, location: str) -> Any:
    """Return pyiceberg's access to files, which finds those below ``location`` in ``folder``.

    So files are read with the credentials of ``home``, also if the table was copied with its folder.
    """
    from pyiceberg.io import FileIO
    from pyiceberg.io.pyarrow import PyArrowFile

    class Reads(FileIO):
        """Files of one table, by the locations in its metadata."""

        def below(self, place: str) -> str:
            """Return the path of a file below the table's folder."""
            if not place.startswith(f"{location}/"):
                why = f"has a file outside of its folder {location} ({place}); {_REMEDY}"
                raise _error(folder, why)
            return place[len(location) + 1 :]

        def new_input(self, place: str) -> Any:
            return PyArrowFile(place, f"{folder}/{self.below(place)}", home)

        def new_output(self, place: str) -> Any:
            raise OSError(f"{place} is only read")

        def delete(self, place: Any) -> None:
            raise OSError(f"{place} is only read")

    return Reads()


def _error(folder: str, why: str) -> DataError:
    return DataError(f"the Iceberg table {folder} {why}")
