"""Conversion of an opened job into an engine request, and the checkpoint that it resumes from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pagemill.common.chat.syntax import ChatSyntax
from pagemill.common.fingerprint import digest_of, may_continue, with_adapter
from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.media import MediaItem
from pagemill.engine.outputs import SampleState
from pagemill.engine.pooling.input_processor import PoolingInputProcessor, PoolInput
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import GENERATE, Generate, Pool, Score, Task
from pagemill.engine.text.chat import ChatOptions
from pagemill.engine.text.input_processor import InputProcessor
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Checkpoint
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.schema.tasks import POOLED_TASKS
from pagemill.producer.wire.schema.text.chat import NamedToolChoice
from pagemill.worker.engine_host.host import EngineFace
from pagemill.worker.engine_host.messages import AddRequest
from pagemill.worker.jobs.images import engine_messages
from pagemill.worker.jobs.pooled_rows import encoded_bytes
from pagemill.worker.jobs.running_job import MAX_LOGPROBS, MAX_RESULT_BYTES, RunningJob

PRIORITIES = {"high": -1, "normal": 0, "low": 1}
"""The wire's priorities as the engine's: lower runs first."""

Unusable = Literal["unsigned", "broken", "fingerprint"]
"""Why a checkpoint cannot be resumed: not signed with this worker's key; malformed; from another model."""


def running_job(
    pulled: PulledJob, job: Job, engine: EngineFace, *, queue: str, keys: Keys, started_at: float
) -> RunningJob:
    """Create the record of a job that is about to run.

    Args:
        keys: those that sign checkpoints.
        started_at: unix seconds by the server's clock.

    Raises:
        InvalidJob, pagemill.engine.errors.InvalidRequest: the job's own error. No message quotes its input.
    """
    fingerprint = engine.fingerprint
    # Looked up once: between two lookups, a reload may replace the adapter of this name.
    adapter = None if job.adapter is None else engine.adapters.find(job.adapter)
    if adapter is not None:
        fingerprint = with_adapter(fingerprint, adapter.digest)
    processor = engine.input_processor
    resume = _checkpoint(pulled, queue, keys, fingerprint, processor.vocab_size)
    unusable = resume if isinstance(resume, str) else None
    checkpoint = resume if isinstance(resume, Checkpoint) else None
    added, syntax = request(job, checkpoint, pulled, engine, adapter)
    running = RunningJob(
        pulled=pulled,
        job=job,
        request=added,
        started_at=started_at,
        expires_at=_expires_at(pulled, job, started_at),
        checkpoint=checkpoint,
        unusable=unusable,
        fingerprint=fingerprint,
        token_text=engine.token_texts,
        syntax=None if syntax is None else str(syntax),
        saved_at=time.monotonic(),
        labels=processor.labels if job.task == "classify" else (),
    )
    if running.scores_prompt:
        running.begin_with_prompt(engine.tokenizer)
    return running


def request(
    job: Job,
    resume: Checkpoint | None,
    pulled: PulledJob,
    engine: EngineFace,
    adapter: Adapter | None = None,
) -> tuple[AddRequest, ChatSyntax | None]:
    """Return the engine request of a job, and the syntax of its text, if it has one.

    Args:
        resume: a checkpoint that an engine with this fingerprint wrote.
        adapter: the adapter that the job names.

    Raises:
        InvalidJob, pagemill.engine.errors.InvalidRequest: the job's own error. No message quotes its input.
    """
    assert (adapter is None) == (job.adapter is None)
    token_ids, params, task, syntax, media = processed(job, pulled.job_id, engine.input_processor)
    if isinstance(task, Pool):
        _check_rows(job, task)
    _check_result_size(job, params, len(token_ids), task)
    added = AddRequest(
        request_id=f"{pulled.job_id}#{pulled.token}",  # a requeued job has another token
        prompt_token_ids=token_ids,
        params=params,
        task=task,
        priority=PRIORITIES[job.priority],
        arrival=pulled.submitted_at,
        resume=_sample_states(resume, params, task) if engine.input_processor.can_resume(token_ids) else None,
        adapter=adapter,
        cache_salt=job.tenant,  # a tenant must not learn another's prompts by timing
        media=media,
    )
    return added, syntax


def processed(
    job: Job, job_id: str, processor: InputProcessor | PoolingInputProcessor
) -> tuple[list[int], SamplingParams, Task, ChatSyntax | None, tuple[MediaItem, ...]]:
    """Return a job's prompt tokens, its parameters and task, the syntax of its text, if any, and its media.

    Raises:
        InvalidJob, pagemill.engine.errors.InvalidRequest: the job's own error. No message quotes its input.
    """
    if job.task in POOLED_TASKS:
        return *processor.process_pool(_pool_input(job)), None, ()
    params = _params(job, job_id, processor.defaults.sampling)
    if job.images and isinstance(processor, InputProcessor):
        pictured = processor.read_images(engine_messages(job))
        made = _processed_text(job, params, pictured, processor)
        return *made, processor.media_of(made[0], pictured)
    messages = None
    if job.messages is not None:
        messages = [message.model_dump(mode="json", exclude_none=True) for message in job.messages]
    return *_processed_text(job, params, messages, processor), ()


def _processed_text(
    job: Job,
    params: SamplingParams,
    messages: Sequence[Mapping[str, Any]] | None,
    processor: InputProcessor | PoolingInputProcessor,
) -> tuple[list[int], SamplingParams, Task, ChatSyntax | None]:
    is_chat = messages is not None and job.task == "generate"
    if job.is_parsed or (is_chat and processor.parses_every_chat):
        return processor.process_chat(messages or (), _chat_options(job), params)
    given: dict[str, Any] = {
        "prompt": job.prompt,
        "messages": messages,
        "prompt_token_ids": job.prompt_token_ids,
        "params": params,
    }
    if job.task == "score":
        return *processor.process_score(job.continuations or (), **given), None
    return *processor.process(**given), GENERATE, None


def _params(job: Job, job_id: str, model_defaults: Mapping[str, float]) -> SamplingParams:
    """Return the engine's sampling parameters for the job. Raises `pagemill.engine.errors.InvalidRequest`.

    A job without a seed (submitted by hand) gets one from its id: the same on every worker.
    """
    fields: dict[str, Any] = job.sampling(model_defaults)
    if fields["seed"] is None:
        digest = hashlib.blake2b(job_id.encode(), digest_size=8).digest()
        fields["seed"] = int.from_bytes(digest, "big") >> 1
    return SamplingParams(**fields)


def _sample_states(resume: Checkpoint | None, params: SamplingParams, task: Task) -> list[SampleState] | None:
    """Return the state from which each sample continues; None: all start from the prompt."""
    if resume is None or isinstance(task, Pool):
        return None
    if isinstance(task, Generate) and task.outline is not None and task.outline.trigger:
        return None  # only the process that followed its calls knows where they ended
    states = [SampleState(index, []) for index in range(params.n)]
    for saved in resume.seqs:
        # A continuation is scored in one piece.
        if saved.index < params.n and (saved.finish_reason is not None or not isinstance(task, Score)):
            states[saved.index] = SampleState(
                saved.index, list(saved.token_ids), saved.finish_reason, saved.text
            )
    is_complete = all(state.finish_reason is not None for state in states)
    if params.is_ranked and not is_complete:
        return None  # candidates are ranked at the end: only finished choices are in a checkpoint
    if is_complete and (params.prompt_logprobs is not None or params.label_probs is not None):
        return None  # all tokens were generated, but other log-probabilities need another run
    return states


def _pool_input(job: Job) -> PoolInput:
    assert job.task in ("embed", "classify", "rerank")
    return PoolInput(
        kind=job.task,
        texts=job.texts,
        query=job.prompt if job.documents is not None else None,
        prompt_name=job.prompt_name,
        dimensions=job.dimensions,
        truncate=job.truncate,
    )


def _check_rows(job: Job, task: Pool) -> None:
    size = encoded_bytes(len(task.lengths), task.width, job.rows_dtype)
    if size > MAX_RESULT_BYTES:
        raise InvalidJob(
            f"the result would have {size:,} bytes, the limit is {MAX_RESULT_BYTES:,}: send fewer texts in a job, "
            "or ask for fewer dimensions or rows_dtype float16",
            "result_too_large",
        )


def _check_result_size(job: Job, params: SamplingParams, num_prompt_tokens: int, task: Task) -> None:
    """Reject log-probabilities that exceed a result, if the job's own fields determine their number.

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
            f"the job asks for up to {wanted:,} log-probabilities (samples x tokens x alternatives, and those of the "
            f"prompt), the limit is {MAX_LOGPROBS:,}: lower n, max_tokens or logprobs",
            "result_too_large",
        )


def _chat_options(job: Job) -> ChatOptions:
    choice = job.tool_choice or "auto"
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    return ChatOptions(
        tools=[tool.model_dump(mode="json", exclude_none=True) for tool in job.tools or ()],
        choice="required" if isinstance(choice, NamedToolChoice) else choice,
        function=name,
        is_parallel=job.parallel_tool_calls,
        template_kwargs=job.chat_template_kwargs or {},
        reasoning_effort=job.reasoning_effort,
    )


def _checkpoint(
    pulled: PulledJob, queue: str, keys: Keys, fingerprint: str, vocab_size: int
) -> Checkpoint | Unusable | None:
    """Return the stored checkpoint, if there is one, or why an engine with this fingerprint cannot resume it."""
    if not pulled.entries:
        return None
    if not may_continue(pulled.fingerprint, fingerprint):
        return "fingerprint"
    names = {"queue": queue, "job_id": pulled.job_id, "fingerprint": digest_of(fingerprint)}
    if not all(keys.is_entry_ours(entry, **names) for entry in pulled.entries):
        return "unsigned"
    try:
        checkpoint = pulled.checkpoint
    except ValueError:
        return "broken"
    assert checkpoint is not None, "entries make samples"
    for sample in checkpoint.seqs:
        if any(not 0 <= token_id < vocab_size for token_id in sample.token_ids):
            return "broken"
    return checkpoint


def _expires_at(pulled: PulledJob, job: Job, now: float) -> float | None:
    """Return `time.monotonic()` at the job's deadline or the end of its timeout, whichever comes first."""
    seconds = [
        *([] if job.timeout is None else [job.timeout]),
        *([] if pulled.deadline is None else [pulled.deadline - now]),
    ]
    return time.monotonic() + min(seconds) if seconds else None
