"""The processes of schemas: each compiles one schema and follows the outputs that it constrains.

A schema may come from any client, and native code can't be stopped in a thread. The first process has the
vocabulary and forks one per schema, which shares it. A schema's process has alarms and a memory limit that
the kernel enforces, even inside the library's code, and ends when its socket is closed. See `process.py` for
the other side.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.structured_output.frames import FrameReader, frame
from pagemill.engine.structured_output.matcher import CompiledSchema, MatcherGrammar, compile_schema
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary

TIME_LIMIT_S = 5.0
"""Seconds of real time to compile a schema and to follow it for a few tokens."""
TOKEN_LIMIT_S = 1.0
"""Seconds of CPU time for one token: to take it, and to find the forced and allowed tokens after it."""
REPLAYED_TOKEN_S = 0.005
"""Added to that for each token that an earlier run has generated."""
MEMORY_LIMIT_MIB = 1024
"""For compilation, on top of the first process's memory."""
GROWTH_LIMIT_MIB = 256
"""For following outputs, on top of the memory after compilation."""
_STEPS_FOLLOWED = 16
_NICENESS = 5
_ANSWERS_PER_SIZE = 64
_SEND_INTERVAL_S = 0.002
_CHUNK = 1 << 16


class SchemaServer:
    """One schema's process. Messages over the socket are JSON; in answers a NUL and a token mask follow."""

    def __init__(self, connection: socket.socket, tokenizer: llguidance.LLTokenizer) -> None:
        self._connection = connection
        self._tokenizer = tokenizer
        self._places: dict[int, tuple[MatcherGrammar, list[int]]] = {}
        """Sequence number -> its matcher, and the tokens so far."""
        self._num_answers = 0
        self._size = 0
        self._kind = self._text = ""
        self._schema: CompiledSchema
        self._unsent = bytearray()
        self._sent_at = self._send_interval_s = 0.0

    def run(self, time_limit_s: float, memory_limit_mib: int) -> None:
        self._answer({})  # the process exists: from here on, its end is due to the schema
        self._flush()
        commands = self._commands()
        self._kind, self._text, is_careful = next(commands)
        self._send_interval_s = 0.0 if is_careful else _SEND_INTERVAL_S
        limit_memory(memory_limit_mib << 20)
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        try:
            self._schema = compile_schema(self._tokenizer, self._kind, self._text)
            _follow(self._schema, self._tokenizer.vocab_size)
        except InvalidRequest as error:
            self._answer({"error": [error.code, str(error)]})
            self._flush()
            return
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        limit_memory(GROWTH_LIMIT_MIB << 20)
        self._answer({"bytes": private_bytes()}, self._schema.mask)
        for command in commands:
            self._handle(*command)

    def _commands(self) -> Iterator[list[Any]]:
        """Yield commands. Quick answers are sent together, once none is pending, to wake the engine once."""
        reader = FrameReader()
        while True:
            self._flush()
            received = self._connection.recv(_CHUNK)
            if not received:
                return
            for message in reader.messages(received):
                yield json.loads(message)
                if time.perf_counter() - self._sent_at > self._send_interval_s:
                    self._flush()

    def _handle(self, number: int, start: list[int] | None = None, token: int | None = None) -> None:
        """Place a sequence after its `start` tokens, and take one more. With a number alone: forget it."""
        if start is None and token is None:
            self._places.pop(number, None)
            return
        signal.setitimer(signal.ITIMER_PROF, TOKEN_LIMIT_S + REPLAYED_TOKEN_S * len(start or ()))
        started = time.process_time()
        answer: dict[str, object] = {"id": number, "forced": []}
        mask = b""
        try:
            grammar, forced = self._advance(number, start, token)
            mask = grammar.token_mask()
            answer |= {"forced": forced, "complete": grammar.is_complete}
            if grammar.failure is not None:
                raise grammar.failure
        except InvalidRequest as error:
            answer["error"] = [error.code, str(error)]
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        seconds = time.process_time() - started
        self._num_answers += 1
        if seconds > 0.01 or self._num_answers % _ANSWERS_PER_SIZE == 1:
            self._size = private_bytes()
        self._answer(answer | {"seconds": seconds, "bytes": self._size}, mask)

    def _advance(
        self, number: int, start: list[int] | None, token: int | None
    ) -> tuple[MatcherGrammar, list[int]]:
        if start is not None:
            grammar = self._schema.start()
            grammar.replay(start)
            self._places[number] = grammar, list(start)
        grammar, tokens = self._places[number]
        if token is None:
            return grammar, []
        forced = grammar.advance(token)
        if grammar.failure is not None:
            # All outputs share a lexer with one limit, which retains what they made it build: alone, this one
            # may pass.
            self._schema = compile_schema(self._tokenizer, self._kind, self._text)
            grammar = self._schema.start()
            grammar.replay(tokens)
            forced = grammar.advance(token)
            self._places[number] = grammar, tokens
        tokens += [token, *forced]
        return grammar, forced

    def _answer(self, answer: dict[str, object], mask: bytes = b"") -> None:
        self._unsent += frame(json.dumps(answer).encode() + b"\0" + mask)

    def _flush(self) -> None:
        if self._unsent:
            self._connection.sendall(self._unsent)
            self._unsent.clear()
        self._sent_at = time.perf_counter()


def _follow(schema: CompiledSchema, vocab_size: int) -> None:
    """Generate a short output, so that limits hit by the first tokens are reported before any request runs."""
    grammar, draw = schema.start(), random.Random(0)
    for _ in range(_STEPS_FOLLOWED):
        mask = grammar.token_mask()
        allowed = [token for token in range(vocab_size) if mask[token >> 3] >> (token & 7) & 1]
        grammar.advance(draw.choice(allowed))
        if grammar.failure is not None:
            raise grammar.failure
        if grammar.is_complete:
            return


def limit_memory(more_bytes: int) -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():  # macOS ignores RLIMIT_AS anyway: there the alarms must suffice
        return
    size = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more_bytes, resource.RLIM_INFINITY))


def private_bytes() -> int:
    """Return the memory this process uses beyond what it shares with its parent."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():
        return 16 << 20
    lines = rollup.read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) << 10


def main(control: socket.socket, time_limit_s: float, memory_limit_mib: int) -> None:
    """Run the first process: the vocabulary is its input; then a socket per schema comes over `control`."""
    os.nice(_NICENESS)
    tokenizer = GrammarVocabulary.load(sys.stdin.read()).build()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are never waited for
    gc.collect()
    gc.freeze()  # a collection would write to every shared page
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                control.close()
                try:
                    SchemaServer(connection, tokenizer).run(time_limit_s, memory_limit_mib)
                finally:
                    os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
