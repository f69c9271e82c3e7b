"""``MicroBatchExaminer``: decide whether a forward may run in micro-batches, and in how many it fits."""

from __future__ import annotations

import io
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from lagom.random_states import equal_random_states, random_states
from lagom.row_split.draws import Draws, UnsupportedDrawError
from lagom.row_split.module_tree import numbers_of
from lagom.row_split.probe import UNIFORM, BatchStatistics, ChangedError, check_probe, examine
from lagom.row_split.recorder import NotByRowsError
from lagom.row_split.restore import SMALL, buffers_of, restored_state
from lagom.row_split.split_candidate import SplitCandidate, SplitFinding, is_batch
from lagom.row_split.whole_batch import Block
from lagom.run_state.oom_errors import wanted_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from lagom.session.session import Session

_slot: Any = vars(torch._C.TensorBase)["grad"]


@dataclass
class MicroBatchFinding:
    """Facts about a module's forward on inputs of one kind."""

    finding: SplitFinding
    """The ``reason`` in it says why the forward does not run in micro-batches."""
    repeats: bool = False
    """The forward changes no state, so it can be repeated."""
    gains: bool = True
    """The forward keeps more for its backward than its inputs and outputs."""
    passing: bool = False
    """The reason may be gone at the next call."""
    ends: list[dict[str, Any]] = field(default_factory=list)
    """States of the generators after each run."""


class MicroBatchExaminer:
    """Examines forwards, and restores all state."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def look(self, candidate: SplitCandidate, num: int) -> MicroBatchFinding:
        """Examine whether ``num`` micro-batches are exact: run the forward whole and in parts, and compare."""
        found = MicroBatchFinding(SplitFinding(candidate.rows))
        try:
            self._find(candidate, found, num)
        except (NotByRowsError, UnsupportedDrawError) as error:
            found.finding.reason = str(error)
        except ChangedError:
            raise
        except Exception as error:
            short = wanted_bytes(error) is not None
            fails = "has no memory to look at a whole batch" if short else "fails on a part of its batch"
            found.finding.reason = f"{fails} ({type(error).__name__}: {str(error)[:200]})"
            found.passing = short
        return found

    def _find(self, candidate: SplitCandidate, found: MicroBatchFinding, num: int) -> None:
        if (weights := self._session.weights) is not None and any(
            weights.parts(p) is not None and float(p.detach().abs().max()) <= SMALL
            for p in candidate.module.parameters()
        ):
            found.passing = True
            raise NotByRowsError("has a parameter that is all but zero still, behind which rows may be mixed")
        if candidate.is_uniform:
            found.passing = True
            raise NotByRowsError(UNIFORM)
        watched = replace(candidate, run=partial(self._watched, candidate, found))
        with self._aside() as noted:
            if not self._compared_whole(watched, found, num, noted):
                self._compare(narrowed(watched, 2 * -(-candidate.rows // num)), found.finding, 2, noted)
            _refuse_statistics(noted)
        if not all(equal_random_states(found.ends[0], end) for end in found.ends):
            raise NotByRowsError("draws other amounts of random numbers for a part of its batch")
        found.gains = not torch.is_grad_enabled() or self._gains(candidate, num)

    def _compared_whole(
        self, watched: SplitCandidate, found: MicroBatchFinding, num: int, noted: list[BatchStatistics]
    ) -> bool:
        """Compare on all rows; return False if memory is short for all rows, but some rows are enough."""
        try:
            self._compare(watched, found.finding, num, noted)
        except Exception as error:
            batches = [leaf for leaf in watched.leaves if is_batch(leaf, watched.rows)]
            # Some rows are enough if only one tensor has rows; of several, one may have this size by chance.
            if wanted_bytes(error) is None or len(batches) != 1 or found.ends:
                raise
            traceback.clear_frames(error.__traceback__)
            return False
        return True

    def _compare(
        self, candidate: SplitCandidate, finding: SplitFinding, num: int, noted: list[BatchStatistics]
    ) -> None:
        def statistics(of_whole: BatchStatistics) -> Any:
            noted.append(of_whole)
            return self._session.statistics(of_whole)

        with torch.no_grad():
            examine(candidate, finding, num, statistics)

    def _watched(self, candidate: SplitCandidate, found: MicroBatchFinding, leaves: list[Any]) -> Any:
        """Run the forward, which must not change any state."""
        before = numbers_of(candidate.inside), _held(candidate.inside)
        buffers = buffers_of(candidate.inside)
        output = candidate.run(leaves)
        same = (numbers_of(candidate.inside), _held(candidate.inside)) == before
        if not same or not all(torch.equal(b, was) for b, was in buffers):
            raise NotByRowsError("changes a buffer or an attribute at each call, of which there would be several")
        found.repeats = True
        found.ends.append(random_states())
        return output

    @contextmanager
    def _aside(self) -> Iterator[list[BatchStatistics]]:
        """Exchange nothing meanwhile, and keep autocast's cache empty: its entries would lack gradients."""
        noted: list[BatchStatistics] = []
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with self._session.probing():
                yield noted
        finally:
            torch.set_autocast_cache_enabled(before)

    def _gains(self, candidate: SplitCandidate, num: int) -> bool:
        """Return whether a part's graph keeps anything besides inputs, outputs, parameters and buffers."""
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.nbytes
            return tensor.detach()  # an output in its own graph would never be freed

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), self._tried(candidate) as noted:
            block = candidate.block_of(Block(0, num, candidate.rows))
            with self._session.statistics(noted):
                outputs = candidate.run(block)
            state = [*candidate.module.parameters(), *candidate.module.buffers()]
            kept = [one for one in tree_leaves((block, outputs)) if isinstance(one, torch.Tensor)]
            for tensor in (*state, *kept):
                saved.pop(tensor.untyped_storage()._cdata, None)
            return bool(saved)

    @contextmanager
    def _tried(self, candidate: SplitCandidate) -> Iterator[BatchStatistics]:
        """Run a part with gradients meanwhile, then restore all state."""
        said = io.StringIO()
        kept = restored_state(candidate.module, candidate.inside, opens=False)
        with self._aside(), kept, redirect_stdout(said), redirect_stderr(said):
            yield BatchStatistics()

    def number(self, candidate: SplitCandidate, least: int) -> int | None:
        """Return a number of micro-batches that fits: twice the first fitting one of ``least`` and its doubles.

        None if no number fits. The trial runs the forward and backward of one micro-batch, with space reserved for the
        outputs of all and their gradients. The trial also holds gradients of all parameters. Twice the number, since
        memory is fragmented and batches differ in size.

        Raises:
            NotByRowsError: when a part cannot be tried.
        """
        check_probe(candidate)
        num = min(least, candidate.rows)
        while True:
            try:
                self._try(candidate, num)
                return min(2 * num, candidate.rows)
            except Exception as error:
                if isinstance(error, NotByRowsError):
                    raise
                if wanted_bytes(error) is None:
                    text = f"cannot be tried on a part of its batch ({type(error).__name__}: {str(error)[:200]})"
                    raise NotByRowsError(text) from error
            if num == candidate.rows:
                return None
            num = min(2 * num, candidate.rows)

    def _try(self, candidate: SplitCandidate, num: int) -> None:
        block = Block(0, num, candidate.rows)
        with self._tried(candidate) as noted, self._session.statistics(noted):
            with Draws(block, {}):
                outputs = candidate.run(candidate.block_of(block))
            _refuse_statistics([noted])
            tensors = [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor)]
            of_all = num * sum(one.nbytes for one in tensors)
            room = torch.empty(2 * of_all, dtype=torch.uint8, device=candidate.device)
            roots = [one for one in tensors if one.requires_grad]
            wanted = [p for p in candidate.module.parameters() if p.requires_grad]
            if not roots or not wanted:
                return
            self._session.depth += 1  # marks the backward as the rank's own
            try:
                torch.autograd.grad(roots, wanted, [torch.zeros_like(one) for one in roots], allow_unused=True)
            finally:
                self._session.depth -= 1
            del room


def backward_has_room(module: nn.Module, outputs: Any, device: torch.device) -> bool:
    """Return whether the missing gradients of parameters and outputs could be allocated now."""
    missing = sum(p.nbytes for p in module.parameters() if p.requires_grad and _slot.__get__(p) is None)
    given = sum(one.nbytes for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad)
    try:
        torch.empty(missing + 2 * given, dtype=torch.uint8, device=device)
    except Exception as error:
        if wanted_bytes(error) is None:
            raise
        return False
    return True


def narrowed(candidate: SplitCandidate, rows: int) -> SplitCandidate:
    """Return the same call with the first ``rows`` rows only."""
    leaves = [leaf[:rows] if is_batch(leaf, candidate.rows) else leaf for leaf in candidate.leaves]
    return replace(candidate, leaves=leaves, rows=rows)


def _held(inside: Sequence[nn.Module]) -> object:
    """Return the ids of the objects in the attributes of ``inside``, and in the lists and dicts among them."""
    holders = [holder for module in inside for holder in (module.__dict__, *module.__dict__.values())]
    return [
        [(key, id(value)) for key, value in holder.items()] if isinstance(holder, dict) else list(map(id, holder))
        for holder in holders
        if isinstance(holder, (dict, list))
    ]


def _refuse_statistics(noted: Sequence[BatchStatistics]) -> None:
    if any(one.noted for one in noted):
        raise NotByRowsError("normalises by statistics of the whole batch (BatchNorm in train mode)")
