"""``shown_pictures``: sends the pictures that rank 0 shows to the notebook that started the run."""

from __future__ import annotations

import base64
import functools
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lagom.patching.importers import on_import
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from lagom.session.session import Session

_PYPLOT = "matplotlib.pyplot"
_DISPLAY = "IPython.core.display_functions"
_MAX_TEXT = 700_000
"""Most characters of a picture in base64, since a message of a rank has at most a megabyte."""


@contextmanager
def shown_pictures(session: Session) -> Iterator[None]:
    """Context manager in which ``plt.show()`` and ``display()`` keep the pictures of rank 0 for the driver.

    ``plt.show()`` does so only with a notebook's backend; with it, figures that are open at the end are shown too, as
    at the end of a notebook's cell. ``display()`` keeps figures, and objects with a PNG representation that fits into a
    message, such as Pillow's images.
    """
    with ExitStack() as stack:

        def change(pyplot: Any) -> None:
            stack.enter_context(replaced(pyplot, "show", _showing(pyplot, session)))

        def change_display(functions: Any) -> None:
            original = functions.display
            display = _displaying(original, session)
            for name in (_DISPLAY, "IPython.display"):  # the second module has imported ``display`` from the first
                if getattr(sys.modules.get(name), "display", None) is original:
                    stack.enter_context(replaced(sys.modules[name], "display", display))

        with on_import({_PYPLOT: change, _DISPLAY: change_display}):
            yield
            if _PYPLOT in sys.modules and _is_of_a_notebook():
                sys.modules[_PYPLOT].show()


def _showing(pyplot: Any, session: Session) -> Callable[..., None]:
    original = pyplot.show

    @functools.wraps(original)
    def show(*args: Any, **kwargs: Any) -> None:
        if not _is_of_a_notebook():
            original(*args, **kwargs)
            return
        if session.rank == 0:
            session.progress.pictures.extend(_png(pyplot.figure(number)) for number in pyplot.get_fignums())
        pyplot.close("all")  # a notebook's backend closes figures that it has shown

    return show


def _displaying(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    @functools.wraps(original)
    def display(*objects: Any, **options: Any) -> Any:
        rest = []
        for one in objects:
            text = "" if options.get("raw") else _picture(one)
            if text and session.rank == 0:
                session.progress.pictures.append(text)
            elif not text:
                rest.append(one)
        return original(*rest, **options) if rest or not objects else None

    return display


def _picture(value: Any) -> str:
    """Return a matplotlib figure, or an object with a PNG representation, as PNG in base64.

    Return "" for other objects, and for an object whose PNG does not fit into a message.
    """
    figure = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    if figure is not None and isinstance(value, figure):
        return _png(value)
    make = getattr(value, "_repr_png_", None)
    data = make() if callable(make) and not isinstance(value, type) else None
    text = base64.b64encode(data).decode() if isinstance(data, bytes) else data if isinstance(data, str) else ""
    return text if len(text) <= _MAX_TEXT else ""


def _is_of_a_notebook() -> bool:
    return "inline" in str(sys.modules["matplotlib"].get_backend())


def _png(figure: Any) -> str:
    """Return the figure as PNG in base64, at a lower resolution if the text would be too long for a message."""
    dots = float(figure.dpi)
    while True:
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=dots, bbox_inches="tight")
        text = base64.b64encode(file.getvalue()).decode()
        if len(text) <= _MAX_TEXT or dots < 10:
            return text
        dots /= 2
