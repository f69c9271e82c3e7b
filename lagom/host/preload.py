"""Import slow modules once, in the process that ranks are forked from."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (sockets use it to look up names)
import gc
import importlib
import os
import platform
import sys

import lagom.files.settle
import lagom.worker.bootstrap  # noqa: F401
from lagom.files.symbols import loaded, slots
from lagom.patching.importers import remember_importers
from lagom.patching.late_dynamo import import_dynamo_if_used, put_off_dynamo


def look_at_loaded() -> None:
    """Read the loaded libraries and modules that ranks will patch, so that no rank has to do so."""
    for library in loaded():
        slots(library, platform.machine())  # reading torch's takes 0.1 s, and nothing the next time
    remember_importers()
    # A rank calls invalidate_caches(), which copies the memory of each of these finders.
    sys.path_importer_cache.clear()


def import_what_was_used() -> None:
    """Import Dynamo if the last run compiled something, as the next one probably does."""
    gc.disable()
    if import_dynamo_if_used():
        look_at_loaded()
        gc.freeze()
    gc.enable()


with contextlib.suppress(ImportError):
    import numpy.random  # noqa: F401  (numpy imports it at its first use, which is in every rank)
if os.environ.get("LAGOM_NATIVE") != "0":
    with contextlib.suppress(ImportError):
        importlib.import_module("lagom._native")  # would take 5 ms in each rank
put_off_dynamo()
look_at_loaded()
# Else each full garbage collection, here or in a rank, would take 0.2 s for these modules and copy shared memory.
gc.freeze()
