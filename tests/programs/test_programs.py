"""Every program as a function: one plain process against ranks, in all that can be seen."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from types import ModuleType

import pytest
from torch._C._autograd import SavedTensor

from lagom.config.torch_distributed import Evaluation
from tests.programs import judge
from tests.programs.expectations import (
    AS_OTHERS,
    CASES,
    DISTRIBUTED,
    IN_EVERY_WAY,
    RATHER_WHOLE,
    SHARED_BY_THREE,
    WITH_EVALUATION,
    Case,
)
from tests.ranks import RankFailedError

LOSSES = ("a mean with weights of its own", "a sum over a batch")
TOLD = LOSSES if hasattr(SavedTensor, "unpack_hook") else LOSSES[1:]
"""Losses that a run tells of: weights are not read where torch does not tell whether a saved tensor has hooks."""
SPLITS = ("equal", "by share", "off", "apart", "error")


def cases(*split: str, among: Collection[str] = judge.PROGRAMS) -> pytest.MarkDecorator:
    """Return each case of the programs ``among``; with ``pytest -m soak`` if one way is enough for its program."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=str(case), marks=() if case.program in IN_EVERY_WAY else pytest.mark.soak)
            for case in CASES
            if case.split in split and case.program in among
        ],
    )


def cases_on_ranks(*split: str, by_default: Callable[[Case], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Return each case on two ranks, or on three where these may differ; all else with ``pytest -m soak``."""

    def is_default(case: Case, world_size: int) -> bool:
        usual = 3 if case.program in SHARED_BY_THREE else 2
        if world_size != usual or str(case) in AS_OTHERS:
            return False
        return by_default(case) or case.program in IN_EVERY_WAY

    return pytest.mark.parametrize(
        ("case", "world_size"),
        [
            pytest.param(
                case,
                world_size,
                id=f"{case}-{world_size}",
                marks=() if is_default(case, world_size) else pytest.mark.soak,
            )
            for world_size in (2, 3)
            for case in CASES
            if case.split in split
        ],
    )


@cache
def shared_run(case: Case, world_size: int) -> judge.Run:
    def change(module: ModuleType) -> None:
        module.criterion = judge.by_share(module.criterion, world_size)  # type: ignore[attr-defined]

    return judge.plainly(case.program, case.options, change)


@cache
def plain_run(case: Case) -> judge.Run:
    return judge.plainly(case.program, case.options)


def test_every_program_is_judged() -> None:
    assert judge.PROGRAMS.keys() == {case.program for case in CASES} | set(DISTRIBUTED)
    assert set(AS_OTHERS) <= {str(case) for case in CASES}


@cases(*SPLITS)
def test_one_rank_gives_the_bits_of_a_plain_run(case: Case) -> None:
    plain, run = plain_run(case), judge.on_ranks(case.program, case.options, 1)
    assert judge.differences(run.ranks[0].value, plain.ranks[0].value, tolerance=0.0) == []
    assert run.ranks[0].text == plain.ranks[0].text
    assert run.ranks[0].passes == plain.ranks[0].passes
    assert run.files == plain.files
    assert run.ranks[0].left == plain.ranks[0].left == []


@cases_on_ranks("equal", "by share", "off", by_default=lambda case: case.split == "equal")
def test_split(case: Case, world_size: int) -> None:
    judge_split(case, world_size, "gathered")


@cases("equal", "by share", "off", among=WITH_EVALUATION)
def test_split_with_replicated_evaluation(case: Case) -> None:
    judge_split(case, 2, "replicated")


def judge_split(case: Case, world_size: int, evaluation: Evaluation) -> None:
    plain = plain_run(case)
    wanted = shared_run(case, world_size) if case.split == "by share" else plain
    run = judge.on_ranks(case.program, case.options, world_size, evaluation=evaluation)
    first = run.ranks[0]
    for rank in run.ranks:
        assert judge.differences(rank.value, first.value) == []
        assert rank.left == []
    kinds = judge.sharing(run.ranks, plain.ranks[0].passes, same_order=case.split != "off")
    assert set(kinds) == ({"shared"} if case.shared else set())
    assert ("nothing is shared out" in first.said) == (not case.shared)
    assert {text for text in LOSSES if text in first.said} == {case.says}.intersection(TOLD)
    assert judge.words(first.text) == judge.words(plain.ranks[0].text)
    assert run.files.keys() == plain.files.keys()
    if case.split == "off":
        assert judge.differences(first.value, plain.ranks[0].value, tolerance=1e-6) != []
        return
    assert judge.differences(first.value, wanted.ranks[0].value) == []
    assert judge.file_differences(run.files, wanted.files) == []
    assert (judge.text_differences(first.text, wanted.ranks[0].text) != []) == (case.prints == "own")
    if case.split == "by share":
        assert judge.differences(first.value, plain.ranks[0].value, tolerance=1e-6) != []


@cases_on_ranks("apart")
def test_split_warns_of_ranks_apart(case: Case, world_size: int) -> None:
    run = judge.on_ranks(case.program, case.options, world_size)
    for rank in run.ranks[1:]:
        assert judge.differences(rank.value, run.ranks[0].value, tolerance=1e-6) != []
    assert all(case.why in rank.said for rank in run.ranks)


@cases_on_ranks("error")
def test_split_says_why_it_cannot(case: Case, world_size: int) -> None:
    with pytest.raises(RankFailedError, match=case.why):
        judge.on_ranks(case.program, case.options, world_size)


@cases_on_ranks(*SPLITS, by_default=lambda case: case.split != "equal")
def test_whole(case: Case, world_size: int) -> None:
    judge_whole(case, world_size, always_slices=True)


@cases("equal", "by share", "off", among=RATHER_WHOLE)
def test_whole_where_slicing_does_not_pay(case: Case) -> None:
    judge_whole(case, 2, always_slices=False)


def judge_whole(case: Case, world_size: int, *, always_slices: bool) -> None:
    plain = plain_run(case)
    run = judge.on_ranks(
        case.program,
        case.options,
        world_size,
        batches="whole",
        evaluation="gathered",
        always_slices=always_slices,
    )
    for rank in run.ranks:
        assert judge.differences(rank.value, plain.ranks[0].value) == []
        assert judge.text_differences(rank.text, plain.ranks[0].text) == []
        assert rank.passes == plain.ranks[0].passes
        assert rank.left == []
    assert judge.file_differences(run.files, plain.files) == []
