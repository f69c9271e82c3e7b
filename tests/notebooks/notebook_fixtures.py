"""One notebook for all tests in folders ``notebooks``: a kernel that has imported torch takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebooks.kernel import Notebook


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as found:
        yield found


@pytest.fixture(scope="module")
def notebook(kernel: Notebook, request: pytest.FixtureRequest) -> Notebook:
    """The notebook, after the cell that is the ``PROGRAM`` of the test's file."""
    assert kernel.run(request.module.PROGRAM).error == ""
    return kernel
