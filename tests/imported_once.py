"""``imported_once``: a fixture for files of tests whose programs run on ranks of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.driver.forked_server import forked_server as forked_server


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    """Has ranks and trials find imported what the file of tests imports: 0.3 s of processor time in each of them."""
    with forked_server():
        yield
