"""``is_secret``: recognizes by their names settings whose values must not be written to a run's folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "(hidden)"
"""Replacement for a hidden value."""
_ALWAYS = frozenset(["password", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials"])
_UNLESS_NUMBERS = frozenset(
    ["key", "keys", "token", "tokens", "apikey", "auth"]
)  # max_tokens is no secret, and access_token is one
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_URL = re.compile(r"""([A-Za-z][A-Za-z0-9+.-]*://)([^\s/?#'"]*@)?([^\s?#'"]*)([?#][^\s'"]*)?""")
"""Scheme, user, host and path, and query or fragment."""
_ASSIGNED = re.compile(r"""([A-Za-z_]\w*)(['"]?\s*[=:]\s*)('[^']*'|"[^"]*"|[^\s,)}\]]+)""")


def is_secret(name: str, value: Any) -> bool:
    """Return whether a setting of that name is a secret, such as ``password``, ``api_key`` and ``hfToken``."""
    if value is None or isinstance(value, bool):
        return False
    words = {word.lower() for word in _WORD.findall(name)}
    return bool(words & _ALWAYS) or (bool(words & _UNLESS_NUMBERS) and not isinstance(value, (int, float)))


def hide_in_text(text: str) -> str:
    """Return the text of an object, such as ``Namespace(lr=0.1, token='x')``, without its secrets."""

    def hide(found: re.Match[str]) -> str:
        name, between, value = found.groups()
        number = re.fullmatch(r"[-+.\deE]+", value)
        known = float(0) if number else None if value == "None" else value
        return f"{name}{between}{HIDDEN}" if is_secret(name, known) else found.group()

    return _ASSIGNED.sub(hide, text)


def hide_in_urls(text: str) -> str:
    """Return ``text`` without the user, the query and the fragment of each URL in it: they may hold a secret."""

    def hide(found: re.Match[str]) -> str:
        scheme, user, place, query = found.groups()
        return scheme + (f"{HIDDEN}@" if user else "") + place + (f"{query[0]}{HIDDEN}" if query else "")

    return _URL.sub(hide, text)


def hide_in_command(words: Sequence[str]) -> list[str]:
    """Return a command line without the values of secrets: ``--token=x``, ``--token x``, ``s3://bucket?key=x``."""
    hidden, after = list[str](), False
    for word in words:
        name, equals, value = word.partition("=")
        secret = name.startswith("-") and is_secret(name, value)
        shown = (
            f"{name}={HIDDEN}"
            if secret and equals
            else HIDDEN
            if after and not word.startswith("-")
            else hide_in_urls(word)
        )
        hidden.append(shown)
        after = secret and not equals
    return hidden
