"""``Join`` messages of tasks."""

from __future__ import annotations

from typing import Any

from lagom.wire.messages import Join


def join(task: int, **more: Any) -> Join:
    """Return the join of ``task``: by default one rank on a host of its own."""
    facts: dict[str, Any] = {
        "task": task,
        "pid": 1,
        "ranks": [task],
        "host": f"host{task}|64:1",
        "ip": f"10.0.0.{task}",
        "store": ("10.0.0.0", 1234) if task == 0 else None,
        "python": "3.11",
        "torch": "2.13.0",
        "gpus": [],
        "cores": 1,
    }
    return Join(**facts | more)
