"""Gives sequences their grammars, and keeps the requests whose schema is still being compiled."""

from __future__ import annotations

from collections.abc import Sequence as SequenceType
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pagemill.engine.errors import EngineError, InvalidRequest, UnsupportedFeature
from pagemill.engine.outputs import Histogram, HistogramSnapshot, LabelValues
from pagemill.engine.sampling_params import StructuredShape
from pagemill.engine.scheduling.request import Grammar, Request
from pagemill.engine.structured_output.choice import ChoiceCompiler, CompiledChoice
from pagemill.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagemill.engine.structured_output.compiler import SchemaCompiler
    from pagemill.engine.structured_output.matcher import CompiledSchema

_COMPILE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FEW_CHARACTERS = 2048
"""Labels up to this size are tokenised at once, in about a millisecond."""


class ReplayableGrammar(Grammar, Protocol):
    def replay(self, token_ids: SequenceType[int]) -> None:
        """Go where an earlier run had got. Raises `InvalidRequest` when these tokens are not allowed."""
        ...


class Compiled(Protocol):
    """What `structured_outputs` came to: the beginning of any number of outputs."""

    def start(self) -> ReplayableGrammar: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    compiled: Future[CompiledSchema] | Future[CompiledChoice]


class Grammars:
    """For one thread, the engine's.

    A schema is compiled elsewhere. Until it is, its request is in none of the scheduler's queues: it holds
    nothing, and when it comes it stands where its arrival puts it.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._choices: ChoiceCompiler | None = None
        self._schemas: SchemaCompiler | None = None
        self._compile_seconds = Histogram(_COMPILE_BUCKETS)
        self._waiting: dict[str, _Waiting] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="pagemill-choices")
        if tokenizer is None:
            return
        self._choices = ChoiceCompiler(tokenizer, eos_token_ids[0] if eos_token_ids else None)
        # Not at the top: an engine without a tokenizer, as benchmarks have it, does without llguidance.
        from pagemill.engine.structured_output.compiler import SchemaCompiler
        from pagemill.engine.structured_output.vocabulary import GrammarVocabulary

        vocabulary = GrammarVocabulary.of(tokenizer, vocab_size, eos_token_ids)
        if vocabulary is not None:
            self._schemas = SchemaCompiler(vocabulary, self._compile_seconds)

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
        return {"grammar_compile_seconds": {(): self._compile_seconds.snapshot()}}

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
        if shape.choice is not None and sum(map(len, shape.choice)) <= _FEW_CHARACTERS:
            _start(request, self._compile_choice(shape.choice, request))
            return True
        compiled = self._compile(shape, request)
        if not compiled.done() or _failed_otherwise(compiled):
            self._waiting[request.request_id] = _Waiting(request, compiled)
            return False
        _start(request, compiled.result())
        return True

    def compiled(self, timeout_s: float) -> list[tuple[Request, EngineError | None]]:
        """The requests whose schema is there, each with what it fails of; waits at most `timeout_s` for the first."""
        if not self._waiting:
            return []
        if timeout_s > 0:
            pending: list[Future[Any]] = [one.compiled for one in self._waiting.values()]
            wait(pending, timeout_s, FIRST_COMPLETED)
        ready = [one for one in self._waiting.values() if one.compiled.done()]
        for one in ready:
            del self._waiting[one.request.request_id]
        return [(one.request, _start_or_error(one)) for one in ready]

    def withdraw(self, request_id: str) -> Request | None:
        """Forget a request that waits; None if none does by this name."""
        waiting = self._waiting.pop(request_id, None)
        return None if waiting is None else waiting.request

    def _compile_choice(self, labels: tuple[str, ...], request: Request) -> CompiledChoice:
        if self._choices is None:
            raise UnsupportedFeature("structured_outputs need a tokenizer, and this model has none")
        return self._choices.compile(labels, request.prompt_token_ids)

    def _compile(
        self, shape: StructuredShape, request: Request
    ) -> Future[CompiledSchema] | Future[CompiledChoice]:
        if shape.choice is not None:
            return self._threads.submit(self._compile_choice, shape.choice, request)
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


def _failed_otherwise(compiled: Future[CompiledSchema] | Future[CompiledChoice]) -> bool:
    """Not the schema is wrong, but something here: an end of that request, and no refusal."""
    error = compiled.exception()
    return error is not None and not isinstance(error, InvalidRequest)


def _start(request: Request, compiled: Compiled) -> None:
    for sequence in request.live_sequences:
        grammar = compiled.start()
        grammar.replay(sequence.output_token_ids)
        sequence.grammar = grammar


def _start_or_error(waiting: _Waiting) -> EngineError | None:
    try:
        _start(waiting.request, waiting.compiled.result())
    except InvalidRequest as error:
        return error
    except Exception as error:  # the process that tries schemas out can't run here: nobody else is harmed
        return EngineError(f"the schema could not be compiled: {type(error).__name__}: {error}")
    return None
