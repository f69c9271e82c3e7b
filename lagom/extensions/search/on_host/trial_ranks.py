"""``TrialRanks``: the ranks of one trial, forked before the trial is known. See Note [Ranks that wait]."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import lagom.extensions.search.on_rank.change
import lagom.extensions.search.on_rank.trial_on_rank  # noqa: F401  (before the fork: takes each trial's ranks 15 ms)
from lagom.extensions.search.on_rank.messages import BeginTrial, RunTrial
from lagom.host.forked_rank import ForkedRank
from lagom.host.rank_host import chosen_threads, fork_rank, make_rank_spec
from lagom.host.supervisor import RankSupervisor
from lagom.host.workspace import HostWorkspace
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.framing import anonymous_file
from lagom.wire.messages import Join
from lagom.wire.rendezvous import peers
from lagom.wire.spec import RankSpec, RunSpec


class TrialRanks:
    """Forks the ranks of a trial, which wait for it in a folder that they share."""

    def __init__(self, spec: RunSpec, join: Join, workspace: HostWorkspace, link: DriverClient) -> None:
        """Fork the ranks.

        Raises:
            OSError: if there are not enough processes, files or memory; nothing is left then.
        """
        self._spec = spec
        self._join = join
        self._ranks: list[ForkedRank] = []
        self.outcomes: list[int] = []
        with contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="trial-", dir=workspace.host_dir)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self.place = dataclasses.replace(workspace, host_dir=Path(folder))
            for rank in range(spec.plan.world_size):
                self.outcomes.append(anonymous_file(f"outcome-{rank}"))
                stack.callback(os.close, self.outcomes[rank])
            self.watch = RankSupervisor(link, spec.plan)
            stack.callback(self.watch.end_all)
            for rank_spec in self._rank_specs(()):
                self._ranks.append(fork_rank(spec, rank_spec, self.place))
                self.watch.add(self._ranks[-1])
            self._stack = stack.pop_all()

    @property
    def pids(self) -> Collection[int]:
        """The processes of the ranks."""
        return [rank.pid for rank in self._ranks]

    def begin(self, trial: RunTrial) -> bool:
        """Hand the ranks their trial; return whether all are there, and none was killed while it waited."""
        threads = chosen_threads(self._spec) or trial.threads
        try:
            for rank, rank_spec in zip(self._ranks, self._rank_specs(trial.gpus), strict=True):
                rank.control.send(
                    BeginTrial(
                        number=trial.number,
                        change=trial.change,
                        metric=trial.metric,
                        env=trial.env,
                        gpu=rank_spec.gpu,
                        gpu_index=rank_spec.gpu_index,
                        nccl=rank_spec.nccl,
                        threads=threads or rank_spec.threads,
                    )
                )
        except LinkClosed:
            return False
        return True

    def close(self) -> None:
        """End the ranks, and remove what is left of them."""
        self._stack.close()

    def _rank_specs(self, gpus: Sequence[str]) -> list[RankSpec]:
        table = peers([dataclasses.replace(self._join, gpus=list(gpus))])
        return [
            make_rank_spec(table, rank, self._spec, self.place, fd, None, table.ranks[rank].gpu)
            for rank, fd in enumerate(self.outcomes)
        ]


# Note [Ranks that wait]
#
# A slot forks the ranks of the next trial while one runs. They set themselves up, to the point before anything of the
# program is loaded, and wait there. So the time between two trials has no fork in it (4 to 8 ms, and the copies of
# memory pages after it).
#
# Such a rank does the same as a rank that is forked later. The slot runs nothing of the program, so its memory is the
# same at both times; if it has imported libraries meanwhile (TrialImports), the ranks that wait are replaced. The rank
# looks at the disk when the program does. Environment, number of threads, GPU and random states are set when the trial
# is known. The driver asks the sampler for the trial as late as ever: after it has told the sampler the result of the
# trial before.
#
# A rank that waits has 8 MB of memory of its own, and no thread. If one is killed, the slot forks all ranks anew.
