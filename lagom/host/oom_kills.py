"""``num_kills``: count the processes that the system killed as memory ran out; a rank may be one of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path


def num_kills(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> dict[str, int]:
    """Return the kills in this process's control group, which has a container's limit, and on the whole machine.

    A count that cannot be read is missing.
    """
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        if counts := _of_groups(root, proc):
            found["container"] = counts[0]
    with contextlib.suppress(OSError):
        if counted := re.search(r"^oom_kill (\d+)$", (proc / "vmstat").read_text(), flags=re.MULTILINE):
            found["machine"] = int(counted[1])
    return found


def _of_groups(root: Path, proc: Path) -> list[int]:
    """Return the count of the innermost control group (version 1 or 2) that has one, in a list; [] if none has one."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.oom_control") if controllers else (root, "memory.events")
        # In a container the path may be the host's and not exist here: then the root is the container's own group.
        for folder in (base / path.lstrip("/"), base):
            with contextlib.suppress(OSError):
                counted = re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), flags=re.MULTILINE)
                if counted:
                    return [int(counted[1])]
    return []


def oom_kill_text(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Explain a SIGKILL that lagom did not send, as the end of a sentence."""
    more = {where for where in before if after.get(where, 0) > before[where]}
    if "container" in more:
        return ", by the system, as memory ran out within the limit of this container"
    if "machine" in more:
        return ", by the system, as this machine's memory ran out"
    if "machine" in before:
        return ", which a person or a cluster manager has sent: this machine did not run out of memory"
    return ", as the system does when memory runs out"
