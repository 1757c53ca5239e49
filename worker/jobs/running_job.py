"""A running job of this worker: its input, its output so far, and how much of that is stored in Redis."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Set
from dataclasses import InitVar, dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from pagemill.common.chat.syntax import ChatSyntax
from pagemill.common.chat.thinking import THINKING
from pagemill.common.fingerprint import digest_of
from pagemill.common.json_values import parse_output
from pagemill.engine.outputs import CompletionDelta, PooledRows, RequestOutput, StayCause
from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import Generate, Score, Task
from pagemill.engine.text.tokenizer import Tokenizer
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.account import ENGINE_LETTERS
from pagemill.producer.wire.calls.metering.usage import JobUsage
from pagemill.producer.wire.calls.transitions import CheckpointReply, PulledJob
from pagemill.producer.wire.schema.errors import TIMED_OUT
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import (
    Checkpoint,
    CheckpointSample,
    Delta,
    ErrorInfo,
    FinishReason,
    Output,
    Phase,
    Progress,
    Result,
    Timing,
    Usage,
)
from pagemill.producer.wire.schema.sealing import KeyRing
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.schema.text.parsed_text import ParsedText
from pagemill.producer.wire.server.scripts import Call
from pagemill.worker.engine_host.messages import AddRequest
from pagemill.worker.jobs.logprob_columns import LogprobColumns, TokenText, prompt_logprobs_json
from pagemill.worker.jobs.pooled_rows import rows_of

MAX_RESULT_BYTES = 7 << 20
"""Maximum size of a result's JSON. The single-threaded server needs about 40 ms to store a result of this size."""
MAX_LOGPROBS = 98_304
"""Maximum number of tokens with a log-probability in one result; they take about as many bytes as the limit above."""
BYTES_PER_TOKEN = 4
BYTES_PER_LOGPROB = 40
"""Minimum bytes that one takes in a result's JSON."""


def _no_text(token_id: int) -> str:
    return ""


class Outcome(enum.Enum):
    """The outcome of a job on this worker. The first four are the states that a job can be committed as."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    RETRIED = "retried"
    RELEASED = "released"
    """Requeued, without counting an attempt."""
    DISTRUSTED = "distrusted"
    """Requeued to restart from its prompt, because this worker computes wrong results."""
    LAPSED = "lapsed"
    """Its lease ends now, as if the worker's process had crashed."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The outcome of a running job that is being stopped, unless it finishes first."""

    outcome: Outcome
    error: ErrorInfo | None = None


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
    """The syntax of `text`, as `ChatSyntax` writes it; None: plain text."""
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

    def restore(self, saved: CheckpointSample, token_text: TokenText) -> None:
        """Restore a sample from the stored checkpoint."""
        self.token_ids, self.text, self.finish_reason = list(saved.token_ids), saved.text, saved.finish_reason
        if saved.logprobs is not None:
            self.logprobs = LogprobColumns(token_text)
            self.logprobs.extend_saved(saved.logprobs)
        self.saved_tokens, self.saved_chars = len(saved.token_ids), len(saved.text)
        self.saved_finish = saved.finish_reason is not None

    def mark_saved(self, delta: Delta) -> None:
        self.saved_tokens = delta.offset + len(delta.token_ids)
        self.saved_chars += len(delta.text)
        self.saved_finish = delta.finish_reason is not None

    def num_reasoning_tokens(self, token_text: TokenText) -> int:
        """Count the tokens up to the end of the reasoning."""
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
        parts = ParsedText.parse(self.syntax, job_id, self.index, self.text).output_fields()
        output = Output(
            index=self.index,
            **parts,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            parsed=parse_output(parts["text"]) if is_json and self.finish_reason == "stop" else None,
            **(self.labels or {"logprob": self._sum() if is_scored else None}),
        )
        logprobs = b"null" if self.logprobs is None else self.logprobs.json()
        return _json_object({"logprobs": logprobs} | _members(output, omitted))

    def _sum(self) -> float | None:
        return None if self.logprobs is None else self.logprobs.sum_of_chosen()


@dataclass(slots=True, eq=False)
class RunningJob:
    """A running job. Once it is in the table, only the reporter's thread writes it; admission reads its counts."""

    pulled: PulledJob
    job: Job
    request: AddRequest
    """The engine's request: the next four fields are copied from it."""
    request_id: str = field(init=False)
    prompt_token_ids: list[int] = field(init=False)
    params: SamplingParams = field(init=False)
    """`max_tokens` and `seed` are resolved."""
    task: Task = field(init=False)
    media_bytes: int = field(init=False)
    """Bytes of its images, in the engine's form."""
    started_at: float
    """Unix seconds by the server's clock."""
    expires_at: float | None
    """`time.monotonic()` at the end of its deadline or its timeout."""
    checkpoint: InitVar[Checkpoint | None] = None
    """The origin of `request.resume`."""
    syntax: InitVar[str | None] = None
    unusable: str | None = None
    """The reason for not resuming the stored checkpoint, if it was found before the engine received the request."""
    samples: list[SampleRecord] = field(init=False)
    resumed_tokens: int = field(init=False)
    fingerprint: str = ""
    """Fingerprint of the model and its adapter."""
    phase: Phase = "waiting"
    prompt_tokens_done: int = 0
    kv_blocks: int = 0
    """Maximum KV blocks that it holds, as of the latest checkpoint."""
    is_progress_saved: bool = True
    saved_at: float = 0.0
    """`time.monotonic()` of the last checkpoint."""
    unsaved_since: float = 0.0
    """`time.monotonic()` of the first progress that is not in the checkpoint."""
    result_bytes: int = 0
    """A lower bound of the result's size so far."""
    token_text: TokenText = _no_text
    """Maps a token to its text, with the engine's tokenizer."""
    restart_checkpoint: bool = False
    """The next checkpoint replaces the stored one."""
    sending: list[Delta] | None = None
    """Deltas of a write with unknown outcome: they are sent again unchanged."""
    is_checkpoint_refused: bool = False
    """The server rejects more checkpoints (out of memory): the end is written without."""
    ending: Ending | None = None
    has_left_engine: bool = False
    sent_at: float | None = None
    """When the engine received it; this and the next are by the server's clock."""
    opening_s: float = 0.0
    """Time from the reply to the pull until then."""
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
    stay: Mapping[StayCause, int] | None = None
    """The breakdown of its time in the engine, after it has left the engine."""

    def __post_init__(self, checkpoint: Checkpoint | None, syntax: str | None) -> None:
        """Restore the samples that the request resumes from the checkpoint; if any is left out, write all again."""
        request = self.request
        self.request_id, self.prompt_token_ids = request.request_id, request.prompt_token_ids
        self.params, self.task = request.params, request.task
        self.media_bytes = sum(item.num_bytes for item in request.media)
        self.samples = [SampleRecord(index, syntax=syntax) for index in range(self.params.n)]
        resume, is_whole = request.resume, True
        for saved in checkpoint.seqs if checkpoint is not None else ():
            state = resume[saved.index] if resume is not None and saved.index < len(resume) else None
            if state is not None and (state.token_ids or state.finish_reason is not None):
                self.samples[saved.index].restore(saved, self.token_text)
            else:
                is_whole = False
        self.resumed_tokens = self.generated_tokens
        if self.pulled.entries and (checkpoint is None or not is_whole):
            self.start_over()

    @property
    def regenerated_tokens(self) -> int:
        """Number of tokens of a checkpoint that cannot be used."""
        try:
            checkpoint = self.pulled.checkpoint if self.unusable is not None else None
        except ValueError:
            return 0
        return sum(len(sample.token_ids) for sample in checkpoint.seqs) if checkpoint is not None else 0

    @property
    def job_id(self) -> str:
        return self.pulled.job_id

    @property
    def token(self) -> int:
        return self.pulled.token

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None, "the input processor resolves max_tokens"
        return self.params.max_tokens

    @property
    def generated_tokens(self) -> int:
        return 0 if isinstance(self.task, Score) else sum(len(sample.token_ids) for sample in self.samples)

    @property
    def new_tokens(self) -> int:
        """Tokens generated in this execution."""
        return self.generated_tokens - self.resumed_tokens

    @property
    def scores_prompt(self) -> bool:
        """True if its only sample is the prompt itself, whose text is known from the start."""
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
        """Number of tokens with a log-probability that are not in the checkpoint."""
        return 0 if self.params.logprobs is None else (1 + self.params.logprobs) * self.unsaved_tokens

    @property
    def has_unsaved(self) -> bool:
        """True if the checkpoint is incomplete."""
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
        """True if the job has a stream reader, or was running when workers crashed: its progress at the next
        crash is evidence."""
        return self.job.stream or self.pulled.crashes > 0

    @property
    def is_too_large(self) -> bool:
        """True if the output is already larger than a result may be."""
        return self.result_bytes > MAX_RESULT_BYTES

    @property
    def waits_for_adapter(self) -> bool:
        """True if it may wait for its adapter to be loaded: until then it does not occupy rows."""
        return self.request.adapter is not None and self.phase == "waiting"

    @property
    def is_about_to_end(self) -> bool:
        """True if its rows are free after the next step: each sample is within one token of max_tokens."""
        if self.params.is_ranked or self.prompt_tokens_done < len(self.prompt_token_ids):
            return False
        return all(
            sample.finish_reason is not None or len(sample.token_ids) >= self.max_tokens - 1
            for sample in self.samples
        )

    def begin_with_prompt(self, tokenizer: Tokenizer | None) -> None:
        """Start a scored prompt with all of its text, and its first token, which has no prediction."""
        assert isinstance(self.task, Score)
        (sample,), (token_id,) = self.samples, self.prompt_token_ids
        if sample.token_ids:
            return
        sample.token_ids.append(token_id)
        sample.text = "" if tokenizer is None else tokenizer.decode([token_id, *self.task.continuations[0]])
        sample.logprobs = LogprobColumns(self.token_text)
        sample.logprobs.extend([TokenLogprobs(token_id, None)])

    def apply(self, output: RequestOutput) -> None:
        """Apply a step's output."""
        self.phase = output.phase
        self.prompt_tokens_done = output.prompt_tokens_done
        self.pooled = output.pooled
        self.cached_tokens = output.usage.cached_tokens if output.usage is not None else 0
        self.device_s = round(output.device_s, 3)
        self.stay = output.stay
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
        """Return the deltas to checkpoint next. They stay the same until `mark_saved` or `start_over`."""
        if not self.sending:
            self.sending = [sample.unsaved() for sample in self.samples if not sample.is_saved]
        return self.sending

    def announcement(self, queue: str) -> Call[CheckpointReply]:
        """Build the call that marks the job as having entered a step."""
        progress = Progress(
            phase="prefill",
            prompt_tokens=len(self.prompt_token_ids),
            max_tokens=self.max_tokens * self.params.n,
        )
        return transitions.checkpoint(
            queue, self.job_id, self.token, progress, restart=self.restart_checkpoint
        )

    def checkpoint_call(
        self, queue: str, now: float, hmac_keys: Keys, keyring: KeyRing
    ) -> Call[CheckpointReply]:
        """Build the call that writes progress and the part that the stored checkpoint lacks."""
        digest = digest_of(self.fingerprint)

        def sign(entry: bytes) -> bytes:
            entry = keyring.seal(entry, "delta", self.job_id)
            return hmac_keys.sign_entry(entry, queue=queue, job_id=self.job_id, fingerprint=digest)

        return transitions.checkpoint(
            queue,
            self.job_id,
            self.token,
            self.progress(now),
            self.unsaved(),
            fingerprint=self.fingerprint,
            restart=self.restart_checkpoint,
            sign=sign,
        )

    def mark_saved(self, now: float) -> None:
        for delta in self.sending or ():
            self.samples[delta.index].mark_saved(delta)
        self.sending = None
        self.restart_checkpoint = False
        self.is_progress_saved = True
        self.saved_at = now

    def start_over(self) -> None:
        """Write the complete checkpoint again: the stored one is not as expected."""
        self.sending = None
        self.restart_checkpoint = True
        for sample in self.samples:
            sample.saved_tokens = sample.saved_chars = 0
            sample.saved_finish = False

    def progress(self, server_time: float) -> Progress:
        """Return the progress at that time; 0: at the end, with the server's time."""
        return Progress(
            phase=self.phase,
            prompt_tokens_done=self.prompt_tokens_done,
            prompt_tokens=len(self.prompt_token_ids),
            generated_tokens=self.generated_tokens,
            max_tokens=self.max_tokens * self.params.n if isinstance(self.task, Generate) else 0,
            kv_blocks=self.kv_blocks if server_time else 0,
            updated_at=server_time,
        )

    def usage(self) -> JobUsage:
        """Return the usage for the ledger: the counts of a complete job's result, or those computed so far."""
        return JobUsage(
            self.input_tokens if self.is_complete else self.prompt_tokens_done,
            self.cached_tokens,
            self.generated_tokens,
            self.device_s,
        )

    def times(self) -> dict[str, int]:
        """Return the breakdown of the execution's time, by the letters of account.py; empty before its last output."""
        if self.sent_at is None or self.left_engine_at is None:
            return {}
        parts = self.stay
        if parts is None:
            parts = (
                {"prompt": round(1000 * (self.left_engine_at - self.sent_at))}
                if self.pooled is not None
                else {}
            )
        numbers = {ENGINE_LETTERS[name]: number for name, number in parts.items()}
        return numbers | {"o": round(1000 * self.opening_s), "c": self.cached_tokens} if parts else {}

    def result_json(self, output: RequestOutput | None, *, tier: str, now: float) -> bytes:
        """Return the job's `Result` as JSON. Its large parts are never converted to objects together.

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
            b"null"
            if prompt_logprobs is None
            else prompt_logprobs_json(prompt_logprobs, self.prompt_token_ids, self.token_text)
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
            warnings=(output.warnings or None) if output is not None else None,
        )
        large = {"outputs": b"[%b]" % outputs, "prompt_logprobs": prompt}
        absent = {*large, *(("rows", "labels") if self.pooled is None else ())}
        if result.warnings is None:
            absent.add("warnings")
        members = large | _members(result, absent)
        if all(sample.syntax is None for sample in self.samples):
            members["usage"] = to_json(result.usage, exclude={"reasoning_tokens"})
        return _json_object(members)


def _members(model: BaseModel, omitted: Set[str]) -> dict[str, bytes]:
    """Return the JSON of all fields except those omitted."""
    names = (name for name in type(model).model_fields if name not in omitted)
    return {name: to_json(getattr(model, name), inf_nan_mode="null") for name in names}


def _json_object(members: Mapping[str, bytes]) -> bytes:
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in members.items())
