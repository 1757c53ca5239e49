"""Compiles schemas beside the step loop, each text once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.outputs import Histogram
from pagemill.engine.structured_output.matcher import CompiledSchema, compile_schema
from pagemill.engine.structured_output.probe import SchemaProbe
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary

_MAX_CACHED = 256
_NUM_THREADS = 2
"""So that one schema that runs into its time limit does not keep all others waiting."""


class SchemaCompiler:
    """Texts to compiled schemas. `compile` and `load_vocabulary` are for the engine's thread."""

    def __init__(self, vocabulary: GrammarVocabulary, seconds: Histogram) -> None:
        """`seconds` hears how long each compilation took."""
        self._vocabulary = vocabulary
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], Future[CompiledSchema]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pagemill-schemas")
        self._own = threading.local()
        self._lock = threading.Lock()
        self.seconds = seconds
        self.hits = 0
        self.misses = 0

    def load_vocabulary(self) -> None:
        """Prepare the token masks. Nothing else in the process runs meanwhile, up to a second or two."""
        self._load()

    def compile(self, kind: str, text: str) -> Future[CompiledSchema]:
        """The schema, now or later; or the InvalidRequest that it ends in, which is remembered as well."""
        key = (kind, text)
        known = self._compiled.get(key)
        if known is not None and not _must_retry(known):
            self.hits += 1
            self._compiled.move_to_end(key)
            return known
        self.misses += 1
        future = self._threads.submit(self._compile, kind, text)
        self._compiled[key] = future
        if len(self._compiled) > _MAX_CACHED:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, kind: str, text: str) -> CompiledSchema:
        started = time.perf_counter()
        try:
            if not hasattr(self._own, "probe"):
                self._own.probe = SchemaProbe(self._vocabulary)
            self._own.probe.check(kind, text)
            return compile_schema(self._load(), kind, text)
        finally:
            with self._lock:
                self.seconds.observe(time.perf_counter() - started)

    def _load(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._vocabulary.build()
            return self._tokenizer


def _must_retry(future: Future[CompiledSchema]) -> bool:
    """It failed for a reason that is not the schema's."""
    return (
        future.done()
        and future.exception() is not None
        and not isinstance(future.exception(), InvalidRequest)
    )
