"""The engine's schemas and their processes: each text is compiled once, within a total memory limit."""

from __future__ import annotations

import select
import time
from collections import OrderedDict, deque

from pagemill.engine.outputs import Histogram
from pagemill.engine.structured_output.nursery import Nursery
from pagemill.engine.structured_output.schema_process import SchemaProcess, must_retry

MAX_BYTES = 512 << 20
"""For all schemas and their processes: idle ones beyond it are dropped; above it, no schema is compiled."""
MOST_BYTES = 1 << 30
"""Beyond it, the largest one ends together with the requests that use it."""
MAX_SCHEMAS = 1024
QUICK_S = 0.005
"""Grammars that took longer for their last token are not waited for while other requests can run."""
_NUM_COMPILING = 2
"""More than one, so that a schema running into its time limit does not hold up all others."""


class SchemaCompiler:
    """Compiles texts to `SchemaProcess`es. For one thread, the engine's; it blocks no longer than told."""

    def __init__(self, nursery: Nursery, seconds: Histogram) -> None:
        """`seconds` records the duration of each compilation."""
        self._nursery = nursery
        self._known: OrderedDict[tuple[str, str], SchemaProcess] = OrderedDict()
        self._queue: deque[tuple[str, str]] = deque()
        self._compiling: list[SchemaProcess] = []
        self._busy: set[SchemaProcess] = set()
        self.seconds = seconds
        self.hits = 0
        self.misses = 0

    @property
    def num_bytes(self) -> int:
        """Memory used here and, as last reported, in the processes."""
        return sum(schema.num_bytes for schema in self._known.values())

    def load_vocabulary(self) -> None:
        """Start reading the tokens' bytes in the process that will need them. Returns at once."""
        self._nursery.start()

    def compile(self, kind: str, text: str) -> SchemaProcess:
        """Return the schema, possibly not compiled yet, or with the error that compiling raised, which is
        cached too.

        `pump` compiles it once it is used.
        """
        key = (kind, text)
        known = self._known.get(key)
        if known is not None and not must_retry(known):
            self.hits += 1
            self._known.move_to_end(key)
            return known
        self.misses += 1
        schema = self._known[key] = SchemaProcess(self._nursery, kind, text, self._busy)
        self._queue.append(key)
        return schema

    def pump(self, timeout_s: float) -> None:
        """Take the processes' answers; waits at most `timeout_s` for the first."""
        if self._queue:
            self._start_queued()
        if not self._busy:
            return
        poll = select.poll()
        for schema in list(self._busy):
            if schema.socket is None:
                self._busy.discard(schema)
            else:
                poll.register(schema.socket, select.POLLIN | (select.POLLOUT if schema.has_to_send else 0))
        poll.poll(timeout_s * 1000)
        changed = [schema for schema in list(self._busy) if schema.pump()]
        if changed:
            self._make_room()
        for schema in [one for one in self._compiling if one.is_done]:
            self._compiling.remove(schema)
            self.seconds.observe(schema.compile_seconds)
        if self._queue:
            self._start_queued()

    def wait_for_quick(self, timeout_s: float) -> None:
        """Wait, at most `timeout_s`, for the answer of every output whose previous one came quickly."""
        deadline = time.perf_counter() + timeout_s
        while any(
            grammar.last_seconds < QUICK_S
            for schema in self._busy
            if schema.is_done
            for grammar in schema.pending.values()
        ):
            left = deadline - time.perf_counter()
            if left <= 0:
                return
            self.pump(left)

    def _start_queued(self) -> None:
        self._make_room()
        while self._queue and len(self._compiling) < _NUM_COMPILING:
            is_full = self.num_bytes > MAX_BYTES and any(
                one.socket is not None for one in self._known.values()
            )
            if is_full:
                return
            key = self._queue.popleft()
            schema = self._known.get(key)
            if schema is None or schema.is_done or schema in self._compiling:
                continue
            if not schema.is_used:  # no request waits for it any more
                del self._known[key]
                continue
            schema.open()
            self._compiling.append(schema)

    def _make_room(self) -> None:
        """Drop the least recently used; end what takes too much memory."""
        taken = self.num_bytes
        for key in list(self._known):
            if taken <= MAX_BYTES and len(self._known) <= MAX_SCHEMAS:
                return
            schema = self._known[key]
            if not schema.is_used and schema not in self._compiling:
                taken -= schema.num_bytes
                schema.close()
                del self._known[key]
        if taken > MOST_BYTES:
            largest = max(self._known.values(), key=lambda schema: schema.num_bytes)
            largest.refuse_all("takes too much memory beside the others that are in use")
