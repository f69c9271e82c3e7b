"""``own_mp_spawn``: uses lagom's ranks as the processes of ``torch.multiprocessing.spawn``. See Note [Own ranks]."""

from __future__ import annotations

import functools
import pickle
import sys
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch.multiprocessing

from lagom.errors import LagomError
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.session.session import Session


@contextmanager
def own_mp_spawn(session: Session) -> Iterator[None]:
    """Context manager in which ``spawn`` of a function that starts a process group calls it on lagom's ranks.

    ``spawn(f, args, nprocs=world_size)`` calls ``f(rank, *args)`` in this process.

    Raises:
        LagomError: from ``spawn`` with another number or with ``join=False``; and from the start of another process
            whose function starts a process group, or that cannot find a name of ``__main__``.
    """
    module = sys.modules["torch.multiprocessing.spawn"]  # as an attribute of the package, the name is the function
    original: Callable[..., Any] = torch.multiprocessing.spawn

    @functools.wraps(original)
    def spawn(
        fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *more: Any, **rest: Any
    ) -> Any:
        if not (session.distributed and _is_distributed(fn)):
            return original(fn, args, nprocs, join, *more, **rest)
        if nprocs != session.world_size or not join:
            raise LagomError(_refusal(session, f"{nprocs} processes by torch.multiprocessing.spawn", nprocs))
        fn(session.rank, *args)
        return None

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.multiprocessing, "spawn", spawn))
        stack.enter_context(replaced(module, "spawn", spawn))
        stack.enter_context(replaced(BaseProcess, "start", _started(session)))
        yield


def _started(session: Session) -> Callable[..., None]:
    original = vars(BaseProcess)["start"]

    @functools.wraps(original)
    def start(process: Any) -> None:
        if session.distributed:
            target = getattr(process, "_target", None)
            if getattr(target, "__module__", None) == "torch.multiprocessing.spawn":
                target = process._args[0]
            if target is not None and _is_distributed(target):
                raise LagomError(_refusal(session, "processes by multiprocessing"))
        try:
            original(process)
        except (pickle.PicklingError, AttributeError) as error:
            if "__main__" in str(error):
                raise LagomError(_IN_MAIN.format(error=error)) from error
            raise

    return start


def _is_distributed(function: Callable[..., Any]) -> bool:
    from lagom.program.detect_distributed import is_distributed  # only programs that start processes come here

    return is_distributed(function)


_IN_MAIN = (
    "a process that is started anew (spawn, forkserver) cannot find what is defined in __main__, which on a rank is "
    "not the program's script: {error}. Define it in a module that is imported (a file of its own beside the script), "
    "or start the process by fork: multiprocessing_context='fork' of a DataLoader, or none"
)


def _refusal(session: Session, what: str, count: int = 0) -> str:
    remedy = f"run it with world_size={count}, or " if count > 1 else ""
    return (
        f"the program starts ranks of its own, {what}, and each of the {session.world_size} ranks that lagom runs "
        f"would; {remedy}call the function that has init_process_group() directly, or start it by "
        f"torch.multiprocessing.spawn(f, args, nprocs={session.world_size}), or run it with world_size=1"
    )


# Note [Own ranks]
#
# A program for one machine with several GPUs often starts its own ranks: it spawns a process for each GPU, and these
# processes make a process group at an address that is written in the code. Each of lagom's ranks would start such
# processes, all with the same address: the first rank's processes get the address, and those of other ranks join their
# group by mistake or fail. But the call of ``spawn`` says that the program needs f on a number of ranks. If lagom has
# as many ranks, each of them calls f itself, and an error of f keeps its type. Any other number is an error. It is also
# an error to start such processes one by one, since their rank numbers are unknown. Processes that make no process
# group (for example to prepare data) are started on every rank, as the program says.
