"""``choose_slots``: the slots of a search on the launcher of its config."""

from __future__ import annotations

import logging

from lagom.cluster import Cluster
from lagom.driver.inline import InlineLauncher
from lagom.driver.local import LocalLauncher
from lagom.driver.protocol import Launcher
from lagom.extensions.search.slots.trial_slots import TrialSlots
from lagom.plan import Plan
from lagom.program.signature import Call

log = logging.getLogger("lagom")


def num_slots(plan: Plan, cluster: Cluster, wanted: int | None, num_trials: int | None) -> int:
    """Return how many trials of ``plan`` run at a time: ``wanted``, or as many as the cluster has room for.

    At most ``num_trials`` run at a time. ``wanted`` may exceed the room only on CPUs of this machine, and where Spark
    allocates executors without a limit: it then allocates some for each trial.
    """
    room = max(1, cluster.slots // plan.num_slots if cluster.launcher != "local" else cluster.slots // plan.world_size)
    if cluster.launcher == "spark" and cluster.oversubscribe:
        room = max(room, wanted or num_trials or room)
    number = min(wanted or room, num_trials or wanted or room)
    if number > room and (cluster.launcher != "local" or plan.gpu):
        log.warning("num_slots is %d, and there is room for %d trials of %d ranks", number, room, plan.world_size)
        number = room
    return number


def choose_slots(launcher: Launcher, plan: Plan, call: Call, number: int) -> TrialSlots:
    """Return ``number`` slots for the trials of ``call``, not started yet."""
    if isinstance(launcher, InlineLauncher):
        from lagom.extensions.search.slots.inline_slots import InlineSlots

        return InlineSlots(plan, call)
    if isinstance(launcher, LocalLauncher):
        from lagom.extensions.search.slots.local_slots import LocalSlots

        return LocalSlots(plan, call, number)
    from lagom.extensions.search.slots.spark_slots import SparkSlots
    from lagom.spark.spark import SparkLauncher

    assert isinstance(launcher, SparkLauncher)
    return SparkSlots(launcher.facts, plan, call, number)
