"""The engine's schemas and their processes; compiles each text once, within a total memory limit."""

from __future__ import annotations

import math
import select
import time
from collections import OrderedDict

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.outputs import Histogram
from pagemill.engine.structured_output.fork_server import ForkServer
from pagemill.engine.structured_output.schema_process import SchemaProcess
from pagemill.engine.structured_output.served_grammar import ServedGrammar

MAX_BYTES = 512 << 20
"""Memory limit of all schemas and processes: above it, idle ones are dropped and no schema is compiled."""
MOST_BYTES = 1 << 30
"""Above this limit, the largest one is stopped together with the requests that use it."""
MAX_SCHEMAS = 1024
QUICK_S = 0.005
"""Steps do not wait for grammars that took longer for their last token, while other requests can run."""
_FREE_WAIT_S = 0.001
"""Maximum wait of a step for each output's mask."""
MAX_CREDIT_S = 0.15
CREDIT_SHARE = 0.05
"""Longer waits use a credit that grows by this share of the time, so that repeatedly slow masks
delay the other outputs by at most `MAX_CREDIT_S` and this share."""
_NUM_COMPILING = 2
"""Maximum number of concurrent first compilations, and of slow ones."""


class SchemaCompiler:
    """Compiles texts to `SchemaProcess`es. For one thread, the engine's; it blocks no longer than its caller allows."""

    def __init__(self, fork_server: ForkServer, seconds: Histogram) -> None:
        """`seconds` records the duration of each compilation."""
        self._fork_server = fork_server
        self._known: OrderedDict[tuple[str, str], SchemaProcess] = OrderedDict()
        self._uncompiled: list[SchemaProcess] = []
        """Schemas with a process are being compiled, the others wait."""
        self._busy: set[SchemaProcess] = set()
        self._credit_s = MAX_CREDIT_S
        self._credited_at = time.perf_counter()
        self.seconds = seconds
        self.hits = 0
        self.misses = 0

    @property
    def num_bytes(self) -> int:
        """Memory used here and, as last reported, in the processes."""
        return sum(schema.num_bytes for schema in self._known.values())

    def load_vocabulary(self) -> None:
        """Start reading the tokens' bytes in the process that will use them. Returns immediately."""
        self._fork_server.start()

    def compile(self, kind: str, text: str) -> SchemaProcess:
        """Return the schema, possibly not compiled yet, or with its compilation error, which is
        cached too.

        `pump` compiles it once it is used.
        """
        key = (kind, text)
        known = self._known.get(key)
        if known is not None and (known.error is None or isinstance(known.error, InvalidRequest)):
            self.hits += 1
            self._known.move_to_end(key)
            return known
        self.misses += 1
        schema = self._known[key] = SchemaProcess(self._fork_server, key, self._busy)
        self._uncompiled.append(schema)
        return schema

    def pump(self, timeout_s: float) -> None:
        """Send requests and collect the processes' replies; wait at most `timeout_s` for the first."""
        if self._uncompiled:
            self._start_compiling()
        poll = select.poll()
        schemas: dict[int, SchemaProcess] = {}
        for schema in list(self._busy):
            events = select.POLLIN | (select.POLLOUT if schema.send() else 0)
            if schema.socket is None:
                self._busy.discard(schema)
            else:
                schemas[schema.socket.fileno()] = schema
                poll.register(schema.socket, events)
        if not schemas:
            return
        changed = [schemas[number].receive() for number, _ in poll.poll(timeout_s * 1000)]
        if any(changed):
            self._make_room()
        if self._uncompiled:
            self._start_compiling()

    def wait_for_quick(self, timeout_s: float) -> None:
        """Wait for the reply for every output whose previous reply was fast.

        The wait is limited by `timeout_s` and by the remaining credit.
        """
        late = self._quick_ones()
        if not late:
            return
        started = now = time.perf_counter()
        elapsed_s, self._credited_at = started - self._credited_at, started
        self._credit_s = min(MAX_CREDIT_S, self._credit_s + CREDIT_SHARE * elapsed_s)
        free_s = _FREE_WAIT_S * len(late)
        deadline = started + min(timeout_s, free_s + self._credit_s)
        while late and now < deadline:
            self.pump(deadline - now)
            late, now = self._quick_ones(), time.perf_counter()
        for grammar in late:
            grammar.last_seconds = math.inf
        self._credit_s -= min(self._credit_s, max(0.0, now - started - free_s))

    def _quick_ones(self) -> list[ServedGrammar]:
        return [
            grammar
            for schema in self._busy
            if schema.is_done
            for grammar in schema.pending.values()
            if grammar.last_seconds < QUICK_S
        ]

    def close(self) -> None:
        """Stop all processes."""
        for schema in self._known.values():
            schema.close()
        self._fork_server.close()

    def _start_compiling(self) -> None:
        """Compile waiting schemas, if there is capacity. Slow schemas wait only for each other."""
        for schema in list(self._uncompiled):
            if schema.is_done:
                self._uncompiled.remove(schema)
                self.seconds.observe(schema.compile_seconds)
            elif schema.socket is None and not schema.is_used:
                self._uncompiled.remove(schema)
                if self._known.get(schema.key) is schema:
                    del self._known[schema.key]
        self._make_room()
        is_full = self.num_bytes > MAX_BYTES and any(one.socket is not None for one in self._known.values())
        for schema in self._uncompiled if not is_full else ():
            if schema.socket is None and self._num_compiling(is_slow=schema.is_slow) < _NUM_COMPILING:
                schema.open()

    def _num_compiling(self, *, is_slow: bool) -> int:
        return sum(one.is_slow == is_slow for one in self._uncompiled if one.socket is not None)

    def _make_room(self) -> None:
        """Drop the least recently used schemas; stop those that use too much memory."""
        taken = self.num_bytes
        for key in list(self._known):
            if taken <= MAX_BYTES and len(self._known) <= MAX_SCHEMAS:
                return
            schema = self._known[key]
            if not schema.is_used and (schema.is_done or schema.socket is None):
                taken -= schema.num_bytes
                schema.close()
                del self._known[key]
        if taken > MOST_BYTES:
            largest = max(self._known.values(), key=lambda schema: schema.num_bytes)
            largest.refuse_all("takes too much memory together with the others in use")
