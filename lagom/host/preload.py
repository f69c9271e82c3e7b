"""Import slow modules once, in the process that ranks are forked from."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (sockets use it to look up names)
import gc
import importlib
import os
import platform
import sys

import lagom.disk.settle
import lagom.on_rank.bootstrap  # noqa: F401
from lagom.disk.libraries import loaded, slots
from lagom.patching.importers import remember_importers


def look_at_loaded() -> None:
    """Read the loaded libraries and modules that ranks will patch, so that no rank has to do so."""
    for library in loaded():
        slots(library, platform.machine())  # reading torch's takes 0.1 s, and nothing the next time
    remember_importers()
    # A rank calls invalidate_caches(), which copies the memory of each of these finders.
    sys.path_importer_cache.clear()


with contextlib.suppress(ImportError):
    import numpy.random  # noqa: F401  (numpy imports it at its first use, which is in every rank)
if os.environ.get("LAGOM_NATIVE") != "0":
    with contextlib.suppress(ImportError):
        importlib.import_module("lagom._native")  # would take 5 ms in each rank
# An optimizer's first step imports it, which would take 1.4 s in each rank. Its tables of torch's functions are made
# here, since they must not contain lagom's.
importlib.import_module("torch._dynamo").trace_rules.get_torch_obj_rule_map()
look_at_loaded()
# Else each full garbage collection, here or in a rank, would take 0.2 s for these modules and copy shared memory.
gc.freeze()
