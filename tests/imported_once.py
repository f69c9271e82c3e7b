"""``imported_once``: a fixture for files of tests whose programs run on ranks of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

import lagom.search.slots.local_slots  # before forked_server replaces what it takes from the launcher, for good
from lagom.launchers import local
from tests.launchers.forked_server import forked_server as forked_server

_server = local.server


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    """Has ranks and trials find imported what the file of tests imports: 0.3 s of processor time in each of them."""
    with forked_server():
        yield


@contextmanager
def launchers_server() -> Iterator[None]:
    """Have launches use the launcher's own server nevertheless, for a while, which has imported nothing of tests."""
    with (
        patch.object(local, "server", _server),
        patch.object(lagom.search.slots.local_slots, "server", _server),
    ):
        yield
