"""Intake: the request for a job, as a pure function of the job and its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagemill.common.fingerprint import with_adapter
from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.llm import LLM
from pagemill.engine.outputs import CompletionDelta, RequestOutput, SampleState
from pagemill.engine.tasks import GENERATE, Score
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Checkpoint, CheckpointSample, Result
from pagemill.producer.wire.schema.signing import Keys
from pagemill.worker.engine_host.host import EngineFace
from pagemill.worker.jobs.intake import request, running_job
from pagemill.worker.jobs.running_job import RunningJob

PULLED = PulledJob("job", 7, b"", "", (b"entry",), 1, 0, False, 100.0, None)


@cache
def echo_engine() -> EngineFace:
    return LLM("echo").engine


def checkpoint(*samples: tuple[str, str | None]) -> Checkpoint:
    """A checkpoint of samples by text and finish reason."""
    seqs = [
        CheckpointSample(index=index, token_ids=tuple(text.encode()), text=text, finish_reason=reason)
        for index, (text, reason) in enumerate(samples)
    ]
    return Checkpoint(fingerprint="f", seqs=tuple(seqs))


def resumed(saved: Checkpoint, **fields: Any) -> list[SampleState] | None:
    job = Job.parse({"prompt": "p", "model": "echo"} | fields)
    return request(job, saved, PULLED, echo_engine())[0].resume


def test_a_request_is_the_job_s() -> None:
    job = Job.parse({"prompt": "pq", "model": "echo", "priority": "high", "tenant": "t", "max_tokens": 5})
    added, syntax = request(job, None, PULLED, echo_engine())
    assert (added.request_id, added.arrival, added.priority, added.cache_salt) == ("job#7", 100.0, -1, "t")
    assert (len(added.prompt_token_ids), added.params.max_tokens) == (2, 5)
    assert (added.task, added.resume, added.adapter, syntax) == (GENERATE, None, None, None)
    assert request(job, None, PULLED, echo_engine()) == (added, syntax)  # with the same seed
    other = request(job, None, replace(PULLED, job_id="other"), echo_engine())[0]
    assert added.params.seed != other.params.seed
    job = Job.parse({"prompt": "p", "model": "echo", "seed": 5, "structured_outputs": {"regex": "a+"}})
    params = request(job, None, PULLED, echo_engine())[0].params
    assert (params.seed, params.structured_outputs and params.structured_outputs.regex) == (5, "a+")


class ReloadedAdapters:
    """Another process replaces the adapter between any two lookups."""

    def __init__(self) -> None:
        self.num_lookups = 0

    def find(self, name: str) -> Adapter:
        self.num_lookups += 1
        return Adapter(name, Path("/adapter"), f"digest {self.num_lookups}", 4, 100)


def test_a_job_s_adapter_is_the_one_of_its_fingerprint() -> None:
    adapters = ReloadedAdapters()
    engine = echo_engine()
    face = SimpleNamespace(
        fingerprint=engine.fingerprint, adapters=adapters, input_processor=engine.input_processor,
        token_texts=engine.token_texts, tokenizer=engine.tokenizer,
    )  # fmt: skip
    job = Job.parse({"prompt": "p", "model": "echo", "adapter": "a"})
    running = running_job(PULLED, job, cast(EngineFace, face), queue="q", keys=Keys(), started_at=100.0)
    assert running.request.adapter is not None
    assert running.fingerprint == with_adapter(engine.fingerprint, running.request.adapter.digest)
    assert adapters.num_lookups == 1


def test_what_the_engine_can_t_do_is_the_job_s_error() -> None:
    cases: tuple[tuple[dict[str, Any], type[Exception]], ...] = (
        ({"prompt": "x" * 100_000}, InvalidRequest),
        ({"inputs": ["a"], "task": "embed"}, InvalidRequest),
        ({"prompt": "p", "n": 64, "logprobs": 20, "max_tokens": 1000}, InvalidJob),
    )
    for fields, error in cases:
        with pytest.raises(error):
            request(Job.parse({"model": "echo"} | fields), None, PULLED, echo_engine())
    unknown = Job.parse({"model": "echo", "prompt": "p", "adapter": "none"})
    with pytest.raises(InvalidRequest):
        running_job(PULLED, unknown, echo_engine(), queue="q", keys=Keys(), started_at=100.0)


def test_samples_are_resumed_where_they_stand() -> None:
    states = resumed(checkpoint(("ab", None), ("c", "stop")), n=3)
    assert states == [
        SampleState(0, [97, 98], text="ab"),
        SampleState(1, [99], "stop", "c"),
        SampleState(2, []),
    ]


def test_what_has_no_state_to_resume_from_starts_over() -> None:
    half, whole = checkpoint(("ab", None)), checkpoint(("ab", "stop"))
    assert resumed(half, best_of=2) is None
    assert resumed(half, prompt_logprobs=1) == [SampleState(0, [97, 98], text="ab")]
    assert resumed(whole, prompt_logprobs=1) is None


def test_scored_continuations_are_resumed_whole_and_not_scored_twice() -> None:
    saved = checkpoint(("a", "stop"), ("b", None))
    job = Job.parse({"prompt": "p", "model": "echo", "task": "score", "continuations": ["a", "bcd"]})
    added, _ = request(job, saved, PULLED, echo_engine())
    assert isinstance(added.task, Score)
    assert added.resume == [SampleState(0, [97], "stop", "a"), SampleState(1, [])]
    running = RunningJob(PULLED, job, added, 0.0, None, checkpoint=saved)
    assert running.restart_checkpoint  # the stored half of the second sample is not used
    running.apply(
        RequestOutput(
            "job#7", "decode", 1, 1, [CompletionDelta(1, [98, 99, 100], "bcd", 0, finish_reason="stop")]
        )
    )
    result = Result.model_validate_json(running.result_json(None, tier="token", now=0.0))
    assert [output.text for output in result.outputs] == ["a", "bcd"]
