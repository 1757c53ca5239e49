"""Assigns grammars to sequences, and holds requests whose schema is being compiled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.errors import EngineError, UnsupportedFeature
from pagemill.engine.outputs import GrammarStats, Histogram, HistogramSnapshot, LabelValues
from pagemill.engine.scheduling.request import Request
from pagemill.engine.scheduling.scoring import start_labels
from pagemill.engine.structured_output.choice import ChoiceCompiler
from pagemill.engine.structured_output.outlined import OutlinedGrammar, TagVocabulary
from pagemill.engine.structured_output.replayed import ReplayedGrammar
from pagemill.engine.structured_output.served_grammar import MaskBudget
from pagemill.engine.tasks import Generate, Outline
from pagemill.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagemill.engine.structured_output.compiler import SchemaCompiler
    from pagemill.engine.structured_output.schema_process import SchemaProcess

_COMPILE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FEW_CHARACTERS = 2048
"""Labels up to this size are tokenized synchronously, in about a millisecond."""


MASK_WAIT_S = 0.05
"""Maximum time that a step waits for masks. The step excludes sequences still without one."""


class _Waiting(Protocol):
    """A request that is not in the scheduler's queues yet."""

    @property
    def request(self) -> Request: ...

    @property
    def is_over(self) -> bool: ...

    def finish(self) -> None:
        """Assign grammars to its sequences. Raises `EngineError`."""
        ...


@dataclass(frozen=True, slots=True)
class _WaitingForLabels:
    request: Request
    compiled: Future[Callable[[], None]]

    @property
    def is_over(self) -> bool:
        return self.compiled.done()

    def finish(self) -> None:
        self.compiled.result()()


@dataclass(frozen=True, slots=True)
class _WaitingForSchema:
    """Waits for the schema, and for its process to replay tokens of earlier runs."""

    request: Request
    schema: SchemaProcess

    @property
    def is_over(self) -> bool:
        grammars = [sequence.grammar for sequence in self.request.live_sequences]
        return self.schema.is_done and all(grammar is None or grammar.is_ready for grammar in grammars)

    def finish(self) -> None:
        self.schema.check()
        self.request.warnings = self.schema.warnings
        for sequence in self.request.live_sequences:
            if sequence.grammar is not None and sequence.grammar.failure is not None:
                raise sequence.grammar.failure


class Grammars:
    """The grammars of an engine's requests. For one thread, the engine's.

    A schema is compiled in another process. Until then its request is not in the scheduler's queues: it does not hold
    resources, and afterwards its arrival determines its position.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        token_text: Callable[[int], str],
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._choices: ChoiceCompiler | None = None
        self._schemas: SchemaCompiler | None = None
        self._compile_seconds = Histogram(_COMPILE_BUCKETS)
        self._waiting: dict[str, _Waiting] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="pagemill-choices")
        self._tags = TagVocabulary(token_text, vocab_size, eos_token_ids)
        if tokenizer is None:
            return
        self._choices = ChoiceCompiler(tokenizer, eos_token_ids[0] if eos_token_ids else None)
        # Imported late: an engine without a tokenizer, as in benchmarks, runs without llguidance.
        from pagemill.engine.structured_output.compiler import SchemaCompiler
        from pagemill.engine.structured_output.fork_server import ForkServer
        from pagemill.engine.structured_output.vocabulary import GrammarVocabulary

        vocabulary = GrammarVocabulary.from_tokenizer(tokenizer, vocab_size, eos_token_ids)
        if vocabulary is not None:
            self._schemas = SchemaCompiler(ForkServer(vocabulary), self._compile_seconds)

    def load_vocabulary(self) -> None:
        """See `SchemaCompiler.load_vocabulary`."""
        if self._schemas is not None:
            self._schemas.load_vocabulary()

    def stats(self) -> GrammarStats:
        return (
            GrammarStats()
            if self._schemas is None
            else GrammarStats(self._schemas.hits, self._schemas.misses)
        )

    def histograms(self) -> dict[str, dict[LabelValues, HistogramSnapshot]]:
        return {"grammar_compile_seconds": {(): self._compile_seconds.snapshot()}}

    def __len__(self) -> int:
        """The number of requests waiting for their schema."""
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def attach(self, request: Request) -> bool:
        """Assign grammars to a request's sequences. Return False if not ready: `compiled` will return it.

        Raises:
            InvalidRequest: the constraint is not possible.
        """
        shape = request.params.structured_outputs
        if shape is None:
            if _outline(request) is not None:
                self._start(request, None)
            return True
        if shape.choice is not None:
            if sum(map(len, shape.choice)) <= _FEW_CHARACTERS:
                self._compile_choice(shape.choice, request)()
                return True
            labels = self._threads.submit(self._compile_choice, shape.choice, request)
            self._waiting[request.request_id] = _WaitingForLabels(request, labels)
            return False
        waiting = _WaitingForSchema(request, self._start_schema(shape, request))
        if waiting.is_over:
            waiting.finish()
            return True
        self._waiting[request.request_id] = waiting
        return False

    def compiled(self, timeout_s: float) -> list[tuple[Request, EngineError | None]]:
        """Return requests whose grammars are ready, with any error; wait at most `timeout_s` for the first."""
        if not self._waiting:
            return []
        labels = [one.compiled for one in self._waiting.values() if isinstance(one, _WaitingForLabels)]
        if timeout_s > 0 and labels:
            wait(labels, timeout_s, FIRST_COMPLETED)
            timeout_s = 0.0
        self.pump(timeout_s)
        over = [one for one in self._waiting.values() if one.is_over]
        for one in over:
            del self._waiting[one.request.request_id]
        return [(one.request, _finish_or_error(one)) for one in over]

    def pump(self, timeout_s: float) -> None:
        """Collect the available masks; wait at most `timeout_s` for the first."""
        if self._schemas is not None:
            self._schemas.pump(timeout_s)

    def wait_for_masks(self) -> None:
        """Wait for fast masks, at most `MASK_WAIT_S`."""
        if self._schemas is not None:
            self._schemas.wait_for_quick(MASK_WAIT_S)

    def close(self) -> None:
        """Stop the processes of schemas."""
        if self._schemas is not None:
            self._schemas.close()

    def withdraw(self, request_id: str) -> Request | None:
        """Remove and return a waiting request; None if no waiting request has this id."""
        waiting = self._waiting.pop(request_id, None)
        return None if waiting is None else waiting.request

    def _compile_choice(self, labels: tuple[str, ...], request: Request) -> Callable[[], None]:
        """Return the object that assigns grammars to the request or, for label probabilities, its chains."""
        if self._choices is None:
            raise UnsupportedFeature("structured_outputs need a tokenizer, and this model has none")
        kind = request.params.label_probs
        if kind is None:
            return partial(
                self._start, request, self._choices.compile(labels, request.prompt_token_ids).start
            )
        return partial(start_labels, request, self._choices.tree(labels, request.prompt_token_ids, kind))

    def _start_schema(self, shape: StructuredOutputs, request: Request) -> SchemaProcess:
        """Assign grammars that are not ready yet to the sequences."""
        if self._schemas is None:
            raise UnsupportedFeature(
                "structured_outputs other than choice need a tokenizer whose tokens have known "
                "bytes, and an EOS token"
            )
        kind, text = next(
            (kind, text)
            for kind in ("regex", "json", "grammar")
            if (text := getattr(shape, kind)) is not None
        )
        schema, budget = self._schemas.compile(kind, text), MaskBudget()
        self._start(request, lambda: schema.grammar(budget))
        return schema

    def _start(self, request: Request, start: Callable[[], ReplayedGrammar] | None) -> None:
        """Assign grammars created by `start` to the sequences, and replay their tokens."""
        outline = _outline(request)
        for sequence in request.live_sequences:
            grammar: ReplayedGrammar
            if outline is not None:
                grammar = OutlinedGrammar(outline, self._tags, start)
            else:
                assert start is not None
                grammar = start()
            grammar.replay(sequence.output_token_ids)
            sequence.grammar = grammar


def _outline(request: Request) -> Outline | None:
    return request.task.outline if isinstance(request.task, Generate) else None


def _finish_or_error(waiting: _Waiting) -> EngineError | None:
    try:
        waiting.finish()
    except EngineError as error:
        return error
    except Exception as error:  # the tokenizer is third-party code
        return EngineError(f"the labels could not be tokenised: {type(error).__name__}: {error}")
    return None
