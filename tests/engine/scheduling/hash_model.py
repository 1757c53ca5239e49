"""A model without a network: its next token is a hash of all tokens so far, read back through block tables.

The KV cache is a real array with one (token, position, group) per slot, written and read only through block
tables, so any wrong block, missed copy, stale row or early reuse changes the output or trips an assertion. A
group of layers with a window reads only the tokens in its window. With recurrent layers each row also has a
state, the list of its tokens, which must be those before the next token. `HashOracle` computes the same
tokens from the plain token list.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pagemill.engine.plan import NewRow, Sample, StepPlan, StepResult, TokenLogprobs
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.request import Grammar

Slot = tuple[int, int, int]
POISON: Slot = (-1, -1, -1)


class BadStep(RuntimeError):
    """The model's forward pass raised."""


@dataclass(frozen=True)
class HashOracle:
    """The language itself: (tokens so far, params, seed, sample) -> next token."""

    vocab_size: int = 64
    eos_token_ids: tuple[int, ...] = ()

    def next_token(
        self,
        token_ids: list[int],
        num_output_tokens: int,
        params: SamplingParams,
        seed: int,
        sample_index: int,
        allowed_token_ids: list[int] | None = None,
    ) -> int:
        candidates = range(self.vocab_size) if allowed_token_ids is None else allowed_token_ids
        if num_output_tokens < params.min_tokens:
            banned = {*params.stop_token_ids, *self.eos_token_ids}
            candidates = [token for token in candidates if token not in banned]
        noise = () if params.is_greedy else (seed, sample_index)
        return candidates[hash((tuple(token_ids), noise)) % len(candidates)]

    def scores(
        self, token_ids: list[int], num_output_tokens: int, params: SamplingParams
    ) -> list[tuple[int, float]]:
        """A simulated log probability for every token that may follow, best first."""
        banned: set[int] = set()
        if num_output_tokens < params.min_tokens:
            banned = {*params.stop_token_ids, *self.eos_token_ids}
        scored = [
            (token, -(hash((tuple(token_ids), token)) % 2**40 + 1) / 2**37)
            for token in range(self.vocab_size)
            if token not in banned
        ]
        return sorted(scored, key=lambda candidate: (-candidate[1], candidate[0]))

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        sample_index: int,
        max_num_tokens: int,
        grammar: Grammar | None = None,
    ) -> tuple[list[int], str]:
        """One sample, sequentially: its output tokens and finish reason."""
        output: list[int] = []
        while True:
            allowed = None if grammar is None else grammar.allowed_token_ids()
            sampled = self.next_token(prompt + output, len(output), params, seed, sample_index, allowed)
            forced = [] if grammar is None else grammar.advance(sampled)
            for number, token in enumerate([sampled, *forced]):
                output.append(token)
                if len(output) >= params.min_tokens:
                    is_eos = token in self.eos_token_ids and not params.ignore_eos
                    if is_eos or token in params.stop_token_ids:
                        return output, "stop"
                if grammar is not None and grammar.is_complete and number == len(forced):
                    return output, "stop"
                if len(prompt) + len(output) >= max_num_tokens:
                    return output, "length"


@dataclass
class _Row:
    token_ids: dict[int, int]
    block_ids: list[int]
    new: NewRow


@dataclass
class HashStep:
    plan: StepPlan
    model: HashModel
    result: StepResult | BaseException | None = None
    is_sampled: bool = False

    def sample(self) -> None:
        assert self.plan.samples_later
        assert self.model._launched[-1] is self, "a step is sampled before the next launch"
        self.is_sampled = True

    def wait(self) -> StepResult:
        self.model.run_up_to(self)
        if isinstance(self.result, BaseException):
            raise self.result
        assert self.result is not None
        return self.result


@dataclass
class HashModel:
    """An executor over `num_blocks` blocks. A step runs when it is waited for, in launch order.

    Running late is the worst case for the scheduler: a block that it assigns or poisons too early is then
    lost when an older step reads it. `bad_steps` raise; so does computing one of `bad_tokens`. A sequence
    that holds one of `nan_tokens` samples from logits that are not finite.
    """

    num_blocks: int
    block_size: int
    oracle: HashOracle
    max_num_rows: int
    bad_steps: set[int] = field(default_factory=set)
    bad_tokens: frozenset[int] = frozenset()
    nan_tokens: frozenset[int] = frozenset()
    windows: tuple[int | None, ...] = (None,)
    is_recurrent: bool = False
    num_tokens_computed: int = 0
    num_steps: int = 0
    _host: dict[int, list[Slot]] = field(default_factory=dict)
    _cache: list[list[Slot]] = field(init=False)
    _rows: dict[int, _Row] = field(default_factory=dict)
    _states: dict[int, list[int]] = field(default_factory=dict)
    """Row -> the content of its slot, regardless of the writer."""
    _launched: deque[HashStep] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._cache = [[POISON] * self.block_size for _ in range(self.num_blocks)]

    def launch(self, plan: StepPlan) -> HashStep:
        step = HashStep(plan, self)
        self._launched.append(step)
        return step

    def run_up_to(self, step: HashStep) -> None:
        while step.result is None:
            oldest = self._launched.popleft()
            try:
                if oldest.plan.step_id in self.bad_steps:
                    raise BadStep(f"step {oldest.plan.step_id}")
                assert oldest.is_sampled or not oldest.plan.samples_later
                oldest.result = self._run(oldest.plan)
            except BadStep as error:
                oldest.result = error
                self._void_launched()

    def _void_launched(self) -> None:
        """Steps launched after a failed one return garbage: an error, or tokens that must not be used."""
        for step in self._launched:
            if step.plan.step_id % 2:
                step.result = BadStep("a step before it failed")
            else:
                step.result = StepResult(
                    step.plan.step_id, [[self.oracle.vocab_size]] * len(step.plan.samples)
                )
        self._launched.clear()

    def poison(self, block_ids: list[int]) -> None:
        """Mark blocks as free: reading them from now on is an error.

        Except for a step in flight that copies them to the host: it does so before any write.
        """
        leaving = {block_id for step in self._launched for block_id, _ in step.plan.host_stores}
        for block_id in set(block_ids) - leaving:
            self._cache[block_id] = [POISON] * self.block_size

    def block_tokens(self, block_id: int) -> list[Slot]:
        return self._cache[block_id]

    def _run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self._apply_rows(plan)
        for block_id, host_id in plan.host_stores:
            self._host[host_id] = list(self._cache[block_id])
        for host_id, block_id in plan.host_loads:
            self._cache[block_id] = list(self._host[host_id])
        copies = [(destination, list(self._cache[source])) for source, destination in plan.block_copies]
        for destination, content in copies:
            self._cache[destination] = content
        for source, destination in plan.state_copies:
            self._states[destination] = list(self._states.get(source, ()))  # none if it was void
        last_tokens = self._forward(plan)
        token_ids, logprobs, candidates, invalid = [], {}, {}, set()
        for number, sample in enumerate(plan.samples):
            row, position = last_tokens[sample.token_index]
            tokens = self._read(row, position)
            token = self._sample(sample, tokens)
            token_ids.append([token])
            if sample.num_candidates:
                new = self._rows[row].new
                num_output = len(tokens) - new.num_prompt_tokens
                scores = self.oracle.scores(tokens, num_output, new.params)
                candidates[number] = scores[: sample.num_candidates]
            if self._rows[sample.row].new.params.logprobs is not None:
                logprobs[number] = [TokenLogprobs(token, -1.0)]
            if self.nan_tokens.intersection(tokens):
                invalid.add(number)
        return StepResult(plan.step_id, token_ids, logprobs, frozenset(invalid), candidates)

    def _apply_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        for new in plan.new_rows:
            assert 0 <= new.row < self.max_num_rows
            assert new.row not in self._rows, f"row {new.row} was not freed"
            self._rows[new.row] = _Row(dict(enumerate(new.token_ids)), list(new.block_ids), new)
        for work in plan.work:
            table = self._rows[work.row].block_ids
            for index, block_id in work.replaced_blocks:
                table[index] = block_id
            table += work.new_block_ids

    def _forward(self, plan: StepPlan) -> dict[int, tuple[int, int]]:
        """Write every token's slot, as a layer writes K and V; flattened index -> (row, position)."""
        where: dict[int, tuple[int, int]] = {}
        written: set[tuple[int, int]] = set()
        num_tokens = [work.num_tokens for work in plan.work]
        assert num_tokens == sorted(num_tokens, key=lambda n: n != 1), "rows with one token come first"
        ends: dict[int, int] = {}
        for work in plan.work:
            assert ends.get(work.row, work.start) == work.start, "a row appears once, but for its drafts"
            ends[work.row] = work.start + work.num_tokens
            row = self._rows[work.row]
            row.token_ids.update(work.forced_token_ids)
            for position in range(work.start, work.start + work.num_tokens):
                token = row.token_ids[position]
                if token in self.bad_tokens:
                    raise BadStep(f"token {token}")
                for group in range(len(self.windows)):
                    block_id, offset = self._slot(work.row, position, group)
                    assert block_id != 0, "the null block is never written"
                    assert (block_id, offset) not in written, "two tokens were given one slot"
                    written.add((block_id, offset))
                    self._cache[block_id][offset] = (token, position, group)
                where[len(where)] = (work.row, position)
                if self.is_recurrent:
                    self._advance(work.row, position)
        if self.windows != (None,):
            for work in plan.work:
                self._read(work.row, work.start)  # the earliest position that a chunk's tokens read
        self.num_tokens_computed += len(where)
        return where

    def _advance(self, row: int, position: int) -> None:
        """Add a token to a row's state; the first one starts a new state."""
        state = self._states[row] if position else []
        known = self._rows[row].token_ids
        assert state == [known[place] for place in range(position)], f"row {row} has another one's state"
        self._states[row] = [*state, known[position]]

    def _slot(self, row: int, position: int, group: int) -> tuple[int, int]:
        """The block and offset of a position; a column of the table is a block for each group."""
        column, offset = divmod(position, self.block_size)
        return self._rows[row].block_ids[column * len(self.windows) + group], offset

    def _read(self, row: int, last_position: int) -> list[int]:
        """Read the tokens that the query at a position sees in every group; returns all tokens up to it."""
        tokens = [self._rows[row].token_ids[position] for position in range(last_position + 1)]
        for group, window in enumerate(self.windows):
            reach = len(tokens) if window is None else window if window > 0 else last_position % -window + 1
            for position in range(max(0, last_position + 1 - reach), last_position + 1):
                block_id, offset = self._slot(row, position, group)
                token, *written_for = self._cache[block_id][offset]
                assert written_for == [position, group], (
                    f"row {row} reads position {position} of group {group}, the slot holds {written_for}"
                )
                tokens[position] = token
        return tokens

    def _sample(self, sample: Sample, tokens: list[int]) -> int:
        row = self._rows[sample.row]
        assert sample.position == len(tokens), "a sample comes from the last token"
        num_output = len(tokens) - row.new.num_prompt_tokens
        token = self.oracle.next_token(
            tokens, num_output, row.new.params, row.new.seed, row.new.sample_index, sample.allowed_token_ids
        )
        row.token_ids[sample.position] = token
        return token
