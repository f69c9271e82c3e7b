"""``lagom.exchange.run_store``: what ranks leave for each other, and what strangers can do to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lagom.exchange.run_store import SealedStore, all_gather_by, reconnected
from tests.encryption import encrypted_stores

KEY = b"known to ranks"


@pytest.fixture(params=["file", "encrypted"])
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dist.Store]:
    if request.param == "file":
        yield dist.FileStore(str(tmp_path / "store"), -1)
    else:
        with encrypted_stores() as (store, _):
            yield store


@pytest.mark.parametrize("text", ["", "text ä\0 of any kind", "\r\n\xff" * 5000])
@pytest.mark.parametrize("has_folder", [False, True])
def test_what_one_rank_leaves_others_receive_once(raw: dist.Store, tmp_path: Path, text: str, has_folder: bool) -> None:
    folder = tmp_path / "large" if has_folder else None
    (tmp_path / "large").mkdir()
    SealedStore(raw, KEY, folder).set("name", text)
    other = SealedStore(reconnected(raw, timedelta(seconds=5)), KEY, folder)
    assert other.receive("name", 2, 5.0) == text
    assert other.check("name")
    assert SealedStore(raw, KEY, folder).receive("name", 2, 5.0) == text
    assert not other.check("name")
    assert not list((tmp_path / "large").iterdir())
    with pytest.raises(TimeoutError, match="no rank has left 'name' within 0 s"):
        other.wait("name", 0.05)
    other.set("ended", "")
    with pytest.raises(TimeoutError, match="'name'"):
        other.receive("name", 2, 60.0, unless="ended")


def _made_up(raw: dist.Store) -> None:
    raw.set("lagom/name", "0" * 32 + "text")


def _changed(raw: dist.Store) -> None:
    raw.set("lagom/name", bytes(raw.get("lagom/name")).decode()[:-1] + "X")


def _under_another_name(raw: dist.Store) -> None:
    SealedStore(raw, KEY).set("other", "text")
    raw.set("lagom/name", bytes(raw.get("lagom/other")).decode())


def _without_the_key(raw: dist.Store) -> None:
    SealedStore(raw, b"guessed").set("name", "text")


def _empty(raw: dist.Store) -> None:
    raw.set("lagom/name", "")


@pytest.mark.parametrize("tamper", [_made_up, _changed, _under_another_name, _without_the_key, _empty])
def test_what_is_not_a_ranks_is_an_error(raw: dist.Store, tamper: Callable[[dist.Store], None]) -> None:
    SealedStore(raw, KEY).set("name", "text")
    tamper(raw)
    with pytest.raises(RuntimeError, match="'name' does not come from a rank of this run"):
        SealedStore(raw, KEY).get("name")


def test_all_ranks_get_what_all_gave_again_and_again(raw: dist.Store) -> None:
    found: dict[int, list[list[bytes]]] = {}

    def rank(number: int) -> None:
        gather = all_gather_by(SealedStore(reconnected(raw), KEY), "ways", number, 3, 30.0)
        found[number] = [gather(data) for data in (b"", b"%d" % number, b"x" * number)]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [[b""] * 3, [b"0", b"1", b"2"], [b"", b"x", b"xx"]]
    assert found == {0: wanted, 1: wanted, 2: wanted}


def test_a_rank_that_does_not_come_is_an_error(raw: dist.Store) -> None:
    with pytest.raises(TimeoutError, match="'ways/1/1'"):
        all_gather_by(SealedStore(raw, KEY), "ways", 0, 2, 0.05)(b"here")


def test_a_store_in_a_file_stays_when_a_rank_that_used_it_ends(tmp_path: Path) -> None:
    SealedStore(dist.FileStore(str(tmp_path / "store"), -1), KEY).set("name", "text")
    child = os.fork()
    if child == 0:
        SealedStore(dist.FileStore(str(tmp_path / "store"), -1), KEY).set("more", "of it")
        os._exit(0)
    os.waitpid(child, 0)
    assert SealedStore(dist.FileStore(str(tmp_path / "store"), -1), KEY).get("more") == "of it"


def test_ranks_that_want_some_texts_wait_for_no_other_rank(raw: dist.Store) -> None:
    gathers = [all_gather_by(SealedStore(raw, KEY), "ways", rank, 4, 30.0) for rank in range(4)]
    gathers[3](b"", wanted=())
    gathers[2](b"of 2", wanted=())
    assert gathers[1](b"of 1", wanted=[2])[2] == b"of 2"
    assert gathers[0](b"", wanted=[1, 2])[1:3] == [b"of 1", b"of 2"]
