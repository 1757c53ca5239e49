"""One step's plan, from scheduling to execution, and its result.

Plain and picklable: scheduling writes it, execution reads it, and neither imports the other. Token values of
running rows never travel in a plan; execution keeps them in a per-row token table, into which sampling
writes, so that step N+1 can be planned before step N's tokens are known on the host.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field
from typing import Protocol

from pagemill.engine.media import PromptMedia
from pagemill.engine.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRow:
    """A sequence entering a row, as execution needs it. Replaces the row's previous content."""

    row: int
    request_id: str
    sample_index: int
    """The index of this sample among the request's n; part of the noise's key."""
    token_ids: list[int]
    """Every known token: the prompt, then resumed or earlier generated ones."""
    num_prompt_tokens: int
    """Number of given tokens: all of them if they will be scored."""
    block_ids: list[int]
    """The row's complete block table at the step's start (`RowWork.new_block_ids` are added to it)."""
    params: SamplingParams
    seed: int
    """The resolved seed, in [0, 2**63)."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be generated: `params.bad_words`, tokenized."""
    adapter_slot: int = -1
    """Slot of its adapter; -1: none."""
    media: PromptMedia | None = None
    """Vectors for some of the given tokens, and their positions. None: text only."""


@dataclass(slots=True)
class RowWork:
    """Compute `num_tokens` tokens of a row, from position `start` on."""

    row: int
    start: int
    num_tokens: int
    new_block_ids: SequenceType[int] = ()
    """Blocks appended to the row's table by this step."""
    replaced_blocks: SequenceType[tuple[int, int]] = ()
    """(index in the block table, new block id): the row's entries after a copy-on-write."""
    forced_token_ids: SequenceType[tuple[int, int]] = ()
    """(position, token id): tokens that a grammar forced after a sampled one, or that a search chose instead.
    Execution did not sample them, so it writes them into the row's token table before the forward
    pass."""
    num_prompt_logprobs: int | None = None
    """Report the given tokens that these tokens predict, with this many alternatives each. None = disabled."""
    scored_from: int = 0
    """The first reportable position: tokens before it are the context of the scored ones."""
    reads: SequenceType[tuple[int, tuple[int, ...]]] = ()
    """(index among these tokens, token ids): report the log-probabilities of these ids as that token's successors."""

    @property
    def first_scored(self) -> int:
        """The position of the first reported token."""
        return max(self.start + 1, self.scored_from)

    @property
    def is_scored(self) -> bool:
        """True if log-probabilities of given tokens are reported."""
        return self.num_prompt_logprobs is not None or bool(self.reads)


@dataclass(slots=True)
class Sample:
    """Sample a token for `row` from the logits of one of the step's tokens.

    Several samples can have the same `token_index`: this is how n > 1 forks off one prefill.
    """

    row: int
    token_index: int
    """Index into the step's flattened tokens, in the order of `StepPlan.work`."""
    position: int
    """The token's position in the row's token table (= the sequence's length before it)."""
    allowed_token_ids: list[int] | None = None
    """The tokens that may be sampled (structured output). None = all."""
    token_mask: bytes | None = None
    """The allowed tokens as a bit per token id, lowest bit first, for grammars that allow many. None = all."""
    num_candidates: int = 0
    """Also return this many best tokens, for a search over several continuations (`StepResult.candidates`)."""


@dataclass(slots=True)
class StepPlan:
    """One step. Applied in this order: freed rows, new rows, host stores, host loads, block copies, state copies,
    the forward pass, samples."""

    step_id: int
    freed_rows: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    host_stores: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block) ids, copied in every layer. The device blocks may be overwritten afterwards."""
    host_loads: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block) ids."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) block ids, copied in every layer before anything is written."""
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) slots of recurrent state, copied sequentially: rows that forked after the previous step,
    and cached states, whose slots follow those of the rows."""
    work: list[RowWork] = field(default_factory=list)
    """Rows with one token first: execution splits the batch there."""
    samples: list[Sample] = field(default_factory=list)
    has_adapters: bool = False
    """A row of `work` has an adapter."""
    has_media: bool = False
    """A row of `work` may compute a token that represents media."""
    num_drafts: int = 0
    """Number of `work` entries that compute a draft; they follow the one with their row's newest token."""
    samples_later: bool = False
    """Grammars still lack the tokens of the step in flight: `launch` only starts the forward pass, and
    `StepHandle.sample` the rest, once `samples` have their allowed tokens."""

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.work)

    @property
    def kind(self) -> str:
        """prefill (no row decodes), decode (all rows do) or mixed. A row with one token counts as decode."""
        num_decodes = sum(work.num_tokens == 1 for work in self.work)
        if num_decodes == len(self.work):
            return "decode"
        return "mixed" if num_decodes else "prefill"


@dataclass(slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position, from raw logits (before temperature and penalties)."""

    token_id: int
    logprob: float | None
    """None for a token that was forced rather than sampled."""
    top: list[tuple[int, float]] = field(default_factory=list)
    """(token id, logprob) of the most likely tokens, best first."""


@dataclass(slots=True)
class StepResult:
    """A step's sampled tokens. The lists run parallel to `StepPlan.samples`."""

    step_id: int
    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Sample number -> one entry per token, for samples whose request asked for logprobs."""
    invalid: frozenset[int] = frozenset()
    """Sample numbers with non-finite logits: only those requests fail."""
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Sample number -> (token id, score), best first, ties by id: log probabilities of the raw logits with
    the row's constraints and penalties applied (not its temperature). Forbidden tokens are omitted."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Index in `StepPlan.work` -> entries for the given tokens from `RowWork.first_scored` on."""
    reads: dict[int, list[list[float]]] = field(default_factory=dict)
    """Index in `StepPlan.work` -> for each of `RowWork.reads` its ids' log-probabilities, from raw logits."""
    without_choice: frozenset[int] = frozenset()
    """Sample numbers for which the request's own parameters left no token; their `token_ids` are meaningless."""
    is_replayed: bool = False
    """True if a CUDA graph ran it."""
    sharing_rows: int = 0
    """Number of rows with one token that start with the same blocks as another: a CPU reads these once for both."""
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


class StepHandle(Protocol):
    """A launched step."""

    @property
    def plan(self) -> StepPlan: ...

    def sample(self) -> None:
        """Sample the tokens of a plan with `samples_later`, before the next launch."""
        ...

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        ...


class Executor(Protocol):
    """Runs plans: the model runner, the echo runner, or a test's hash model."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step, without its samples if the plan `samples_later`; return immediately if the device allows it.

        Steps retire in launch order.
        """
        ...

    def is_device_alive(self) -> bool:
        """Return True if the device still works; called after a step raised. Out of memory does not count as dead."""
        ...

    def close(self) -> None:
        """Free the device's memory. Nothing must be launched afterwards."""
        ...
