"""A stand-in for a model: `--model echo` repeats the prompt, one token per step, then EOS.

For testing client code against a real queue, worker and scheduler in milliseconds, without torch. `echo:5` takes 5 ms
per step, `echo:5:smollm2` is served under the name smollm2. Its tokens are bytes.

Structures are supported: the prompt is repeated while the structure allows it, for at most half of `max_tokens`, and
then the output is closed in the shortest possible way. `reply_with` sets another output than the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagemill.engine.errors import ConfigError
from pagemill.engine.plan import NewRow, RowWork, Sample, StepPlan, StepResult, TokenLogprobs
from pagemill.engine.text.tokenizer import ByteTokenizer

ECHO_MODEL = "echo"
ECHO_MAX_MODEL_LEN = 4096
_FREE_TEXT = 64
"""If a structure allows more bytes than this, the output is inside arbitrary text."""

Reply = Callable[[str], str]
"""Maps a prompt's text (of a chat: one message per line) to the output's text."""

_reply: Reply | None = None


def reply_with(reply: Reply | None) -> None:
    """Make every echo model of this process return `reply(prompt)`; None: the prompt (default)."""
    global _reply
    _reply = reply


def is_echo(model: str) -> bool:
    return model == ECHO_MODEL or model.startswith(f"{ECHO_MODEL}:")


def echo_name(model: str) -> str:
    """Return the served name: `<name>` of `echo:<ms>:<name>`, or `echo`."""
    return model.split(":", 2)[2] if model.count(":") >= 2 else ECHO_MODEL


def echo_step_seconds(model: str) -> float:
    """Return the delay in `echo:<ms>`, in seconds. Raises `ConfigError`."""
    milliseconds = [*model.split(":"), ""][1]
    try:
        seconds = float(milliseconds or 0) / 1000
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ConfigError(f"{model!r}: after echo: comes the number of milliseconds that a step takes")
    return seconds


@dataclass(frozen=True, slots=True)
class EchoStep:
    plan: StepPlan
    result: StepResult
    runner: EchoRunner

    def sample(self) -> None:
        self.runner.sample(self.plan, self.result)

    def wait(self) -> StepResult:
        return self.result


class EchoRunner:
    """An `Executor` without a device."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self._step_seconds = step_seconds
        self._rows: dict[int, NewRow] = {}
        self._words: dict[int, Sequence[int]] = {}
        """The output of each row: its prompt, or the reply to it."""
        self._eos = ByteTokenizer.vocab_size - 1

    def launch(self, plan: StepPlan) -> EchoStep:
        started = time.perf_counter()
        for new_row in plan.new_rows:
            self._set_row(new_row)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        result = StepResult(plan.step_id, [])
        if not plan.samples_later:
            self.sample(plan, result)
        for number, work in enumerate(plan.work):
            if work.num_prompt_logprobs is not None:
                result.prompt_logprobs[number] = self._scores(work, work.num_prompt_logprobs)
            if work.reads:
                result.reads[number] = [self._read(work, place, ids) for place, ids in work.reads]
        result.forward_s = time.perf_counter() - started
        return EchoStep(plan, result, self)

    def sample(self, plan: StepPlan, result: StepResult) -> None:
        """Add the tokens of a plan's samples to its result."""
        result.token_ids = [[self._next(sample)] for sample in plan.samples]
        for number, sample in enumerate(plan.samples):
            token_id = result.token_ids[number][0]
            if sample.num_candidates:
                result.candidates[number] = self._likeliest(token_id, sample.num_candidates)
            num_logprobs = self._rows[sample.row].params.logprobs
            if num_logprobs is not None:
                (chosen, *_), top = self._likeliest(token_id, 1), self._likeliest(token_id, num_logprobs)
                result.logprobs[number] = [TokenLogprobs(token_id, chosen[1], top)]

    def is_device_alive(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def _next(self, sample: Sample) -> int:
        row = self._rows[sample.row]
        words = self._words[sample.row]
        position = sample.position - row.num_prompt_tokens
        wanted = words[position % len(words)] if position < len(words) or row.params.ignore_eos else self._eos
        if position < row.params.min_tokens and wanted == self._eos:
            wanted = words[position % len(words)]
        allowed = sample.allowed_token_ids
        if allowed is not None:
            return wanted if wanted in allowed else allowed[0]
        if sample.token_mask is None:
            return wanted
        mask = sample.token_mask
        allowed = [t for t in range(ByteTokenizer.vocab_size) if mask[t >> 3] >> (t & 7) & 1]
        if wanted in allowed and (
            _reply is not None or position * 2 < (row.params.max_tokens or 2 * len(words))
        ):
            return wanted
        return closing_token(allowed, position, self._eos)

    def _set_row(self, new_row: NewRow) -> None:
        self._rows[new_row.row] = new_row
        words: Sequence[int] = new_row.token_ids[: new_row.num_prompt_tokens]
        if _reply is not None:
            tokenizer = ByteTokenizer()
            words = tokenizer.encode(_reply(tokenizer.decode(words))) or [self._eos]
        self._words[new_row.row] = words

    def _scores(self, work: RowWork, count: int) -> list[TokenLogprobs]:
        """Score given tokens: all are as likely as the runner's output."""
        row = self._rows[work.row]
        given = row.token_ids[
            work.first_scored : min(work.start + work.num_tokens + 1, row.num_prompt_tokens)
        ]
        return [TokenLogprobs(token, -0.01, self._likeliest(token, count)) for token in given]

    def _read(self, work: RowWork, place: int, token_ids: Sequence[int]) -> list[float]:
        """Score possible next tokens of a row: the runner's output is likely, the others follow by id."""
        words = self._words[work.row]
        position = work.start + place + 1 - self._rows[work.row].num_prompt_tokens
        wanted = words[position] if position < len(words) else self._eos
        return [-0.01 if token_id == wanted else -5.0 - token_id / 100 for token_id in token_ids]

    @staticmethod
    def _likeliest(wanted: int, count: int) -> list[tuple[int, float]]:
        """Return the intended token, almost certain, and others that a search is unlikely to prefer."""
        others = [token for token in range(count) if token != wanted]
        unlikely = [(token, -10.0 - rank) for rank, token in enumerate(others)]
        return [(wanted, -0.01), *unlikely][:count]


def closing_token(allowed: Sequence[int], position: int, eos_token_id: int) -> int:
    """Return the allowed byte that brings a structured output closest to its end.

    If no byte closes anything, the choice cycles through the letters and digits with `position`, so that it also finds
    those that lead out of a repetition.
    """
    quote = b'"' if len(allowed) > _FREE_TEXT else b'}])"'
    closing: list[int] = [eos_token_id, *quote, *(b"," if position % 2 == 0 else b"")]
    for token in closing:
        if token in allowed:
            return token
    plain = [token for token in allowed if token < 128 and chr(token).isalnum()] or list(allowed)
    return plain[position % len(plain)]
