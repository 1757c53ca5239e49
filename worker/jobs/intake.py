"""Turns a pulled job into a runnable one: checks its signature and fields, tokenises, finds its checkpoint."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Literal

from pagemill.chat.parser import ChatSyntax
from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.pooling.input_processor import PoolInput
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import GENERATE, Generate, Pool, Score, Task
from pagemill.engine.text.chat import ChatOptions
from pagemill.fingerprint import digest_of, may_continue, with_adapter
from pagemill.producer.wire.calls.rendering import rendered
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Checkpoint
from pagemill.producer.wire.schema.sealing import ring
from pagemill.producer.wire.schema.signing import Keys, SignedPayload, split_payload
from pagemill.producer.wire.schema.tasks import POOLED_TASKS
from pagemill.producer.wire.schema.text.chat import NamedToolChoice
from pagemill.producer.wire.store.store import MAX_STORED_BYTES
from pagemill.producer.wire.store.stub import Reference, read_payload_stub
from pagemill.worker.engine_host.host import EngineHost
from pagemill.worker.jobs.context import WorkerContext
from pagemill.worker.jobs.logprob_columns import LogprobColumns
from pagemill.worker.jobs.pooled_rows import encoded_bytes
from pagemill.worker.jobs.running_job import (
    MAX_LOGPROBS,
    MAX_RESULT_BYTES,
    RunningJob,
    SampleRecord,
    engine_params,
    sample_records,
)
from pagemill.worker.webhooks.policy import Refused, WebhookPolicy

logger = logging.getLogger(__name__)

Unusable = Literal["unsigned", "broken", "fingerprint"]
"""Why a checkpoint can't be resumed: not signed with our key; malformed; from another model."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint a job resumes from. None: it starts at its prompt, for the reason in `unusable`, if any."""

    checkpoint: Checkpoint | None = None
    unusable: Unusable | None = None


class Intake:
    """Checks a job before it runs. Called on admission's thread."""

    def __init__(self, context: WorkerContext, engine: EngineHost, webhooks: WebhookPolicy) -> None:
        self._queue = context.config.queue
        self._engine = engine
        self._counters = context.counters
        self._keys = context.hmac_keys
        self._keyring = ring()
        self._webhooks = webhooks

    def running_job(self, pulled: PulledJob, started_at: float) -> RunningJob:
        """Check, tokenise, and find the resume point.

        Args:
            started_at: unix seconds by the server's clock.

        Raises:
            InvalidJob, pagemill.engine.errors.InvalidRequest: the job's own error. No message quotes its input.
        """
        job = self._checked(pulled)
        engine = self._engine.engine
        adapter = None if job.adapter is None else engine.adapters.find(job.adapter)
        fingerprint = (
            engine.fingerprint if adapter is None else with_adapter(engine.fingerprint, adapter.digest)
        )
        prompt_token_ids, params, task, syntax = self._processed(job, pulled.job_id)
        check_result_size(job, params, len(prompt_token_ids), task)
        point = ResumePoint() if isinstance(task, Pool) else self._resume_point(pulled, fingerprint)
        texts = engine.token_texts
        if isinstance(task, Generate) and task.outline is not None and task.outline.trigger:
            # Where its calls ended is known to the process that followed them, and to no one else.
            point = ResumePoint(unusable="broken" if point.checkpoint is not None else point.unusable)
        samples = sample_records(point.checkpoint, params.n, texts, whole=isinstance(task, Score))
        if isinstance(task, Score) and job.continuations is None and not samples[0].token_ids:
            self._begin_with(samples[0], prompt_token_ids, task)
        if params.is_ranked and not all(sample.finish_reason for sample in samples):
            # Candidates are ranked at the end: a checkpoint holds only finished choices, or nothing to resume
            # from.
            samples = sample_records(None, params.n)
            point = ResumePoint(unusable="broken" if point.checkpoint is not None else point.unusable)
        is_scored_too = params.prompt_logprobs is not None or params.label_probs is not None
        if is_scored_too and all(sample.finish_reason for sample in samples):
            # All tokens were generated, but other log-probabilities need another run.
            samples, point = sample_records(None, params.n), ResumePoint(unusable="broken")
        running = RunningJob(
            pulled=pulled,
            job=job,
            prompt_token_ids=prompt_token_ids,
            params=params,
            task=task,
            started_at=started_at,
            expires_at=_expires_at(pulled, job, started_at),
            samples=samples,
            fingerprint=fingerprint,
            adapter=adapter,
            token_text=texts,
            restart_checkpoint=point.unusable is not None,
            saved_at=time.monotonic(),
            labels=self._engine.input_processor.labels if job.task == "classify" else (),
        )
        running.resumed_tokens = running.generated_tokens
        for sample in samples:
            sample.syntax = None if syntax is None else str(syntax)
        return running

    def _processed(self, job: Job, job_id: str) -> tuple[list[int], SamplingParams, Task, ChatSyntax | None]:
        """Return the job as the engine takes it, and how to read its text, if not as it is.

        Raises InvalidJob and `pagemill.engine.errors.InvalidRequest`.
        """
        if job.task in POOLED_TASKS:
            return *self._pooled(job), None
        messages = None
        if job.messages is not None:
            messages = [message.model_dump(mode="json", exclude_none=True) for message in job.messages]
        given: dict[str, Any] = {
            "prompt": job.prompt,
            "messages": messages,
            "prompt_token_ids": job.prompt_token_ids,
            "params": engine_params(job, job_id),
        }
        processor = self._engine.input_processor
        if job.is_parsed:
            return processor.process_chat(messages or (), chat_options(job), given["params"])
        match job.task:
            case "generate":
                return *processor.process(**given), GENERATE, None
            case _:
                return *processor.process_score(job.continuations or (), **given), None

    def _pooled(self, job: Job) -> tuple[list[int], SamplingParams, Task]:
        assert job.task in ("embed", "classify", "rerank")
        token_ids, params, task = self._engine.input_processor.process_pool(
            PoolInput(
                kind=job.task,
                texts=job.texts,
                query=job.prompt if job.documents is not None else None,
                prompt_name=job.prompt_name,
                dimensions=job.dimensions,
                truncate=job.truncate,
            )
        )
        size = encoded_bytes(len(task.lengths), task.width, job.rows_dtype)
        if size > MAX_RESULT_BYTES:
            raise InvalidJob(
                f"its result would have {size:,} bytes, the limit is {MAX_RESULT_BYTES:,}: send fewer texts in a job, "
                "or ask for fewer dimensions or rows_dtype float16",
                "result_too_large",
            )
        return token_ids, params, task

    def _begin_with(self, sample: SampleRecord, context: list[int], task: Task) -> None:
        """Start a scored prompt with all of its text, and its first token, which has no prediction."""
        assert isinstance(task, Score)
        tokenizer, (token_id,) = self._engine.engine.tokenizer, context
        sample.token_ids.append(token_id)
        sample.text = "" if tokenizer is None else tokenizer.decode([token_id, *task.continuations[0]])
        sample.logprobs = LogprobColumns(self._engine.engine.token_texts)
        sample.logprobs.extend([TokenLogprobs(token_id, None)])

    def reference(self, pulled: PulledJob) -> Reference | None:
        """Return where a job's payload lies, if it is in the store. Raises InvalidJob (`unsigned`)."""
        payload = split_payload(pulled.payload)
        reference = read_payload_stub(payload.envelope)
        if reference is not None:
            self._check_signature(pulled, payload, reference.tenant)
        return reference

    def _check_signature(self, pulled: PulledJob, payload: SignedPayload, tenant: str) -> None:
        names = {"queue": self._queue, "job_id": pulled.job_id, "tenant": tenant}
        self._keys.check_payload(payload, **names, submitted_at=pulled.submitted_at)

    def _checked(self, pulled: PulledJob) -> Job:
        payload = split_payload(pulled.payload)
        if pulled.fetched_for is not None:
            job = Job.from_payload(self._opened(pulled, pulled.payload), MAX_STORED_BYTES)
            if job.tenant != pulled.fetched_for:
                raise InvalidJob("the stored payload is another tenant's job", "unsigned")
        else:
            job = Job.from_payload(self._opened(pulled, payload.envelope))
            self._check_signature(pulled, payload, job.tenant)
        if job.webhook is not None:
            try:
                self._webhooks.check(job.webhook)
            except Refused as refusal:
                raise InvalidJob(str(refusal), "unsupported_feature") from None
        return job if job.after is None else rendered(job, payload.outputs)

    def _opened(self, pulled: PulledJob, envelope: bytes) -> bytes:
        return self._keyring.open_job(envelope, pulled.job_id)

    def _resume_point(self, pulled: PulledJob, fingerprint: str) -> ResumePoint:
        point = resume_point(
            pulled,
            queue=self._queue,
            fingerprint=fingerprint,
            vocab_size=self._engine.input_processor.vocab_size,
            hmac_keys=self._keys,
        )
        if point.unusable is not None:
            tokens = _count_tokens(pulled)
            self._counters.redone_tokens.inc(tokens)
            logger.warning(
                "job %s: starts from its prompt, its checkpoint of %d tokens can't be used (%s)",
                pulled.job_id,
                tokens,
                point.unusable,
            )
        return point


def check_result_size(job: Job, params: SamplingParams, num_prompt_tokens: int, task: Task) -> None:
    """Refuse log-probabilities that no result can hold, if the job's own fields tell how many there may be.

    Raises:
        InvalidJob: result_too_large.
    """
    wanted = 0
    if isinstance(task, Score):
        wanted += task.num_tokens * ((params.logprobs or 0) + 1)
    elif params.logprobs is not None and job.max_tokens is not None and params.max_tokens is not None:
        wanted += params.num_sequences * params.max_tokens * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        wanted += num_prompt_tokens * (params.prompt_logprobs + 1)
    if wanted > MAX_LOGPROBS:
        raise InvalidJob(
            f"it asks for up to {wanted:,} log-probabilities (samples x tokens x alternatives, and those of the "
            f"prompt), the limit is {MAX_LOGPROBS:,}: lower n, max_tokens or logprobs",
            "result_too_large",
        )


def chat_options(job: Job) -> ChatOptions:
    choice = job.tool_choice or "auto"
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    return ChatOptions(
        tools=[tool.model_dump(mode="json", exclude_none=True) for tool in job.tools or ()],
        choice="required" if isinstance(choice, NamedToolChoice) else choice,
        function=name,
        is_parallel=job.parallel_tool_calls is not False,
        template_kwargs=job.chat_template_kwargs or {},
        reasoning_effort=job.reasoning_effort,
    )


def resume_point(
    pulled: PulledJob, *, queue: str, fingerprint: str, vocab_size: int, hmac_keys: Keys
) -> ResumePoint:
    """Check that an engine with this `fingerprint` can resume from the whole stored checkpoint."""
    if not pulled.entries:
        return ResumePoint()
    if not may_continue(pulled.fingerprint, fingerprint):
        return ResumePoint(unusable="fingerprint")
    names = {"queue": queue, "job_id": pulled.job_id, "fingerprint": digest_of(fingerprint)}
    if not all(hmac_keys.is_entry_ours(entry, **names) for entry in pulled.entries):
        return ResumePoint(unusable="unsigned")
    try:
        checkpoint = pulled.checkpoint
    except ValueError:
        return ResumePoint(unusable="broken")
    assert checkpoint is not None, "entries make samples"
    for sample in checkpoint.seqs:
        if any(not 0 <= token_id < vocab_size for token_id in sample.token_ids):
            return ResumePoint(unusable="broken")
    return ResumePoint(checkpoint)


def _count_tokens(pulled: PulledJob) -> int:
    try:
        checkpoint = pulled.checkpoint
    except ValueError:
        return 0
    return sum(len(sample.token_ids) for sample in checkpoint.seqs) if checkpoint is not None else 0


def _expires_at(pulled: PulledJob, job: Job, now: float) -> float | None:
    """Return `time.monotonic()` at the job's deadline or the end of its timeout, whichever comes first."""
    seconds = [
        *([] if job.timeout is None else [job.timeout]),
        *([] if pulled.deadline is None else [pulled.deadline - now]),
    ]
    return time.monotonic() + min(seconds) if seconds else None
