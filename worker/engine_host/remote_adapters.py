"""The names of adapters that an engine in another process has."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.adapters.names import AdapterNames
from pagemill.engine.errors import EngineError
from pagemill.worker.engine_host.messages import AdaptersChanged, ChangeAdapter


class RemoteAdapters(AdapterNames):
    """A copy of the names. Changes are made in the other process, and wait for its reply."""

    def __init__(self, named: Iterable[Adapter]) -> None:
        super().__init__()
        self._named = {one.name: one for one in named}
        self._send: Callable[[ChangeAdapter], None] | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._asked: dict[int, Future[None]] = {}

    def __reduce__(self) -> tuple[type[RemoteAdapters], tuple[list[Adapter]]]:
        return RemoteAdapters, (self.registered(),)

    def connect(self, send: Callable[[ChangeAdapter], None]) -> None:
        self._send = send

    def add(self, name: str, directory: Path) -> None:
        """Have a folder checked, and register a name for it. Raises `EngineError` as `AdapterPool.add` does."""
        self._change("add", name, directory)

    def remove(self, name: str) -> None:
        """Remove a name. Raises `UnknownAdapter`."""
        self._change("remove", name, None)

    def take(self, answer: AdaptersChanged) -> None:
        """Apply the engine's reply to a change."""
        self._named = {one.name: one for one in answer.named}
        with self._lock:
            asked = self._asked.pop(answer.number, None)
        if asked is not None and answer.error is not None:
            asked.set_exception(answer.error)
        elif asked is not None:
            asked.set_result(None)

    def give_up(self) -> None:
        """Reply to waiting callers that the engine's process has ended. Later changes fail too."""
        with self._lock:
            self._send = None
            asked, self._asked = self._asked, {}
        for one in asked.values():
            one.set_exception(EngineError("the engine's process has ended"))

    def _change(self, action: Literal["add", "remove"], name: str, directory: Path | None) -> None:
        answer: Future[None] = Future()
        with self._lock:
            send = self._send
            if send is None:
                raise EngineError("the engine's process has ended")
            number = next(self._numbers)
            self._asked[number] = answer
        send(ChangeAdapter(number, action, name, directory))
        answer.result()
