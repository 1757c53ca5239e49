"""A schema in the engine: its compilation result, and the process that follows its outputs. Never blocks."""

from __future__ import annotations

import socket
import sys
import time
import weakref
from collections import deque
from itertools import islice
from typing import Any

from pagemill.engine.child_messages import Reader, pack
from pagemill.engine.errors import EngineError, InvalidRequest, SchemaTooComplex
from pagemill.engine.structured_output.fork_server import ForkServer
from pagemill.engine.structured_output.messages import Advance, Answer
from pagemill.engine.structured_output.served_grammar import MaskBudget, ServedGrammar
from pagemill.engine.structured_output.server import GROWTH_LIMIT_MIB, TOKEN_LIMIT_S

_RECORD_BYTES = 4 << 10
"""The size of a schema without a process, excluding its text and mask."""


class SchemaProcess:
    """A schema's process, for the engine's thread. Restarted if it has exited and an output continues."""

    def __init__(self, fork_server: ForkServer, key: tuple[str, str], busy: set[SchemaProcess]) -> None:
        """Create it without a process.

        Args:
            key: kind and text.
            busy: contains it while it has anything to send or receive.
        """
        self.key = key
        self.kind = key[0]
        self.mask = b""
        self.warnings: tuple[str, ...] = ()
        self.error: EngineError | None = None
        self.is_slow = False
        """True if its first process exited during compilation: the next one has more time."""
        self.compile_seconds = 0.0
        self.socket: socket.socket | None = None
        self.pending: dict[int, ServedGrammar] = {}
        """Grammars waiting for a reply, in the order of the replies."""
        self._num_sent = 0
        """Number of them for which a request has been sent."""
        self._fork_server = fork_server
        self._busy = busy
        self._is_compiled = False
        self._has_begun = False
        """True once a process is connected: if it exits, the schema is the cause."""
        self._begun_at = 0.0
        self._is_careful = False
        """True if the last process has exited: send one grammar at a time, so that the next exit has a known cause."""
        self._process_bytes = 0
        self._known: set[int] = set()
        """Numbers of the grammars whose positions the process stores."""
        self._reader = Reader()
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
        """True if any output, started or not, needs it."""
        return len(self._users) > 0

    @property
    def num_bytes(self) -> int:
        """Memory used here and, as last reported, in the process."""
        return _RECORD_BYTES + sys.getsizeof(self.key[1]) + len(self.mask) + self._process_bytes

    def check(self) -> None:
        """Raise its compilation error, if any."""
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
        self.socket, self._reader = self._fork_server.fork(), Reader()
        self._closing = weakref.finalize(self, self.socket.close)
        self._busy.add(self)
        self._outgoing += pack(*self.key, self.is_slow or self._is_compiled)

    def close(self) -> None:
        """Stop its process. Requests for pending grammars are sent again to the next one."""
        if self._closing is not None:
            self._closing()
        self.socket, self._has_begun, self._process_bytes, self._num_sent = None, False, 0, 0
        self._known.clear()
        self._forgotten.clear()
        self._outgoing.clear()

    def request(self, grammar: ServedGrammar) -> None:
        if self.error is not None:
            grammar.fail(type(self.error)(*self.error.args))
            return
        self.pending[grammar.number] = grammar
        if self.is_done:
            self._busy.add(self)

    def refuse_all(self, reason: str) -> None:
        """Fail the requests whose outputs it follows."""
        self.close()
        self.pending.clear()
        for grammar in list(self._users):
            grammar.refuse(reason)

    def send(self) -> bool:
        """Send requests to the process; start one if there is none. Return True if there is more to send."""
        if self._is_compiled and self.pending:
            self._send_pending()
        while self._forgotten:
            number = self._forgotten.popleft()
            if number in self._known:
                self._known.discard(number)
                self._outgoing += pack(*Advance(number))
        try:
            while self._outgoing and self.socket is not None:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # it has exited, as its socket will show
        return bool(self._outgoing)

    def receive(self) -> bool:
        """Process the received replies. Return True if its size changed."""
        before = self._process_bytes
        received = self._fork_server.received
        size = len(received)
        while size == len(received) and self.socket is not None:
            try:
                size = self.socket.recv_into(received)
            except BlockingIOError:
                break
            except OSError:
                size = 0
            for message in self._reader.messages(received[:size]):
                self._take(message)
            if not size:
                self._ended()
        if not self.pending and not self._outgoing and self.is_done:
            self._busy.discard(self)
        return self._process_bytes != before

    def _send_pending(self) -> None:
        if self.socket is None:
            self.open()
        limit = 1 if self._is_careful else len(self.pending)
        for number, grammar in islice(self.pending.items(), self._num_sent, limit):
            start = None if number in self._known else grammar.token_ids
            self._known.add(number)
            self._outgoing += pack(*Advance(number, grammar.next_token_id, start))
        self._num_sent = limit

    def _take(self, message: tuple[Any, ...]) -> None:
        if not message:
            self._has_begun, self._begun_at = True, time.perf_counter()
            return
        answer = Answer(*message)
        self._process_bytes = answer.num_bytes
        if answer.number is None:
            self.mask, self.warnings = answer.mask, tuple(answer.warnings or ())
            self._end_compiling(None if answer.error is None else InvalidRequest.with_code(*answer.error))
            return
        self._num_sent -= 1
        self.pending.pop(answer.number).answer(answer)
        self._is_careful = self._is_careful and bool(self.pending)

    def _end_compiling(self, error: EngineError | None) -> None:
        if not self.is_done:
            self.compile_seconds = time.perf_counter() - self._begun_at
            self.error, self._is_compiled = error, error is None
        if error is not None:
            self.close()
            self._fail_pending(error)

    def _ended(self) -> None:
        """Handle the process's exit: its last task exceeded a limit, unless it had another cause."""
        has_begun = self._has_begun
        if not self._is_compiled and has_begun and self.is_slow:
            limits = f"{self._fork_server.time_limit_s:g} s or {self._fork_server.memory_limit_mib} MiB"
            self._end_compiling(SchemaTooComplex(f"structured_outputs.{self.kind}: takes more than {limits}"))
            return
        self.close()
        if not has_begun:
            error = EngineError("the process that schemas are compiled in does not start")
            self.error = self.error if self._is_compiled else error
            self._fail_pending(error)
        elif not self._is_compiled:
            self.is_slow = True
        else:
            if self._is_careful and self.pending:
                grammar = self.pending.pop(next(iter(self.pending)))
                grammar.refuse(
                    f"a token, or verifying the output, takes more than {TOKEN_LIMIT_S:g} s or {GROWTH_LIMIT_MIB} MiB"
                )
            self._is_careful = bool(self.pending)

    def _fail_pending(self, error: EngineError) -> None:
        waiting = list(self.pending.values())
        self.pending.clear()
        for grammar in waiting:
            grammar.fail(type(error)(*error.args))
