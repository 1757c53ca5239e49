"""A job that this worker runs: its input, its output so far, and how much of that is stored in Redis."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from pagemill.chat.parser import ChatSyntax
from pagemill.chat.thinking import THINKING
from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.outputs import CompletionDelta, PooledRows, RequestOutput, SampleState
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import Generate, Score, Task
from pagemill.json_values import parse_output
from pagemill.producer.wire.calls.metering.usage import Used
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import TIMED_OUT
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import (
    Checkpoint,
    CheckpointSample,
    Delta,
    EndState,
    FinishReason,
    Output,
    Phase,
    Progress,
    Result,
    Timing,
    Usage,
)
from pagemill.producer.wire.schema.text.parsed_text import ParsedText
from pagemill.worker.jobs.logprob_columns import LogprobColumns, TokenText, prompt_logprobs_json
from pagemill.worker.jobs.pooled_rows import rows_of

PRIORITIES = {"high": -1, "normal": 0, "low": 1}
"""The wire's priorities as the engine's: lower runs first."""
MAX_RESULT_BYTES = 7 << 20
"""Limit on a result's JSON. The server has one thread: it stores a result of this size in some 40 ms."""
MAX_LOGPROBS = 98_304
"""Tokens with a log-probability in one result: that many take about as many bytes as the limit above."""
BYTES_PER_TOKEN = 4
BYTES_PER_LOGPROB = 40
"""The least that one takes in a result's JSON."""


def _no_text(token_id: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason a running job is being stopped, and what becomes of it if it does not finish first."""

    kind: Literal["cancelled", "expired", "failed", "released", "lapsed"]
    code: str = ""
    message: str = ""


@dataclass(slots=True)
class SampleRecord:
    """One sample so far; the `saved_*` fields count the part in the job's checkpoint."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: LogprobColumns | None = None
    finish_reason: FinishReason | None = None
    saved_tokens: int = 0
    saved_chars: int = 0
    saved_finish: bool = False
    syntax: str | None = None
    """How to read `text`, as `ChatSyntax` writes it; None: as it is."""
    labels: dict[str, Any] | None = None
    """The fields of an output with the labels' probabilities."""

    @property
    def is_saved(self) -> bool:
        """True if the checkpoint holds all of it."""
        finish_is_saved = self.saved_finish or self.finish_reason is None
        lengths = (len(self.token_ids), len(self.text))
        return finish_is_saved and lengths == (self.saved_tokens, self.saved_chars)

    def unsaved(self) -> Delta:
        logprobs = None
        if self.logprobs is not None:
            logprobs = tuple(self.logprobs.positions(self.saved_tokens))
        return Delta(
            index=self.index,
            offset=self.saved_tokens,
            token_ids=tuple(self.token_ids[self.saved_tokens :]),
            text=self.text[self.saved_chars :],
            finish_reason=self.finish_reason,
            logprobs=logprobs,
            syntax=self.syntax if self.saved_tokens == 0 else None,
        )

    def mark_saved(self, delta: Delta) -> None:
        self.saved_tokens = delta.offset + len(delta.token_ids)
        self.saved_chars += len(delta.text)
        self.saved_finish = delta.finish_reason is not None

    def num_reasoning_tokens(self, token_text: TokenText) -> int:
        """Count the tokens up to the end of the thinking."""
        syntax = ChatSyntax.read(self.syntax or "")
        tags = THINKING.get(syntax.thinking or "")
        if tags is None or not (syntax.is_open or self.text.lstrip().startswith(tags.opening)):
            return 0
        tail = ""
        for number, token_id in enumerate(self.token_ids, 1):
            tail = tail[-len(tags.closing) :] + token_text(token_id)
            if tags.closing in tail:
                return number
        return len(self.token_ids)

    def output_json(self, job_id: str, *, is_json: bool, is_scored: bool) -> bytes:
        """Return the JSON of an `Output`."""
        omitted = {"logprobs", *(() if is_scored or self.labels else ("logprob",))}
        if self.labels is None:
            omitted |= {"label", "label_probs"}
        if self.syntax is None:
            omitted |= {"reasoning", "tool_calls"}
        parts = ParsedText.whole(self.syntax, job_id, self.index, self.text).output_fields()
        output = Output(
            index=self.index,
            **parts,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            parsed=parse_output(parts["text"]) if is_json and self.finish_reason == "stop" else None,
            **(self.labels or {"logprob": self._sum() if is_scored else None}),
        )
        body = output.model_dump_json(exclude=omitted).encode()
        logprobs = b"null" if self.logprobs is None else self.logprobs.json()
        return b'{"logprobs":%b,%b' % (logprobs, body[1:])

    def _sum(self) -> float | None:
        return None if self.logprobs is None else self.logprobs.sum_of_chosen()


@dataclass(slots=True, eq=False)
class RunningJob:
    """A running job. Once in the table, only the reporter's thread writes it; admission reads its counts."""

    pulled: PulledJob
    job: Job
    prompt_token_ids: list[int]
    params: SamplingParams
    """`max_tokens` and `seed` are resolved."""
    task: Task
    started_at: float
    """Unix seconds by the server's clock."""
    expires_at: float | None
    """`time.monotonic()` when its deadline or its timeout ends it."""
    samples: list[SampleRecord]
    fingerprint: str = ""
    """Of the model and its adapter."""
    adapter: Adapter | None = None
    resumed_tokens: int = 0
    phase: Phase = "waiting"
    prompt_tokens_done: int = 0
    is_progress_saved: bool = True
    saved_at: float = 0.0
    """`time.monotonic()` of the last checkpoint."""
    unsaved_since: float = 0.0
    """`time.monotonic()` of the first progress that the checkpoint lacks."""
    result_bytes: int = 0
    """A lower estimate of the result's size so far."""
    token_text: TokenText = _no_text
    """The text of a token by the engine's tokenizer."""
    restart_checkpoint: bool = False
    """The next checkpoint replaces the stored one."""
    sending: list[Delta] | None = None
    """Deltas whose write has no known outcome: they are sent again unchanged."""
    is_checkpoint_refused: bool = False
    """The server refuses more checkpoints (out of memory): the end is written without."""
    ending: Ending | None = None
    has_left_engine: bool = False
    sent_at: float | None = None
    """The time the engine received it; this and the next by the server's clock."""
    left_engine_at: float | None = None
    ttft_s: float | None = None
    """Time from `sent_at` to its first token; None if there was none."""
    pooled: PooledRows | None = None
    """The rows of a job for vectors, labels or scores, once it has ended."""
    labels: tuple[str, ...] = ()
    """The model's labels, for a job that classifies."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; this and the next are known at the end."""
    device_s: float = 0.0
    """Its share of the engine's steps in this execution."""

    @property
    def job_id(self) -> str:
        return self.pulled.job_id

    @property
    def token(self) -> int:
        return self.pulled.token

    @property
    def request_id(self) -> str:
        """The engine's name for this execution: a job that comes back has another."""
        return f"{self.pulled.job_id}#{self.pulled.token}"

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None, "the input processor resolves max_tokens"
        return self.params.max_tokens

    @property
    def generated_tokens(self) -> int:
        return 0 if isinstance(self.task, Score) else sum(len(sample.token_ids) for sample in self.samples)

    @property
    def scores_prompt(self) -> bool:
        """True if its one sample is the prompt itself, whose text is known from the start."""
        return isinstance(self.task, Score) and self.job.continuations is None

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt and of continuations to be scored."""
        return len(self.prompt_token_ids) + self.task.num_tokens

    @property
    def unsaved_tokens(self) -> int:
        return sum(len(sample.token_ids) - sample.saved_tokens for sample in self.samples)

    @property
    def has_saved_tokens(self) -> bool:
        return any(sample.saved_tokens for sample in self.samples)

    @property
    def unsaved_logprobs(self) -> int:
        """Tokens with a log-probability that the checkpoint lacks."""
        return 0 if self.params.logprobs is None else (1 + self.params.logprobs) * self.unsaved_tokens

    @property
    def has_unsaved(self) -> bool:
        """True if the checkpoint lacks something."""
        return not all(sample.is_saved for sample in self.samples)

    @property
    def expiry_message(self) -> str:
        deadline = self.pulled.deadline
        if self.job.timeout is not None and (
            deadline is None or self.started_at + self.job.timeout < deadline
        ):
            return f"{TIMED_OUT} of {self.job.timeout:g} s"
        return "the deadline passed"

    @property
    def is_complete(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def is_saved_often(self) -> bool:
        """True if the job has a stream reader, or was running when workers died: the next crash then tells
        more, by how far the job got."""
        return self.job.stream or self.pulled.crashes > 0

    @property
    def is_too_large(self) -> bool:
        """True if the output is already larger than a result may be."""
        return self.result_bytes > MAX_RESULT_BYTES

    @property
    def waits_for_adapter(self) -> bool:
        """True if it may wait for its adapter to be in memory: until then it takes no rows."""
        return self.adapter is not None and self.phase == "waiting"

    @property
    def is_about_to_end(self) -> bool:
        """True if its rows are free after the next step: each sample lacks at most one token of max_tokens."""
        if self.params.is_ranked or self.prompt_tokens_done < len(self.prompt_token_ids):
            return False
        return all(
            sample.finish_reason is not None or len(sample.token_ids) >= self.max_tokens - 1
            for sample in self.samples
        )

    def apply(self, output: RequestOutput) -> None:
        """Apply a step's output."""
        self.phase = output.phase
        self.prompt_tokens_done = output.prompt_tokens_done
        self.pooled = output.pooled
        self.cached_tokens = output.usage.cached_tokens if output.usage is not None else 0
        self.device_s = round(output.device_s, 3)
        if self.is_progress_saved:
            self.is_progress_saved, self.unsaved_since = False, time.monotonic()
        for delta in output.deltas:
            sample = self.samples[delta.index]
            sample.token_ids += delta.token_ids
            sample.text += "" if self.scores_prompt else delta.text
            self.result_bytes += len(delta.text) + BYTES_PER_TOKEN * len(delta.token_ids)
            if delta.logprobs is not None:
                if sample.logprobs is None:
                    sample.logprobs = LogprobColumns(self.token_text)
                known = sample.logprobs.num_entries
                sample.logprobs.extend(delta.logprobs)
                self.result_bytes += BYTES_PER_LOGPROB * (sample.logprobs.num_entries - known)
            if delta.label_probs is not None:
                sample.labels = self._label_fields(delta)
            if delta.finish_reason in ("stop", "length"):
                sample.finish_reason = delta.finish_reason

    def _label_fields(self, delta: CompletionDelta) -> dict[str, Any]:
        shape = self.params.structured_outputs
        assert shape is not None
        assert shape.choice is not None
        assert delta.label_probs is not None
        assert delta.label is not None
        return {
            "label": shape.choice[delta.label],
            "label_probs": dict(zip(shape.choice, delta.label_probs, strict=True)),
            "logprob": delta.cumulative_logprob,
        }

    def unsaved(self) -> list[Delta]:
        """Return what to checkpoint next: the same deltas each time until `mark_saved` or `start_over`."""
        if not self.sending:
            self.sending = [sample.unsaved() for sample in self.samples if not sample.is_saved]
        return self.sending

    def mark_saved(self, now: float) -> None:
        for delta in self.sending or ():
            self.samples[delta.index].mark_saved(delta)
        self.sending = None
        self.restart_checkpoint = False
        self.is_progress_saved = True
        self.saved_at = now

    def start_over(self) -> None:
        """Write the whole checkpoint anew: the stored one is not what we believed."""
        self.sending = None
        self.restart_checkpoint = True
        for sample in self.samples:
            sample.saved_tokens = sample.saved_chars = 0
            sample.saved_finish = False

    def progress(self, server_time: float) -> Progress:
        return Progress(
            phase=self.phase,
            prompt_tokens_done=self.prompt_tokens_done,
            prompt_tokens=len(self.prompt_token_ids),
            generated_tokens=self.generated_tokens,
            max_tokens=self.max_tokens * self.params.n if isinstance(self.task, Generate) else 0,
            updated_at=server_time,
        )

    def used(self) -> Used:
        """Return what the ledger counts: of a complete job what its result says, else what has been computed."""
        return Used(
            self.input_tokens if self.is_complete else self.prompt_tokens_done,
            self.cached_tokens,
            self.generated_tokens,
            self.device_s,
        )

    def result_json(self, output: RequestOutput | None, *, tier: str, now: float) -> bytes:
        """Return the job's `Result` as JSON. Its large parts never exist as objects all at once.

        Args:
            output: the engine's last output for the request; None if the checkpoint held a finished job.
            now: unix seconds by the server's clock.
        """
        structure = self.job.structured_outputs
        is_json = structure is not None and structure.json is not None
        is_scored = isinstance(self.task, Score)
        outputs = b",".join(
            sample.output_json(self.job_id, is_json=is_json, is_scored=is_scored) for sample in self.samples
        )
        prompt_logprobs = output.prompt_logprobs if output is not None else None
        prompt = (
            b"null" if prompt_logprobs is None else prompt_logprobs_json(prompt_logprobs, self.token_text)
        )
        result = Result.model_construct(
            id=self.job_id,
            usage=Usage(
                prompt_tokens=self.input_tokens,
                completion_tokens=self.generated_tokens,
                cached_tokens=self.cached_tokens,
                reasoning_tokens=sum(sample.num_reasoning_tokens(self.token_text) for sample in self.samples),
            ),
            model=self.job.model,
            seed=self.params.seed,
            tier=tier,
            fingerprint=self.fingerprint,
            attempt=self.pulled.attempt,
            resumed_tokens=self.resumed_tokens,
            timing=Timing(
                queue_s=max(0.0, self.started_at - self.pulled.submitted_at),
                ttft_s=output.ttft_s if output is not None else None,
                e2e_s=max(0.0, now - self.pulled.submitted_at),
            ),
            metadata=self.job.metadata,
            rows=None if self.pooled is None else rows_of(self.pooled, self.job.rows_dtype),
            labels=self.labels or None,
        )
        omitted: dict[str, Any] = {"outputs": True, "prompt_logprobs": True}
        if self.pooled is None:
            omitted |= {"rows": True, "labels": True}
        if not self.job.is_parsed:
            omitted["usage"] = {"reasoning_tokens"}
        body = result.model_dump_json(exclude=omitted).encode()
        return b'{"outputs":[%b],"prompt_logprobs":%b,%b' % (outputs, prompt, body[1:])


def engine_params(job: Job, job_id: str) -> SamplingParams:
    """Return the job's sampling parameters as the engine's. Raises `pagemill.engine.errors.InvalidRequest`.

    A job without a seed (submitted by hand) gets one from its id: the same on every worker.
    """
    fields: dict[str, Any] = job.sampling()
    if fields["seed"] is None:
        digest = hashlib.blake2b(job_id.encode(), digest_size=8).digest()
        fields["seed"] = int.from_bytes(digest, "big") >> 1
    return SamplingParams(**fields)


def sample_records(
    checkpoint: Checkpoint | None, n: int, token_text: TokenText = _no_text, *, whole: bool = False
) -> list[SampleRecord]:
    """Build samples from the checkpoint, or fresh ones; `whole`: only those that had ended."""
    records = [SampleRecord(index) for index in range(n)]
    for saved in checkpoint.seqs if checkpoint is not None else ():
        if saved.index < n and (saved.finish_reason is not None or not whole):
            records[saved.index] = _record(saved, token_text)
    return records


def sample_states(records: list[SampleRecord]) -> list[SampleState]:
    """Return what the engine needs to resume from `records`."""
    return [
        SampleState(
            index=record.index,
            token_ids=list(record.token_ids),
            finish_reason=record.finish_reason,
        )
        for record in records
    ]


def _record(saved: CheckpointSample, token_text: TokenText) -> SampleRecord:
    logprobs = None
    if saved.logprobs is not None:
        logprobs = LogprobColumns(token_text)
        logprobs.extend_saved(saved.logprobs)
    return SampleRecord(
        index=saved.index,
        token_ids=list(saved.token_ids),
        text=saved.text,
        logprobs=logprobs,
        finish_reason=saved.finish_reason,
        saved_tokens=len(saved.token_ids),
        saved_chars=len(saved.text),
        saved_finish=saved.finish_reason is not None,
    )


def end_state(ending: Ending) -> EndState:
    """Return the state that a job stopped for `ending` is committed as."""
    assert ending.kind != "released", "a released job does not end"
    assert ending.kind != "lapsed", "nor does one whose lease ends"
    return ending.kind
