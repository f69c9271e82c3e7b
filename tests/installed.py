"""``install``: puts small packages into a folder as pip does, for tests of packages that executors lack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path, distribution: str, version: str, files: Mapping[str, str], requires: tuple[str, ...] = ()
) -> None:
    """Write ``files``, by their paths, and the record of ``distribution`` into ``folder``, a "site-packages"."""
    info = f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {one}" for one in requires]
    written = {**files, f"{info}/METADATA": "\n".join(metadata) + "\n"}
    written[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*written, f"{info}/RECORD", "../../bin/command"])
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
