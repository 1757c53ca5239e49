"""A stand-in for a model: `--model echo` repeats the prompt, one token per step, then EOS.

For testing client code against a real queue, worker and scheduler in milliseconds. `echo:5` takes 5 ms a
step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pagemill.engine.errors import ConfigError
from pagemill.engine.plan import NewRow, RowWork, Sample, StepPlan, StepResult, TokenLogprobs
from pagemill.engine.text.tokenizer import ByteTokenizer

ECHO_MODEL = "echo"
ECHO_MAX_MODEL_LEN = 4096


def is_echo(model: str) -> bool:
    return model == ECHO_MODEL or model.startswith(f"{ECHO_MODEL}:")


def echo_step_seconds(model: str) -> float:
    """Return the delay in `echo:<ms>`, in seconds. Raises `ConfigError`."""
    _, _, milliseconds = model.partition(":")
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

    def wait(self) -> StepResult:
        return self.result


class EchoRunner:
    """An `Executor` without a device."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self._step_seconds = step_seconds
        self._rows: dict[int, NewRow] = {}
        self._eos = ByteTokenizer.eos_token_id

    def launch(self, plan: StepPlan) -> EchoStep:
        started = time.perf_counter()
        for new_row in plan.new_rows:
            self._rows[new_row.row] = new_row
        if self._step_seconds:
            time.sleep(self._step_seconds)
        result = StepResult(plan.step_id, [[self._next(sample)] for sample in plan.samples])
        for number, sample in enumerate(plan.samples):
            token_id = result.token_ids[number][0]
            if sample.num_candidates:
                result.candidates[number] = self._likeliest(token_id, sample.num_candidates)
            num_logprobs = self._rows[sample.row].params.logprobs
            if num_logprobs is not None:
                (chosen, *_), top = self._likeliest(token_id, 1), self._likeliest(token_id, num_logprobs)
                result.logprobs[number] = [TokenLogprobs(token_id, chosen[1], top)]
        for number, work in enumerate(plan.work):
            if work.num_prompt_logprobs is not None:
                result.prompt_logprobs[number] = self._scores(work, work.num_prompt_logprobs)
        result.forward_s = time.perf_counter() - started
        return EchoStep(plan, result)

    def is_device_alive(self) -> bool:
        return True

    def _next(self, sample: Sample) -> int:
        row = self._rows[sample.row]
        prompt = row.token_ids[: row.num_prompt_tokens]
        position = sample.position - row.num_prompt_tokens
        assert self._eos is not None
        wanted = (
            prompt[position % len(prompt)] if position < len(prompt) or row.params.ignore_eos else self._eos
        )
        if position < row.params.min_tokens and wanted == self._eos:
            wanted = prompt[position % len(prompt)]
        allowed = sample.allowed_token_ids
        if sample.token_mask is not None:
            allowed = [t for t in range(ByteTokenizer.vocab_size) if sample.token_mask[t >> 3] >> (t & 7) & 1]
        return wanted if allowed is None or wanted in allowed else allowed[0]

    def _scores(self, work: RowWork, count: int) -> list[TokenLogprobs]:
        """Score given tokens: all are as likely as the runner's own output."""
        row = self._rows[work.row]
        given = row.token_ids[
            work.first_scored : min(work.start + work.num_tokens + 1, row.num_prompt_tokens)
        ]
        return [TokenLogprobs(token, -0.01, self._likeliest(token, count)) for token in given]

    @staticmethod
    def _likeliest(wanted: int, count: int) -> list[tuple[int, float]]:
        """Return the wanted token, almost certain, and others that a search is unlikely to prefer."""
        others = [token for token in range(count) if token != wanted]
        unlikely = [(token, -10.0 - rank) for rank, token in enumerate(others)]
        return [(wanted, -0.01), *unlikely][:count]
