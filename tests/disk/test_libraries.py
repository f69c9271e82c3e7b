"""``lagom.disk.libraries`` and ``symbols``: functions of files that C code calls."""

from __future__ import annotations

import subprocess
import sys

IMPORTS = """
import faulthandler, importlib, threading
faulthandler.dump_traceback_later(40, exit=True)
from lagom.disk.libraries import loaded
ended = threading.Event()
def look():
    while not ended.is_set():
        loaded()
looking = [threading.Thread(target=look) for _ in range(2)]
for thread in looking:
    thread.start()
for name in ("_bz2", "_csv", "_decimal", "_lsprof", "_lzma", "_queue", "_statistics", "_zoneinfo", "pandas", "pyexpat"):
    importlib.import_module(name)
ended.set()
for thread in looking:
    thread.join()
print(sorted(library.name.rpartition("/")[2].partition(".")[0] for library in loaded() if "_lzma" in library.name))
"""


def test_libraries_are_looked_through_while_another_thread_imports() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=170, check=False)
    assert (done.returncode, done.stdout) == (0, "['_lzma']\n"), done.stderr
