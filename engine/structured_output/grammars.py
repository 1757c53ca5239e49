"""Gives sequences their grammars, and keeps the requests whose schema is still being compiled."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Protocol

from engine.errors import EngineError, InvalidRequest, UnsupportedFeature
from engine.outputs import Histogram, HistogramSnapshot, LabelValues
from engine.sampling_params import StructuredOutputs
from engine.scheduling.request import Grammar, Request
from engine.structured_output.choice import ChoiceCompiler
from engine.structured_output.compiler import COMPILE_BUCKETS, SchemaCompiler
from engine.structured_output.matcher import CompiledSchema
from engine.structured_output.vocabulary import GrammarVocabulary
from engine.tokenizer import Tokenizer


class ReplayableGrammar(Grammar, Protocol):
    def replay(self, token_ids: SequenceType[int]) -> None:
        """Go where an earlier run had got. Raises `InvalidRequest` when these tokens are not allowed."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    schema: Future[CompiledSchema]


class Grammars:
    """For one thread, the engine's.

    A schema is compiled elsewhere. Until it is, its request is in none of the scheduler's queues: it holds
    nothing, and when it comes it stands where its arrival puts it.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._choices: ChoiceCompiler | None = None
        self._schemas: SchemaCompiler | None = None
        self._waiting: dict[str, _Waiting] = {}
        if tokenizer is None:
            return
        self._choices = ChoiceCompiler(tokenizer, eos_token_ids[0] if eos_token_ids else None)
        vocabulary = GrammarVocabulary.of(tokenizer, vocab_size, eos_token_ids)
        if vocabulary is not None:
            self._schemas = SchemaCompiler(vocabulary)

    def load_vocabulary(self) -> None:
        """See `SchemaCompiler.load_vocabulary`."""
        if self._schemas is not None:
            self._schemas.load_vocabulary()

    @property
    def cache_hits(self) -> int:
        return self._schemas.hits if self._schemas is not None else 0

    @property
    def cache_misses(self) -> int:
        return self._schemas.misses if self._schemas is not None else 0

    def histograms(self) -> dict[str, dict[LabelValues, HistogramSnapshot]]:
        seconds = self._schemas.seconds if self._schemas is not None else Histogram(COMPILE_BUCKETS)
        return {"grammar_compile_seconds": {(): seconds.snapshot()}}

    def __len__(self) -> int:
        """Requests that wait for their schema."""
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def attach(self, request: Request) -> bool:
        """Give a request's sequences their grammars. False: not now, `compiled` will hand it back.

        Raises:
            InvalidRequest: it can't have what it asks for.
        """
        shape = request.params.structured_outputs
        if shape is None:
            return True
        if shape.choice is not None:
            if self._choices is None:
                raise UnsupportedFeature("structured_outputs need a tokenizer, and this model has none")
            labels, compiler, prompt = shape.choice, self._choices, request.prompt_token_ids
            _start(request, lambda: compiler.compile(labels, prompt))
            return True
        schema = self._compile(shape)
        if not schema.done() or _failed_otherwise(schema):
            self._waiting[request.request_id] = _Waiting(request, schema)
            return False
        _start(request, schema.result().start)
        return True

    def compiled(self, timeout_s: float) -> list[tuple[Request, EngineError | None]]:
        """The requests whose schema is there, each with what it fails of; waits at most `timeout_s` for the first."""
        if not self._waiting:
            return []
        if timeout_s > 0:
            wait((one.schema for one in self._waiting.values()), timeout_s, FIRST_COMPLETED)
        ready = [one for one in self._waiting.values() if one.schema.done()]
        for one in ready:
            del self._waiting[one.request.request_id]
        return [(one.request, _start_or_error(one)) for one in ready]

    def withdraw(self, request_id: str) -> Request | None:
        """Forget a request that waits; None if none does by this name."""
        waiting = self._waiting.pop(request_id, None)
        return None if waiting is None else waiting.request

    def _compile(self, shape: StructuredOutputs) -> Future[CompiledSchema]:
        if self._schemas is None:
            raise UnsupportedFeature(
                "structured_outputs other than choice need a tokenizer that says which bytes its tokens stand "
                "for, and an EOS token"
            )
        for kind in ("regex", "json", "grammar"):
            text = getattr(shape, kind)
            if text is not None:
                return self._schemas.compile(kind, text)
        raise AssertionError("StructuredOutputs checks that one of its fields is set")


def _failed_otherwise(schema: Future[CompiledSchema]) -> bool:
    """Not the schema is wrong, but something here: an end of that request, and no refusal."""
    error = schema.exception()
    return error is not None and not isinstance(error, InvalidRequest)


def _start(request: Request, start: Callable[[], ReplayableGrammar]) -> None:
    for sequence in request.live_sequences:
        grammar = start()
        grammar.replay(sequence.output_token_ids)
        sequence.grammar = grammar


def _start_or_error(waiting: _Waiting) -> EngineError | None:
    try:
        _start(waiting.request, waiting.schema.result().start)
    except InvalidRequest as error:
        return error
    except Exception as error:  # the process that tries schemas out can't run here: nobody else is harmed
        return EngineError(f"the schema could not be compiled: {type(error).__name__}: {error}")
    return None
