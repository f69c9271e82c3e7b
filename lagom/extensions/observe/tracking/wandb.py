"""Weights & Biases: only rank 0 has a real run; other ranks have disabled runs with its id, name and config."""

from __future__ import annotations

import functools
import inspect
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lagom import disk as files
from lagom.extensions.observe.tracking.rank0_answers import Answers
from lagom.patching.importers import on_import
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from lagom.session.session import Session

_PLAIN = (bool, int, float, str, type(None))
_NAMES = ("id", "name", "project", "entity", "group", "job_type")
"""Arguments of ``wandb.init`` that a run has as attributes."""


@contextmanager
def log_once_to_wandb(session: Session) -> Iterator[None]:
    """Patch ``wandb.init``, so that ranks other than 0 get a disabled run, which looks like rank 0's."""
    with ExitStack() as stack:

        def change(module: ModuleType) -> None:
            init = vars(module)["init"]
            if session.notes is not None:
                answers = Answers(session, "wandb")
                stack.enter_context(replaced(module, "init", _shared(session, answers, init)))

        with on_import({"wandb": change}):
            yield


def _shared(session: Session, answers: Answers, original: Callable[..., Any]) -> Callable[..., Any]:
    pid, signature = os.getpid(), inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        if session.has_joined or os.getpid() != pid:
            return original(*args, **kwargs)
        key = answers.key("init")
        if session.rank == 0:
            runs: list[Any] = []

            def begin() -> dict[str, Any]:
                runs.append(original(*args, **kwargs))
                return _facts(runs[0])

            answers.give(key, "", begin)
            return runs[0]
        if files.has_asked():
            session.say_once(
                "the program has asked for its rank and logs to W&B on several ranks: what rank 0 logs is kept"
            )
        answer = answers.receive(key)
        facts = answer.value if answer is not None and answer.error is None else {"config": {}}
        given = signature.bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        config = facts.pop("config")
        run = original(**{**given, **facts, "mode": "disabled"})
        run.config.update(config, allow_val_change=True)
        return run

    return init


def _facts(run: Any) -> dict[str, Any]:
    """Return the facts of rank 0's ``run`` for other ranks: plain values, including config values from a server."""
    facts = {name: value for name in _NAMES if isinstance(value := getattr(run, name, None), str) and value}
    return {**facts, "config": _plain(dict(run.config))}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, _PLAIN):
            kept[name] = value
        elif isinstance(value, dict):
            kept[name] = _plain(value)
        elif isinstance(value, list) and all(isinstance(item, _PLAIN) for item in value):
            kept[name] = value
    return kept
