"""A schema in the engine: its compilation's result, and the process that follows its outputs. Never blocks."""

from __future__ import annotations

import json
import socket
import sys
import time
import weakref
from collections import deque
from typing import Any

from pagemill.engine.errors import EngineError, InvalidRequest, SchemaTooComplex
from pagemill.engine.structured_output.frames import FrameReader, frame
from pagemill.engine.structured_output.nursery import Nursery
from pagemill.engine.structured_output.served_grammar import MaskBudget, ServedGrammar
from pagemill.engine.structured_output.server import GROWTH_LIMIT_MIB, TOKEN_LIMIT_S

_CHUNK = 1 << 16
_RECORD_BYTES = 4 << 10
"""The size of a schema without a process, besides its text and its mask."""


class SchemaProcess:
    """A schema's process. For the engine's thread. Restarted if it has ended and an output continues."""

    def __init__(self, nursery: Nursery, kind: str, text: str, busy: set[SchemaProcess]) -> None:
        """`busy`: contains it while it has anything to send or receive."""
        self.kind = kind
        self.mask = b""
        self.error: EngineError | None = None
        self.compile_seconds = 0.0
        self.socket: socket.socket | None = None
        self.pending: dict[int, ServedGrammar] = {}
        """Grammars waiting for an answer, in the order the answers come."""
        self._text = text
        self._nursery = nursery
        self._busy = busy
        self._is_compiled = False
        self._has_begun = False
        """True once a process is at the other end: if it ends, the schema is the cause."""
        self._is_careful = False
        """The process sends each answer before starting the next, so that the cause of its end is known."""
        self._started = 0.0
        self._process_bytes = 0
        self._known: set[int] = set()
        """Numbers of the grammars whose places the process has."""
        self._reader = FrameReader()
        self._outgoing = bytearray()
        self._users: weakref.WeakSet[ServedGrammar] = weakref.WeakSet()
        self._forgotten: deque[int] = deque()
        self._closing: weakref.finalize[[], SchemaProcess] | None = None

    @property
    def is_done(self) -> bool:
        """True if compilation has finished or failed."""
        return self._is_compiled or self.error is not None

    @property
    def is_used(self) -> bool:
        """True if any output, begun or not, needs it."""
        return len(self._users) > 0

    @property
    def has_to_send(self) -> bool:
        return bool(self._outgoing)

    @property
    def num_bytes(self) -> int:
        """Memory used here and, as last reported, in the process."""
        return _RECORD_BYTES + sys.getsizeof(self._text) + len(self.mask) + self._process_bytes

    def check(self) -> None:
        """Raise the error that compiling it failed with, if any."""
        if self.error is not None:
            # A copy: the traceback of a shared error would keep alive every frame it passed.
            raise type(self.error)(*self.error.args)

    def grammar(self, budget: MaskBudget) -> ServedGrammar:
        """Create a grammar for a new output; usable once `is_done`."""
        grammar = ServedGrammar(self, budget)
        self._users.add(grammar)
        weakref.finalize(grammar, self._forgotten.append, grammar.number).atexit = False
        return grammar

    def open(self) -> None:
        """Start its process, and compile the schema there."""
        self.socket, self._reader = self._nursery.fork(), FrameReader()
        self._closing = weakref.finalize(self, self.socket.close)
        self._started = time.perf_counter()
        self._busy.add(self)
        self._queue([self.kind, self._text, self._is_careful])

    def close(self) -> None:
        """End its process."""
        if self._closing is not None:
            self._closing()
        self.socket, self._has_begun, self._process_bytes = None, False, 0
        self._known.clear()
        self._forgotten.clear()
        self._outgoing.clear()

    def ask(self, grammar: ServedGrammar) -> None:
        if self.error is not None:
            grammar.fail(type(self.error)(*self.error.args))
            return
        self.pending[grammar.number] = grammar
        if not self.is_done:
            return  # it will be sent once there is a process
        if self.socket is None:
            self.open()
        self._send(grammar)

    def refuse_all(self, reason: str) -> None:
        """Fail the requests whose outputs it follows."""
        self.close()
        self.pending.clear()
        for grammar in list(self._users):
            grammar.refuse(reason)

    def pump(self) -> bool:
        """Send pending messages and take the answers that have arrived. True if its size changed."""
        before = self.num_bytes
        while self._forgotten:
            number = self._forgotten.popleft()
            if number in self._known:
                self._known.discard(number)
                self._queue([number])
        try:
            while self._outgoing and self.socket is not None:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # it has ended, as its socket will show
        self._receive()
        if not self.pending and not self._outgoing and self.is_done:
            self._busy.discard(self)
        return self.num_bytes != before

    def _receive(self) -> None:
        while self.socket is not None:
            try:
                received = self.socket.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            if not received:
                self._ended()
                return
            for message in self._reader.messages(received):
                answer, _, mask = message.partition(b"\0")
                self._take(json.loads(answer), mask)

    def _take(self, answer: dict[str, Any], mask: bytes) -> None:
        self._process_bytes = answer.get("bytes", self._process_bytes)
        if "id" in answer:
            self.pending.pop(answer["id"]).answer(answer, mask)
        elif "error" in answer:
            self._end_compiling(InvalidRequest.of(*answer["error"]))
        elif mask:
            self.mask = mask
            self._end_compiling(None)
        else:
            self._has_begun = True

    def _end_compiling(self, error: EngineError | None) -> None:
        if not self.is_done:
            self.compile_seconds = time.perf_counter() - self._started
            self.error, self._is_compiled = error, error is None
            for grammar in self.pending.values() if error is None else ():
                self._send(grammar)
        if error is not None:
            self.close()
            self._fail_pending(error)

    def _ended(self) -> None:
        """Handle the process's end: its last task exceeded a limit; another process will answer the rest."""
        if not self._has_begun:
            self.close()
            error = EngineError("the process that schemas are compiled in does not start")
            self.error = self.error if self._is_compiled else error
            self._fail_pending(error)
        elif not self.is_done:
            limits = f"{self._nursery.time_limit_s:g} s or {self._nursery.memory_limit_mib} MiB"
            self._end_compiling(SchemaTooComplex(f"structured_outputs.{self.kind}: takes more than {limits}"))
        else:
            self.close()
            waiting = list(self.pending.values())
            self.pending.clear()
            if self._is_careful or len(waiting) == 1:
                for grammar in waiting[:1]:
                    grammar.refuse(f"a token takes more than {TOKEN_LIMIT_S:g} s or {GROWTH_LIMIT_MIB} MiB")
                del waiting[:1]
            self._is_careful = True
            for grammar in waiting:
                self.ask(grammar)

    def _fail_pending(self, error: EngineError) -> None:
        waiting = list(self.pending.values())
        self.pending.clear()
        for grammar in waiting:
            grammar.fail(type(error)(*error.args))

    def _send(self, grammar: ServedGrammar) -> None:
        start = None if grammar.number in self._known else grammar.token_ids
        self._known.add(grammar.number)
        self._busy.add(self)
        self._queue([grammar.number, start, grammar.next_token_id])

    def _queue(self, command: list[Any]) -> None:
        self._outgoing += frame(json.dumps(command).encode())


def must_retry(process: SchemaProcess) -> bool:
    """Return True if it failed for a reason other than the schema."""
    return process.error is not None and not isinstance(process.error, InvalidRequest)
