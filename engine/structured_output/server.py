"""The processes of schemas: each compiles one schema and follows its constrained outputs.

A schema may come from any client, and native code can't be stopped in a thread. The first process has the
vocabulary and forks one per schema, which shares it. A schema's process has alarms and a memory limit that
the kernel enforces, even inside the library's code, and exits when its socket is closed. See `schema_process.py`
for the other side.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import llguidance

from pagemill.engine.child_messages import Reader, pack
from pagemill.engine.child_process import limit_memory, memory
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.structured_output.matcher import CompiledSchema, MatcherGrammar, compile_schema
from pagemill.engine.structured_output.messages import Advance, Answer
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary, has_name

TIME_LIMIT_S = 5.0
"""Seconds of real time to compile a schema and to follow it for a few tokens."""
QUICK_LIMIT_S = 0.05
"""Seconds of CPU time of a first attempt, so that hostile schemas do not delay others for long."""
TOKEN_LIMIT_S = 1.0
"""Seconds of CPU time for one token: to accept it, and to find the forced and allowed tokens after it."""
REPLAYED_TOKEN_S = 0.005
"""Additional CPU time for each token that an earlier run has generated."""
MEMORY_LIMIT_MIB = 1024
"""Memory for compilation, in addition to the first process's."""
GROWTH_LIMIT_MIB = 256
"""Memory for following outputs, in addition to that after compilation."""
_COPIED_BYTES = 2 << 20
"""Approximate part of the first process's memory that is written to and therefore copied."""
_STEPS_FOLLOWED = 16
_NICENESS = 5
_ANSWERS_PER_SIZE = 256
_SLOW_S = 0.001
_ARM_INTERVAL_S = 0.01
_SEND_INTERVAL_S = 0.002
_CHUNK = 1 << 16


class SchemaServer:
    """One schema's process."""

    def __init__(
        self,
        connection: socket.socket,
        tokenizer: llguidance.LLTokenizer,
        vocabulary: GrammarVocabulary,
        names: tuple[str, ...],
    ) -> None:
        self._connection = connection
        self._tokenizer = tokenizer
        self._vocabulary, self._names = vocabulary, names
        self._eos_token_ids = vocabulary.eos_token_ids
        self._places: dict[int, tuple[MatcherGrammar, list[int]]] = {}
        """Sequence number -> its matcher, and the tokens so far."""
        self._answers_to_size = _ANSWERS_PER_SIZE
        """Number of replies until the memory is measured again."""
        _, self._shared_bytes = memory()
        self._size = 0
        self._kind = self._text = ""
        self._schema: CompiledSchema
        self._unsent = bytearray()
        self._sent_at = 0.0
        self._armed_at = self._armed_cpu_s = 0.0

    def run(self, time_limit_s: float, memory_limit_mib: int) -> None:
        self._connection.sendall(pack())  # the process exists: from now on, the schema causes its exit
        messages = self._messages()
        self._kind, self._text, is_slow = next(messages)
        limit_memory(memory_limit_mib << 20)
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        self._arm(0.0 if is_slow else QUICK_LIMIT_S)
        if has_name(self._kind, self._text, self._names):
            self._tokenizer = self._vocabulary.without_names().build()
        try:
            self._schema = compile_schema(self._tokenizer, self._kind, self._text)
            _follow(self._schema, self._tokenizer.vocab_size)
        except InvalidRequest as error:
            self._answer(Answer(None, error=(error.code, str(error))))
            self._flush()
            return
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._arm(TOKEN_LIMIT_S)
        limit_memory(GROWTH_LIMIT_MIB << 20)
        self._measure()
        self._answer(Answer(None, self._size, mask=self._schema.mask, warnings=list(self._schema.warnings)))
        for message in messages:
            self._handle(Advance(*message))

    def _messages(self) -> Iterator[tuple[Any, ...]]:
        """Yield messages. Fast replies are sent together, once no message is pending, to wake the engine once."""
        reader, chunk = Reader(), memoryview(bytearray(_CHUNK))
        while True:
            self._flush()
            if self._answers_to_size <= 0:  # between two requests, so that it does not delay a reply
                self._measure()
            size = self._connection.recv_into(chunk)
            if not size:
                return
            self._sent_at = time.perf_counter()
            for message in reader.messages(chunk[:size]):
                yield message
                if time.perf_counter() - self._sent_at > _SEND_INTERVAL_S:
                    self._flush()

    def _handle(self, ask: Advance) -> None:
        if ask.start is None and ask.token is None:
            self._places.pop(ask.number, None)
            return
        started = time.perf_counter()
        if ask.start or started - self._armed_at > _ARM_INTERVAL_S:
            self._arm(TOKEN_LIMIT_S + REPLAYED_TOKEN_S * len(ask.start or ()))
        error, mask, is_complete, replayed_s = None, b"", False, 0.0
        forced: list[int] = []
        try:
            if ask.start is not None:
                self._place(ask.number, ask.start)
                replayed_s = time.perf_counter() - started
            grammar, forced = self._advance(ask)
            mask, is_complete = grammar.token_mask(), grammar.is_complete
            if grammar.failure is not None:
                raise grammar.failure
            if is_complete and self._schema.verifier is not None:
                self._schema.verifier.check(self._written(ask.number))
        except InvalidRequest as raised:
            error, is_complete = (raised.code, str(raised)), False
        seconds = time.perf_counter() - started
        if seconds > _SLOW_S:  # what another process took of this time may be most of it
            seconds = min(seconds, time.process_time() - self._armed_cpu_s)
            self._armed_at = 0.0
        self._answers_to_size -= 1
        if seconds > 0.01:
            self._measure()
        self._answer(Answer(ask.number, self._size, seconds, is_complete, forced, error, mask, replayed_s))

    def _measure(self) -> None:
        """Measure the memory actually copied from the first process: a kernel query of 3 ms."""
        self._answers_to_size = _ANSWERS_PER_SIZE
        self._size = _COPIED_BYTES + max(0, memory()[1] - self._shared_bytes)

    def _arm(self, seconds: float) -> None:
        """Stop the process after this CPU time, unless armed again. Not called per token, which would cost more."""
        signal.setitimer(signal.ITIMER_PROF, seconds)
        self._armed_at, self._armed_cpu_s = time.perf_counter(), time.process_time()

    def _place(self, number: int, token_ids: list[int]) -> None:
        grammar = self._schema.start()
        grammar.replay(token_ids)
        self._places[number] = grammar, list(token_ids)

    def _advance(self, ask: Advance) -> tuple[MatcherGrammar, list[int]]:
        grammar, tokens = self._places[ask.number]
        if ask.token is None:
            return grammar, []
        forced = grammar.advance(ask.token)
        if grammar.failure is not None:
            # All outputs share a lexer with one limit, which accumulates their states: alone, this one
            # may succeed.
            self._schema = compile_schema(self._tokenizer, self._kind, self._text)
            grammar = self._schema.start()
            grammar.replay(tokens)
            forced = grammar.advance(ask.token)
            self._places[ask.number] = grammar, tokens
        tokens += [ask.token, *forced]
        return grammar, forced

    def _written(self, number: int) -> bytes:
        """Return an output's text."""
        _, tokens = self._places[number]
        text: bytes = self._tokenizer.decode_bytes(
            tokens[:-1] if tokens[-1] in self._eos_token_ids else tokens
        )
        return text

    def _answer(self, answer: Answer) -> None:
        self._unsent += pack(*answer)

    def _flush(self) -> None:
        if self._unsent:
            self._connection.sendall(self._unsent)
            self._unsent.clear()
        self._sent_at = time.perf_counter()


def _follow(schema: CompiledSchema, vocab_size: int) -> None:
    """Generate a short output, so that limits hit by the first tokens are reported before any request runs."""
    grammar, draw = schema.start(), random.Random(0)
    for _ in range(_STEPS_FOLLOWED):
        allowed = int.from_bytes(grammar.token_mask(), "little")
        rank = draw.randrange(allowed.bit_count()) + 1
        grammar.advance(
            bisect_left(range(vocab_size), rank, key=lambda token: (allowed & ((2 << token) - 1)).bit_count())
        )
        if grammar.failure is not None:
            raise grammar.failure
        if grammar.is_complete:
            return


def main(control: socket.socket, time_limit_s: float, memory_limit_mib: int) -> None:
    """Run the first process: the vocabulary is its input; then it receives a socket per schema over `control`."""
    os.nice(_NICENESS)
    vocabulary = GrammarVocabulary.load(sys.stdin.read())
    tokenizer, names = vocabulary.build(), vocabulary.special_names()
    # Once, before processes fork: this alone takes longer than most schemas.
    importlib.import_module("pagemill.engine.structured_output.verifier")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the process does not wait for children
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
                    SchemaServer(connection, tokenizer, vocabulary, names).run(time_limit_s, memory_limit_mib)
                finally:
                    os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
