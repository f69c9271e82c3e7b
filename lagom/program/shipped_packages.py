"""``ship_packages``: the pure-Python packages of this process that are sent with a run, for ``packages="ship"``."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import PurePosixPath

from lagom.errors import PlanError
from lagom.plan import Package

MOST_BYTES = 64 << 20  # bytes; Spark would send more for each task of each run, where an archive is fetched once
_COMPILED = re.compile(r"\.(so|pyd|dll|dylib)(\.[\d.]+)?$")
_EVERYWHERE = ("torch", "numpy", "pandas", "pyarrow", "pyspark", "cloudpickle")
"""Distributions that each executor has, with those that they require."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """Packages that are sent with a run."""

    archive: bytes = b""
    """Zip of the packages, as they lie in site-packages."""
    distributions: tuple[str, ...] = ()


def ship_packages(packages: Sequence[Package]) -> Shipment:
    """Pack the pure-Python ones among ``packages`` and the distributions that they require.

    Raises:
        PlanError: if they are larger than ``MOST_BYTES``.
    """
    return _shipment(tuple(sorted({one.distribution for one in packages if one.distribution})))


@functools.lru_cache(maxsize=1)
def _shipment(names: tuple[str, ...]) -> Shipment:
    everywhere = {_key(one) for one in _with_required(_EVERYWHERE)}
    found = [one for one in _with_required(names) if _key(one) not in everywhere and _is_pure(one)]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in _contents(found):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, compresslevel=1)
            if stream.tell() > MOST_BYTES:
                raise PlanError(_too_large(found))
    return Shipment(stream.getvalue() if found else b"", tuple(one.metadata["Name"] for one in found))


def _with_required(names: Iterable[str]) -> list[Distribution]:
    """Return the installed distributions ``names``, and those that they require, at any depth, but not by extras."""
    waiting, required = list(names), dict[str, Distribution]()
    while waiting:
        try:
            one = importlib.metadata.distribution(waiting.pop())
        except importlib.metadata.PackageNotFoundError:  # required on other systems or versions of Python
            continue
        if _key(one) not in required:
            required[_key(one)] = one
            waiting += [_required(text) for text in one.requires or () if not re.search(r"\bextra\b", text)]
    return [required[key] for key in sorted(required)]


def _required(text: str) -> str:
    """Return the name in a requirement, such as "tqdm>=4.67; python_version < '4'"."""
    matched = re.match(r"[\w.-]+", text)
    assert matched is not None, text
    return matched[0]


def _key(one: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower()


def _is_pure(one: Distribution) -> bool:
    """Return whether ``one`` has its modules in site-packages, and no compiled files."""
    files = one.files or []
    return any(_is_sent(path) and path.suffix == ".py" for path in files) and not any(
        _COMPILED.search(path.name) for path in files
    )


def _is_sent(path: PurePosixPath) -> bool:
    """Return whether a file of a distribution lies in site-packages, as commands do not, and is not compiled code."""
    return not path.is_absolute() and ".." not in path.parts and path.suffix != ".pyc"


def _contents(distributions: Iterable[Distribution]) -> Iterator[tuple[str, bytes]]:
    for one in distributions:
        for path in sorted(path for path in one.files or () if _is_sent(path)):
            place = path.locate()
            if place.is_file():  # type: ignore[attr-defined]
                yield str(path), place.read_bytes()  # type: ignore[attr-defined]


def _too_large(distributions: Sequence[Distribution]) -> str:
    names = ", ".join(one.metadata["Name"] for one in distributions)
    return (
        f"packages='ship' would send more than {MOST_BYTES >> 20} MB ({names}); pack the environment once instead: "
        "'lagom pack' makes the archive and prints Spark's settings"
    )
