"""The judge: a program as one plain process, the same program on ranks, and what differs between the two."""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lagom.forward.rows.whole_batch import Gatherer
from lagom.patching.replace import replaced
from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.ranks import DEVICE, alone, forked_ranks, run_ranks

HERE = Path(__file__).parent
TOLERANCE = 1e-12 if DEVICE == "cpu" else 1e-9
"""Tolerance for weights and returned numbers, relative to the larger of 1 and the number."""
PRINTED = 1e-9
"""Tolerance for printed numbers, which are rounded."""
PROGRAMS = {
    path.stem: importlib.import_module(f"tests.programs.{path.stem}")
    for path in sorted(HERE.glob("*.py"))
    if path.stem not in ("judge", "expectations", "kills", "slowed") and not path.stem.startswith("test_")
}
"""All programs, imported before any test begins: what an import leaves behind is no test's."""
_LSTM = nn.LSTM(2, 2, 2)
"""Has its parameters' names interned: a pickle of a whole LSTM has other bytes if it is the first in its process."""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Pass(NamedTuple):
    """One pass over a loader."""

    with_gradients: bool
    batches: list[list[int]]
    """For each batch, the indices that were fetched."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that one rank did and printed."""

    value: Any
    text: str
    passes: list[Pass]
    left: list[str]
    """Processes that it left running."""
    said: str
    """Text that lagom logged."""
    num_gathered: int
    """Outputs of sliced forwards that were made whole."""


@dataclass(frozen=True, slots=True)
class Run:
    """The ranks of a run, and the files that exist at its end."""

    ranks: list[Seen]
    files: dict[str, bytes]


def plainly(program: str, options: Mapping[str, Any], change: Callable[[types.ModuleType], None] | None = None) -> Run:
    """The program in one plain process with nothing patched; ``change`` is made to its module before."""
    with forked_ranks() if change is not None else nullcontext():  # processes that the change ends with
        return _in_scratch(lambda: [alone(_body(program, options, change))])


def on_ranks(
    program: str,
    options: Mapping[str, Any],
    world_size: int,
    before: Callable[[Session], None] = lambda _: None,
    **settings: Any,
) -> Run:
    """The program on ``world_size`` ranks that share a working directory.

    Args:
        before: called on each rank first.
        settings: of ``run_ranks``.
    """
    train = _body(program, options, None)

    def body(session: Session) -> Seen:
        before(session)
        return train(session)

    return _in_scratch(lambda: run_ranks(world_size, body, **settings))


def one_after_another(programs: Mapping[str, Callable[[], Any]], world_size: int, **settings: Any) -> dict[str, Run]:
    """Run all ``programs`` on the same ranks, each from the same random numbers and in a folder of its own.

    Args:
        settings: of ``run_ranks``.
    """
    with scratch() as folder:
        for name in programs:
            (folder / name).mkdir()

        def body(session: Session) -> dict[str, Seen]:
            seen = {}
            for name, train in programs.items():
                os.chdir(folder / name)
                seed_everything(0)
                session.said.clear()
                seen[name] = _observe(train)
            return seen

        ranks = run_ranks(world_size, body, **settings)
        return {name: Run([rank[name] for rank in ranks], files_in(folder / name)) for name in programs}


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty working directory, for a while."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def files_in(folder: Path) -> dict[str, bytes]:
    """All files below ``folder``, by their relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _in_scratch(run: Callable[[], list[Seen]]) -> Run:
    with scratch() as folder:
        return Run(run(), files_in(folder))


def _body(
    program: str, options: Mapping[str, Any], change: Callable[[types.ModuleType], None] | None
) -> Callable[[object], Seen]:
    module = PROGRAMS[program]

    def body(_: object) -> Seen:
        if change is not None:
            change(module)  # in a process forked for this run
        return _observe(lambda: module.train(**options))

    return body


def _observe(train: Callable[[], Any]) -> Seen:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("lagom").addHandler(handler)
    with redirect_stdout(io.StringIO()) as text, noted_passes() as passes, _counted_gathers() as gathers:
        value = train()
    logging.getLogger("lagom").removeHandler(handler)
    return Seen(value, text.getvalue(), passes, _children(), said.getvalue(), len(gathers))


def _children() -> list[str]:
    children = {
        child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
    }
    return [Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in sorted(children)]


@contextmanager
def noted_passes() -> Iterator[list[Pass]]:
    """Notes what is fetched by loaders without workers.

    What a rank fetches in place of a share that is empty counts nowhere, so is left out.
    """
    passes: list[Pass] = []
    fetched: list[int] = []
    of_loop: dict[int, list[list[int]]] = {}
    alive: list[object] = []  # an id is not to be used again
    fetch: Any = _MapDatasetFetcher.fetch
    next_data: Any = _SingleProcessDataLoaderIter._next_data

    def noting_fetch(self: Any, index: Any) -> Any:
        fetched.extend(index if isinstance(index, list) else [index])
        return fetch(self, index)

    def noting_next(self: Any) -> Any:
        if id(self) not in of_loop:
            alive.append(self)
            passes.append(Pass(torch.is_grad_enabled(), of_loop.setdefault(id(self), [])))
        fetched.clear()
        data = next_data(self)
        current = self.__dict__.get("_lagom_pass")
        is_empty = current is not None and current.shares and current.shares[-1].num_mine == 0
        of_loop[id(self)].append([] if is_empty else list(fetched))
        return data

    with ExitStack() as stack:
        stack.enter_context(replaced(_MapDatasetFetcher, "fetch", noting_fetch))
        stack.enter_context(replaced(_SingleProcessDataLoaderIter, "_next_data", noting_next))
        yield passes


@contextmanager
def _counted_gathers() -> Iterator[list[None]]:
    gather: Any = Gatherer.gather
    gathers: list[None] = []

    def counting_gather(self: Gatherer, *args: Any, **options: Any) -> Any:
        gathers.append(None)
        return gather(self, *args, **options)

    with replaced(Gatherer, "gather", counting_gather):
        yield gathers


def differences(found: Any, wanted: Any, where: str = "value", tolerance: float = TOLERANCE) -> list[str]:
    """List how ``found`` differs from ``wanted``: numbers by more than ``tolerance``, other values at all."""
    if type(found) is not type(wanted):
        return [f"{where} is a {type(found).__name__}, not a {type(wanted).__name__}"]
    if isinstance(wanted, nn.Module):
        both = vars(found).keys() ^ vars(wanted).keys()
        return [f"{where} has other attributes: {sorted(both)}"] * bool(both) + differences(
            dict(found.state_dict()), dict(wanted.state_dict()), where, tolerance
        )
    if isinstance(wanted, Mapping):
        if list(found) != list(wanted):
            return [f"{where} has the keys {list(found)}, not {list(wanted)}"]
        return [line for key in wanted for line in differences(found[key], wanted[key], f"{where}[{key!r}]", tolerance)]
    if isinstance(wanted, (list, tuple)):
        if len(found) != len(wanted):
            return [f"{where} has {len(found)} parts, not {len(wanted)}"]
        parts = enumerate(zip(found, wanted, strict=True))
        return [line for i, (one, other) in parts for line in differences(one, other, f"{where}[{i}]", tolerance)]
    if isinstance(wanted, torch.Tensor):
        return _tensor_differences(found, wanted, where, tolerance)
    if isinstance(wanted, np.ndarray):
        return differences(found.tolist(), wanted.tolist(), where, tolerance)
    if isinstance(wanted, float):
        return differences(torch.tensor(found), torch.tensor(wanted), where, tolerance)
    return [] if found == wanted else [f"{where} is {found!r}, not {wanted!r}"]


def _tensor_differences(found: torch.Tensor, wanted: torch.Tensor, where: str, tolerance: float) -> list[str]:
    if (found.shape, found.dtype, found.requires_grad) != (wanted.shape, wanted.dtype, wanted.requires_grad):
        return [f"{where} is {found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"]
    if torch.equal(found, wanted):
        return []
    if wanted.is_complex():
        found, wanted = torch.view_as_real(found.resolve_conj()), torch.view_as_real(wanted.resolve_conj())
    found, wanted = found.detach().double(), wanted.detach().double()
    error = ((found - wanted).abs() / wanted.abs().clamp_min(1.0)).max().item()
    return [] if error <= tolerance else [f"{where} is off by {error:.1e}"]  # also when it is no number


def text_differences(found: str, wanted: str) -> list[str]:
    """List the differences of printed texts: numbers by more than ``PRINTED``, other text at all."""
    if words(found) != words(wanted):
        return [f"the text is {found!r}, not {wanted!r}"]
    pairs = zip(_NUMBER.findall(found), _NUMBER.findall(wanted), strict=True)
    return [f"printed {a} instead of {b}" for a, b in pairs if a != b and abs(float(a) - float(b)) > PRINTED]


def words(text: str) -> str:
    """A text with its numbers blanked out."""
    return _NUMBER.sub("#", text)


def file_differences(
    found: Mapping[str, bytes], wanted: Mapping[str, bytes], tolerance: float = TOLERANCE
) -> list[str]:
    """List the differences of files, by name and content; saved numbers differ by more than ``tolerance``."""
    if found.keys() != wanted.keys():
        return [f"the files are {sorted(found)}, not {sorted(wanted)}"]
    return [line for name in wanted for line in _content_differences(name, found[name], wanted[name], tolerance)]


def _content_differences(name: str, found: bytes, wanted: bytes, tolerance: float) -> list[str]:
    if found == wanted:
        return []
    if name.endswith(".pt"):
        first, second = (
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=False) for content in (found, wanted)
        )
        return differences(first, second, name, tolerance)
    return [f"{name}: {line}" for line in text_differences(found.decode(), wanted.decode())]


def sharing(ranks: list[Seen], plain: list[Pass], *, same_order: bool = True) -> list[str]:
    """Return for each training pass whether it was "shared" or "replicated"; other passes are replicated.

    Raises:
        AssertionError: when in any batch (in any pass, without ``same_order``) samples are not those of the plain run,
            each exactly once.
    """
    assert {len(rank.passes) for rank in ranks} == {len(plain)}, "the ranks made other passes than one process"
    kinds = []
    for i, (with_gradients, wanted) in enumerate(plain):
        parts = [rank.passes[i].batches for rank in ranks]
        assert {len(part) for part in parts} == {len(wanted)}, f"pass {i} has another number of batches"
        if not same_order:
            parts, wanted = [[list(chain(*part))] for part in parts], [list(chain(*wanted))]
        if all(part == parts[0] for part in parts) and Counter(chain(*parts[0])) == Counter(chain(*wanted)):
            assert not same_order or parts[0] == wanted, f"pass {i} has another order"
            if with_gradients:
                kinds.append("replicated")
            continue
        for j, batch in enumerate(wanted):
            dealt = Counter(index for part in parts for index in part[j])
            assert dealt == Counter(batch), f"pass {i}, batch {j}: {dealt} instead of {batch}"
        assert with_gradients, f"pass {i} is an evaluation, and is shared out"
        kinds.append("shared")
    return kinds


def by_share(criterion: Callable[..., torch.Tensor], world_size: int) -> Callable[..., torch.Tensor]:
    """Compute a criterion as "split" does: the mean of its values on the ranks' shares, weighted by samples."""

    def of_shares(*batch: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return criterion(*batch)
        shares = [[part[rank::world_size] for part in batch] for rank in range(world_size)]
        weighted = [criterion(*share) * (len(share[0]) / len(batch[0])) for share in shares if len(share[0])]
        return torch.stack(weighted).sum()

    return of_shares


def as_script(program: str, arguments: list[str]) -> tuple[str, dict[str, bytes]]:
    """Run ``python program.py arguments...`` in a forked process; return what it prints and writes."""
    import runpy

    def body(_: object) -> str:
        path = str(HERE / f"{program}.py")
        sys.argv = [path, *arguments]
        with redirect_stdout(io.StringIO()) as text:
            runpy.run_path(path, run_name="__main__")
        return text.getvalue()

    with scratch() as folder:
        return alone(body), files_in(folder)
