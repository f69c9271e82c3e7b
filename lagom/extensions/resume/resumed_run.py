"""``resume_run``: continues a run from its last snapshot, in another process than the one that called it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Launcher
from lagom.driver.driver_run import DriverRun
from lagom.driver.preparation import facts_of_code, run_records
from lagom.driver.termination import softly_terminated
from lagom.extensions.resume.kept_call import KeptRun, keep_call, keep_result, read_call, read_result
from lagom.launch import choose
from lagom.plan import plan
from lagom.program.signature import Call
from lagom.restart.kept_snapshots import FOLDER, SnapshotFolder
from lagom.restart.snapshot_copies import SnapshotCopies
from lagom.result import Result
from lagom.run_folder import RunFolder
from lagom.timings import DIGITS, Timings
from lagom.watch.runs import open_run
from lagom.watch.upload import Upload, is_url

if TYPE_CHECKING:
    from lagom.watch.run_dir import RunRecords


@contextmanager
def kept_run(run: DriverRun) -> Iterator[None]:
    """Context manager of a run that keeps snapshots: write its call before it starts, and its result when it ends.

    The snapshots are locked, so that no other process continues from them, and copied if the records go to a URL.
    """
    is_resumed = run.snapshots is not None  # then ``resume_run`` has locked them
    if not is_resumed:
        run.snapshots = keep_call(run.records, run.plan, run.call, run.source)
    snapshots = run.snapshots
    if snapshots is None:
        yield
        return
    run.returned.append(
        lambda value, values: keep_result(snapshots, value, values, run.timings.parts(), run.whole, run.speed)
    )
    with ExitStack() as stack:
        if not is_resumed:
            _lock(stack, snapshots, run.records)
        yield


def _lock(stack: ExitStack, snapshots: SnapshotFolder, records: RunRecords | None) -> None:
    stack.enter_context(snapshots.locked())
    upload = records.upload if records is not None else None
    if upload is not None:
        copies = SnapshotCopies(upload.file_system, upload.root, upload.url)
        stack.callback(lambda: upload.keep() if copies.failed else None)
        stack.enter_context(copies.going_on(snapshots, is_new=True))


def resume_run(run_dir: str | os.PathLike[str], world_size: int | None, launcher: Launcher | None) -> Result:
    """See ``lagom.experiment.resume``."""
    timings = Timings()
    with _locked_run(run_dir) as (folder, run, call, snapshots, upload):
        if (kept := read_result(snapshots)) is not None:
            value, values, parts, whole, speed = kept
            sys.stderr.write(f"lagom: {run.name}: the run had ended already; nothing is computed again\n")
            return Result(
                value,
                values,
                seconds=round(sum(parts.values()), DIGITS),
                timings=parts,
                whole=whole,
                speed=speed,
                name=run.name,
                where="",
                run_dir=folder.path,
                upload=upload,
                module=call.provided.get("module"),
            )
        changed: dict[str, Any] = {"world_size": world_size, "launcher": launcher}
        config = replace(run.config, **{name: value for name, value in changed.items() if value is not None})
        chosen = choose(config.launcher)
        cluster = chosen.cluster()
        facts = facts_of_code(call.function, call.provided, cluster) | {"already_distributed": False}
        the_plan = plan(config, cluster, run.name, **facts)
        began = timings.began
        with (
            softly_terminated(the_plan) as termination,
            run_records(config, the_plan, chosen.where(), run.source, folder, upload, began=began) as records,
        ):
            timings.add_earlier(records.earlier_s if records is not None else 0.0)
            resumed = DriverRun(
                launcher=chosen,
                plan=the_plan,
                call=call,
                timings=timings,
                source=run.source,
                snapshots=snapshots,
                termination=termination,
            )
            try:
                return resumed.run(records)
            except (Exception, KeyboardInterrupt) as error:
                resumed.cut_frames(error)
                raise error  # as in lagom()


@contextmanager
def _locked_run(
    run_dir: str | os.PathLike[str],
) -> Iterator[tuple[RunFolder, KeptRun, Call, SnapshotFolder, Upload | None]]:
    """Lock a run for this process in the context, and yield its folder, facts, call, snapshots and upload.

    A run at a URL is first copied to this machine; other runs have None in place of the upload.
    """
    if not is_url(run_dir):
        opened = open_run(run_dir, TorchDistributedConfig().run_dir)
        with read_call(opened) as (run, call, snapshots), snapshots.locked():
            yield opened, run, call, snapshots, None
        return
    upload = Upload.again(os.fspath(run_dir))
    copies = SnapshotCopies(upload.file_system, upload.root, upload.url)
    try:
        with (
            copies.going_on(SnapshotFolder(str(upload.folder / FOLDER)), is_new=False),
            read_call(folder := RunFolder.open(upload.folder)) as (run, call, snapshots),
        ):
            upload.fetch()
            copies.fetch_newest()
            yield folder, run, call, snapshots, upload
    finally:
        if copies.failed:
            upload.keep()
