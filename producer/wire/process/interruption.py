"""Distinguishes exceptions of signal handlers from those of the interrupted code."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):
    """Carries a handler's exception through a library that would retry after an error of its class."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(str(raised))
        self.raised = raised


@contextmanager
def carrying_interruptions() -> Iterator[None]:
    """Raise Interrupted for exceptions that a handler raised in the block."""
    try:
        yield
    except Exception as error:
        if (raised := interruption(error)) is not None:
            raise Interrupted(raised) from raised
        raise


def interruption(error: BaseException) -> BaseException | None:
    """Return the exception that a Python signal handler raised, even if libraries wrapped it; otherwise None.

    A handler's exception appears wherever the main thread is, like a library's own: many raise TimeoutError.
    """
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    seen: list[BaseException] = []
    while error not in seen:
        if isinstance(error, Interrupted):
            return error.raised
        seen.append(error)
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            return error
        error = error.__cause__ or error.__context__ or error
    return None


def _code(handler: Any) -> Any:
    """Return the code of a function, of a method, or of a partial's function; None for other handlers."""
    handler = getattr(handler, "func", handler)
    return getattr(getattr(handler, "__func__", handler), "__code__", None)
