"""``pack_environment``: makes an archive of this process's Python environment, which Spark unpacks on executors."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from lagom.errors import LagomError

FOLDER = "environment"
"""Folder into which executors unpack the archive."""
ENDINGS = (".tar.gz", ".tgz", ".zip")
"""Kinds of archives that Spark unpacks and the libraries write."""


def pack_environment(archive: Path, *, python_prefix: str | None = None, replace: bool = False) -> str:
    """Pack the environment of this process into ``archive``; return the settings for Spark, as a text.

    conda-pack packs a conda environment with its Python; venv-pack packs a virtual environment of venv, virtualenv or
    uv, for executors that have the same Python.

    Args:
        python_prefix: folder in which executors have Python (``sys.prefix`` of it); None: the same as here. Only for
            virtual environments.
        replace: whether to replace an existing file.

    Raises:
        ValueError: if ``archive`` has the wrong ending, or exists and is not to be replaced.
        LagomError: if this Python is no environment, the library is missing, or the library cannot pack.
    """
    if not archive.name.endswith(ENDINGS):
        raise ValueError(f"the archive is to be {str(archive)!r}; want a name that ends with {' or '.join(ENDINGS)}")
    if archive.exists() and not replace:
        raise ValueError(f"{str(archive)!r} exists already; choose another name with -o, or give --force")
    is_conda = Path(sys.prefix, "conda-meta").is_dir()
    if is_conda:
        _pack_conda(archive, python_prefix, replace)
    elif sys.prefix != sys.base_prefix:
        _pack_virtual(archive, python_prefix, replace)
    else:
        raise LagomError(
            f"{sys.executable} is no environment of its own, so there is nothing to pack; make one with the packages "
            "of your program (python -m venv env; env/bin/pip install 'lagom-spark[pack,spark]' ...), and run "
            "env/bin/lagom pack"
        )
    needed = None if is_conda else f"Python {platform.python_version()} in {python_prefix or sys.base_prefix}"
    return _settings(archive.absolute(), needed)


def _pack_virtual(archive: Path, python_prefix: str | None, replace: bool) -> None:
    try:
        import venv_pack
    except ImportError as error:
        raise LagomError(_without("a virtual environment", "venv-pack2")) from error
    try:
        venv_pack.pack(prefix=sys.prefix, output=str(archive), python_prefix=python_prefix, force=replace)
    except venv_pack.VenvPackException as error:
        raise LagomError(_why(error)) from error


def _pack_conda(archive: Path, python_prefix: str | None, replace: bool) -> None:
    if python_prefix is not None:
        raise ValueError("--python-prefix is for virtual environments; an archive of conda's has its own Python")
    try:
        import conda_pack
    except ImportError as error:
        raise LagomError(_without("a conda environment", "conda-pack")) from error
    try:
        conda_pack.pack(prefix=sys.prefix, output=str(archive), force=replace)
    except conda_pack.CondaPackException as error:
        raise LagomError(_why(error)) from error


def _without(what: str, package: str) -> str:
    return f"{package} packs {what} such as {sys.prefix}, and is not installed; remedy: pip install {package}"


def _why(error: Exception) -> str:
    said = " ".join(str(error).split())
    remedy = ""
    if "editable" in said:
        remedy = ". Install them without -e; your own modules need not be installed, lagom sends them with each run"
    return f"{sys.prefix} cannot be packed: {said}{remedy}"


def _settings(archive: Path, needed: str | None) -> str:
    """Return the settings with which executors use ``archive``, for a notebook and for the command line."""
    place, python = f"{archive}#{FOLDER}", f"./{FOLDER}/bin/python"
    executors = f"Executors must have {needed}, as this machine has it.\n" if needed is not None else ""
    return (
        f"{archive}: {archive.stat().st_size / 1e6:,.0f} MB\n"
        f"{executors}"
        "Before a Spark session is made, set\n"
        f"  spark.archives  {place}\n"
        f"  PYSPARK_PYTHON  {python}\n"
        "With spark-submit, spark.pyspark.python replaces PYSPARK_PYTHON. In a shell:\n"
        f"  export PYSPARK_PYTHON={python} PYSPARK_DRIVER_PYTHON={sys.executable}\n"
        f'  export PYSPARK_SUBMIT_ARGS="--archives {os.fspath(place)} pyspark-shell"\n'
        "  lagom run --master ... train.py"
    )
