"""APIs of Horovod, Maggy and petastorm, served by lagom or made to work beside it.

Start with ``compatible.py``, which loads the packages of this folder when a program imports what they stand for;
``horovodrun.py`` has the options of ``lagom run`` that horovodrun has.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from lagom.extension import Extension

if TYPE_CHECKING:
    import argparse

    from lagom.plan import Plan
    from lagom.session.session import Session


class Compat(Extension):
    """Programs that were written for other projects."""

    name = "compat"
    served_packages = ("horovod", "maggy", "petastorm", "sparkdl")

    def is_wanted(self, plan: Plan) -> bool:
        """Return True: only the program's imports show what it was written for."""
        return True

    def rank(self, session: Session) -> AbstractContextManager[None]:
        """See ``Extension``."""
        from lagom.extensions.compat.compatible import compatible

        entered = ExitStack()

        def enter(stack: ExitStack) -> None:
            stack.enter_context(entered)
            entered.enter_context(compatible(session.plan.already_distributed))

        session.events.patched.subscribe(enter)
        # Other ranks learn that this one has left Horovod's exchanges before it waits for them to end, too.
        session.events.returned.subscribe(entered.close)
        return nullcontext()

    def script(self) -> AbstractContextManager[None]:
        """See ``Extension``."""
        from lagom.extensions.compat.compatible import compatible

        return compatible()

    def add_run_options(self, run: argparse.ArgumentParser) -> None:
        """See ``Extension``."""
        from lagom.extensions.compat.horovodrun import add_horovodrun_options

        add_horovodrun_options(run)

    def adapt_arguments(self, args: argparse.Namespace) -> None:
        """See ``Extension``."""
        from lagom.extensions.compat.horovodrun import adapt_arguments

        adapt_arguments(args)
