"""A request, as submitted by the caller, and its n sequences, each with separate tokens, blocks and row."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagemill.engine.errors import EngineError
from pagemill.engine.media import PromptMedia
from pagemill.engine.outputs import FinishReason
from pagemill.engine.plan import RowWork, TokenLogprobs
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.label_tree import LabelScores, LabelTree
from pagemill.engine.scheduling.speculation.prompt_lookup import PromptLookup
from pagemill.engine.scheduling.stay import Stay
from pagemill.engine.tasks import GENERATE, Score, Task

Candidates = list[tuple[int, float]]
"""(token id, log probability), best first."""


class Grammar(Protocol):
    """A constraint on a sequence's next token. One per sequence; independent of the model."""

    def allowed_token_ids(self) -> list[int] | None:
        """The allowed next tokens; None = any, or see `token_mask`."""
        ...

    def token_mask(self) -> bytes | None:
        """The allowed next tokens as a bit per token id, lowest bit first, for long lists. None = any."""
        ...

    def prepare(self, token_id: int) -> None:
        """Start computing the state after a sampled token; call `advance` once the grammar is ready."""
        ...

    @property
    def is_ready(self) -> bool:
        """True once the prepared state is available."""
        ...

    def advance(self, token_id: int) -> list[int]:
        """Accept the prepared token; return the tokens that are forced to follow it (jump-forward)."""
        ...

    @property
    def may_sample_again(self) -> bool:
        """False if the next sampled token is probably the last one: all that follow are forced."""
        ...

    @property
    def is_complete(self) -> bool:
        """True if no token can follow: the sequence ends with finish reason `stop`."""
        ...

    @property
    def failure(self) -> EngineError | None:
        """Why it can't continue: it exceeded a limit or received a disallowed token. The request fails."""
        ...


class Scoring(Protocol):
    """Log-probabilities requested for a sequence with given tokens, which samples none; see scoring.py."""

    num_scored: int
    """Number of tokens after the prompt that are scored like the prompt's."""

    @property
    def is_complete(self) -> bool:
        """True if all requested values were found."""
        ...

    @property
    def num_cacheable_tokens(self) -> int:
        """Number of leading tokens that the missing values do not require to be computed."""
        ...

    def request(self, work: RowWork) -> None:
        """Request the values that these tokens determine."""
        ...

    def take(self, work: RowWork, found: Any) -> Ends | None:
        """Record a step's values; return the sequences that it ends, and the updates for the caller. Repeated values
        have no effect."""
        ...


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    """Holds a row and blocks."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request: `num_computed_tokens` chases `num_tokens`; there are no phases."""

    request: Request
    index: int
    """0..n-1, the sample index."""
    output_token_ids: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    row: int | None = None
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose KV is in the cache, or to be written by a step already planned."""
    num_pending_tokens: int = 0
    """Samples planned in steps that have not retired, and one for which the sequence is held. The host proceeds
    without them."""
    is_held: bool = False
    """True if its newest step has retired and its next token is undecided: the grammar is not ready, or a driver
    chooses among candidates. It is left out of steps."""
    grammar: Grammar | None = None
    last_step_id: int = -1
    """The newest step whose plan references this sequence's blocks."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of known tokens, computed on demand."""
    num_registered_blocks: int = 0
    """Number of leading blocks of the table that are already in the prefix cache."""
    state_ends: tuple[int, ...] = ()
    """Numbers of computed tokens after which its recurrent state will be cached."""
    forced_token_ids: list[tuple[int, int]] = field(default_factory=list)
    """(position, token) of tokens that were not sampled and not yet sent to execution."""
    is_row_new: bool = False
    """True if it got its row between two steps: the next plan with work for it must bring a `NewRow`."""
    continuation: tuple[int, ...] = ()
    """Its given tokens. `output_token_ids` has all but the last, which predicts nothing."""
    scoring: Scoring | None = None
    """The values requested for its continuation. None: it samples."""
    fork_of: Sequence | None = None
    """The chain whose first `fork_at` tokens this one shares; it enters once they are computed."""
    fork_at: int = 0
    num_lost_tokens: int = 0
    """Number of computed tokens that a preemption discarded; 0 after readmission."""
    kept_entries: range = range(0)
    """Entries of its table that the host tier stored under the sequence's key at its preemption."""
    num_kept_tokens: int = 0
    """Computed tokens at that preemption."""
    lookup: PromptLookup | None = None
    """The predictor of its next tokens, once it has drafted."""
    displaced_at: int | None = None
    """Number of known tokens when it last lost its row to an urgent request."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt and output tokens whose values the host knows."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are known or in flight."""
        return self.num_known_tokens + self.num_pending_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def can_enter(self) -> bool:
        """True unless it waits for a parent to compute their shared tokens."""
        parent = self.fork_of
        if parent is None or parent.is_finished:
            return True
        return parent.status is SequenceStatus.RUNNING and parent.num_computed_tokens >= self.fork_at

    @property
    def num_cacheable_tokens(self) -> int:
        """Number of leading tokens that the prefix cache may serve: a token that is not computed has no logits."""
        if self.scoring is not None:
            return self.scoring.num_cacheable_tokens
        return 0 if self.request.lacks_prompt_logprobs() else self.num_known_tokens - 1

    def token_ids(self) -> list[int]:
        """Every known token, prompt first, including a continuation's last, which is not computed."""
        return self.request.prompt_token_ids + (list(self.continuation) or self.output_token_ids)

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Return the known tokens at positions start..end-1, without copying a long prompt."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        output = self.output_token_ids[max(0, start - len(prompt)) : end - len(prompt)]
        return prompt[start:] + output


@dataclass(slots=True, eq=False)
class Request:
    """A caller's request, already validated and tokenized."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    """`max_tokens` is resolved (never None)."""
    seed: int
    priority: int = 0
    """Lower runs first, as in vLLM."""
    arrival: float = 0.0
    """Orders requests of equal priority; kept through preemption."""
    task: Task = GENERATE
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Prompt tokens served by the prefix cache when the request was first admitted."""
    num_step_failures: int = 0
    """Steps that raised while this request was in them."""
    insertion: int = 0
    """The number of requests added before it; breaks ties of priority and arrival. Set by the scheduler."""
    max_num_tokens: int = 0
    """Prompt + max_tokens, within the model's context: `length` ends it there. Set by the scheduler."""
    cache_salt: str = ""
    """Only requests with the same salt share prefix cache blocks."""
    media: PromptMedia | None = None
    """Vectors for some of the prompt's tokens. None: text only."""
    adapter_slot: int = -1
    """Slot of its adapter in execution; -1: none. Set before it is scheduled."""
    is_plain: bool = False
    """One sample, without candidates, grammar or log probabilities of the prompt: its next work depends only on its
    token counts. Set by `classify`."""
    num_candidates: int = 0
    """Most likely tokens that a step returns for each sequence, which is then held until a driver extends or ends it.
    0: tokens are sampled."""
    was_admitted: bool = False
    """True once it has entered a step."""
    admitted_at: float = 0.0
    """`time.monotonic()` at its first admission."""
    stay: Stay = field(default_factory=Stay)
    """Breakdown of its time."""
    peak_blocks: int = 0
    """Maximum number of KV blocks in its samples' tables together, whenever one of them left the batch."""
    warnings: tuple[str, ...] = ()
    """Warnings about the output for the caller."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """`params.bad_words` as token sequences."""
    labels: LabelTree | None = None
    """The tree whose chains are this request's sequences; only the first of them is reported."""
    num_open_chains: int = 0
    """Chains that still lack log-probabilities."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """If `params.prompt_logprobs` is set: one entry per prompt token, None for the first one (which has no
    prediction) and for those whose step has not retired. Otherwise empty."""

    @property
    def live_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def reported(self) -> list[Sequence]:
        """The sequences that are reported to the caller."""
        return self.sequences if self.labels is None else self.sequences[:1]

    @property
    def num_input_tokens(self) -> int:
        """Number of tokens of the prompt and of the continuations to be scored."""
        return len(self.prompt_token_ids) + self.task.num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens, including those from before a resume."""
        if isinstance(self.task, Score) or self.num_open_chains:
            return 0
        return sum(len(sequence.output_token_ids) for sequence in self.reported)

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None, "the input processor resolves max_tokens"
        return self.params.max_tokens

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def classify(self) -> None:
        """Set `is_plain`, once all other fields are set."""
        self.is_plain = (
            len(self.sequences) == 1
            and not self.sequences[0].continuation
            and self.sequences[0].grammar is None
            and not self.num_candidates
            and not self.prompt_logprobs
        )

    def lacks_prompt_logprobs(self, start: int = 0, end: int | None = None) -> bool:
        """Return True if computing the tokens in [start, end) would yield a logprob that is still unknown."""
        return None in self.prompt_logprobs[start + 1 : None if end is None else end + 1]

    def record_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Record a step's logprobs of the prompt tokens from `start` on; repeated values have no effect."""
        self.prompt_logprobs[start : start + len(entries)] = entries


Ends = tuple[list[Sequence], list["SequenceUpdate"]]
"""Sequences that end, and the updates for the caller."""


@dataclass(slots=True)
class SequenceUpdate:
    """A retired step's effect on one sequence, from the scheduler to the output processor."""

    sequence: Sequence
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    """Set when the sequence failed (finish_reason "error")."""
    error_code: str | None = None
    label_scores: LabelScores | None = None
    """The result of a request with a label tree."""
    candidates: Candidates | None = None
    """The most likely next tokens of a sequence that is held for them."""
    cumulative_logprob: float | None = None
    """The sum of the log probabilities of a beam's tokens."""
