"""A running job's record: its tokens, its pending checkpoint, and where it resumes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from pagemill.engine.outputs import CompletionDelta, RequestOutput
from pagemill.engine.plan import TokenLogprobs
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.checkpoints import merge_checkpoint
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Checkpoint, Output, Result
from pagemill.worker.config import WorkerConfig
from pagemill.worker.jobs.intake import request
from pagemill.worker.jobs.reporter import MAX_STREAMS_OFTEN, is_checkpoint_due
from pagemill.worker.jobs.running_job import RunningJob
from tests.worker.jobs.test_intake import echo_engine


def running_job(n: int = 1, checkpoint: Checkpoint | None = None, **fields: Any) -> RunningJob:
    pulled = PulledJob("job", 7, b"", "", (b"",) if checkpoint else (), 1, 0, False, 100.0, None)
    job = Job.parse({"prompt": "p", "model": "echo", "n": n} | fields)
    added, _ = request(job, checkpoint, pulled, echo_engine())
    return RunningJob(
        pulled=pulled,
        job=job,
        request=replace(added, prompt_token_ids=[1, 2], params=replace(added.params, max_tokens=8, seed=3)),
        started_at=101.0,
        expires_at=None,
        checkpoint=checkpoint,
    )


def outputs(job: RunningJob) -> tuple[Output, ...]:
    body = job.result_json(None, tier="token", now=102.0)
    return Result.model_validate_json(body).outputs


def news(*deltas: CompletionDelta, finished: bool = False) -> RequestOutput:
    return RequestOutput("job#7", "decode", 2, 2, list(deltas), finished)


def test_a_checkpoint_is_due_an_interval_after_the_first_news() -> None:
    config = WorkerConfig.load(model="echo", checkpoint_s=1.0, checkpoint_tokens=5, stream_checkpoint_s=0.1)
    job, streamed = running_job(), running_job(stream=True)
    long_after = time.monotonic() + 100.0
    assert not is_checkpoint_due(job, config, long_after)  # no update
    for each in (job, streamed):
        each.saved_at = time.monotonic() - 50.0
        each.apply(news(CompletionDelta(0, [5], "a", 0)))
    now = job.unsaved_since
    assert not is_checkpoint_due(job, config, now + 0.5)
    job.apply(news(CompletionDelta(0, [6], "b", 1)))  # more updates do not postpone it
    assert is_checkpoint_due(job, config, now + 1.0)
    assert is_checkpoint_due(streamed, config, now)
    job.unsaved()
    job.mark_saved(now + 1.0)
    assert not is_checkpoint_due(job, config, long_after)
    job.apply(news(CompletionDelta(0, [7, 8, 9, 10, 11], "cdefg", 2)))
    assert is_checkpoint_due(job, config, job.unsaved_since)  # 5 tokens


@pytest.mark.parametrize("uptime_s", [0.5, 300.0, 1500.0, 5000.0, 20_000.0, 1e6])
def test_many_streams_are_written_half_as_often_after_their_first_tokens(uptime_s: float) -> None:
    """Holds at any uptime: (t + 0.1) - t rounds to less than 0.1 for some of these, and to more for others."""
    config = WorkerConfig.load(model="echo", stream_checkpoint_s=0.1)
    job = running_job(stream=True)
    job.saved_at = began = uptime_s
    job.apply(news(CompletionDelta(0, [5], "a", 0)))
    assert is_checkpoint_due(job, config, began, streams=64), "the first token waits for nothing"
    job.unsaved()
    job.mark_saved(began + 0.1)
    job.apply(news(CompletionDelta(0, [6], "b", 1)))
    assert is_checkpoint_due(job, config, began + 0.25, streams=MAX_STREAMS_OFTEN)
    assert not is_checkpoint_due(job, config, began + 0.25, streams=MAX_STREAMS_OFTEN + 1)
    job.apply(news(CompletionDelta(0, [7], "c", 2)))
    assert is_checkpoint_due(job, config, began + 0.31, streams=64)
    assert [delta.text for delta in job.unsaved()] == ["bc"]


def test_a_job_whose_worker_died_is_checkpointed_at_its_first_token() -> None:
    """Five crashes without progress bury a job: random kills must not look like that."""
    config = WorkerConfig.load(model="echo", checkpoint_s=1.0, stream_checkpoint_s=0.1)
    job = running_job()
    job.pulled = replace(job.pulled, crashes=1)
    job.apply(news(CompletionDelta(0, [5], "a", 0)))
    assert is_checkpoint_due(job, config, job.unsaved_since)


def test_a_job_that_ends_with_its_next_token_is_not_checkpointed_before() -> None:
    config = WorkerConfig.load(model="echo", checkpoint_s=1.0, stream_checkpoint_s=0.1)
    job, streamed = running_job(), running_job(stream=True)
    for each in (job, streamed):
        each.apply(news(CompletionDelta(0, [5, 6, 7, 8, 9, 10], "abcdef", 0)))
        assert not each.is_about_to_end
        each.apply(news(CompletionDelta(0, [11], "g", 6)))
        assert each.is_about_to_end
    assert not is_checkpoint_due(job, config, time.monotonic() + 100.0)
    assert is_checkpoint_due(streamed, config, time.monotonic() + 100.0)


def test_deltas_append_to_the_checkpoint_without_gap_or_overlap() -> None:
    job = running_job()
    job.apply(news(CompletionDelta(0, [5], "a", 0)))
    job.apply(news(CompletionDelta(0, [6], "b", 1)))
    (first,) = job.unsaved()
    assert (first.offset, first.token_ids, first.text) == (0, (5, 6), "ab")
    job.mark_saved(now=1.0)
    assert job.unsaved() == []
    job.apply(news(CompletionDelta(0, [7], "", 2)))
    job.apply(news(CompletionDelta(0, [8], "cd", 3, finish_reason="length")))
    (second,) = job.unsaved()
    assert (second.offset, second.token_ids, second.text, second.finish_reason) == (2, (7, 8), "cd", "length")
    job.mark_saved(now=2.0)
    assert not job.has_unsaved


def test_a_write_of_unknown_outcome_is_repeated_exactly() -> None:
    job = running_job()
    job.apply(news(CompletionDelta(0, [5], "a", 0)))
    sent = job.unsaved()
    job.apply(news(CompletionDelta(0, [6], "b", 1)))
    assert job.unsaved() == sent
    job.mark_saved(now=1.0)
    assert [delta.token_ids for delta in job.unsaved()] == [(6,)]


def test_starting_over_writes_everything_again() -> None:
    job = running_job()
    job.apply(news(CompletionDelta(0, [5], "a", 0)))
    job.unsaved()
    job.mark_saved(now=1.0)
    job.apply(news(CompletionDelta(0, [6], "b", 1)))
    job.unsaved()
    job.start_over()
    (delta,) = job.unsaved()
    assert (delta.offset, delta.token_ids, delta.text) == (0, (5, 6), "ab")
    assert job.restart_checkpoint


def test_text_that_comes_without_tokens_is_saved_too() -> None:
    job = running_job()
    job.apply(news(CompletionDelta(0, [5], "", 0)))
    job.unsaved()
    job.mark_saved(now=1.0)
    job.apply(news(CompletionDelta(0, [], "held back", 1, finish_reason="stop")))
    (delta,) = job.unsaved()
    assert (delta.offset, delta.token_ids, delta.text, delta.finish_reason) == (1, (), "held back", "stop")


def test_samples_are_kept_apart_and_the_job_is_complete_when_all_are() -> None:
    job = running_job(n=2)
    job.apply(news(CompletionDelta(1, [9], "z", 0, finish_reason="stop"), CompletionDelta(0, [5], "a", 0)))
    assert not job.is_complete
    job.apply(news(CompletionDelta(0, [6], "b", 1, finish_reason="length"), finished=True))
    assert job.is_complete
    assert [(o.text, o.token_ids, o.finish_reason) for o in outputs(job)] == [
        ("ab", (5, 6), "length"),
        ("z", (9,), "stop"),
    ]


def test_an_aborted_sample_has_no_finish_reason() -> None:
    job = running_job()
    job.apply(news(CompletionDelta(0, [5], "a", 0, finish_reason="abort"), finished=True))
    assert not job.is_complete
    assert outputs(job)[0].finish_reason is None


def test_a_resumed_job_goes_on_where_its_checkpoint_ends() -> None:
    first = running_job(n=2)
    logprobs = [TokenLogprobs(5, -0.5, [(5, -0.5), (6, -1.0)])]
    first.apply(news(CompletionDelta(0, [5], "a", 0, logprobs=logprobs)))
    first.apply(news(CompletionDelta(1, [9], "z", 0, finish_reason="stop")))
    entries = [delta.model_dump_json(exclude_defaults=True).encode() for delta in first.unsaved()]
    second = running_job(n=2, checkpoint=merge_checkpoint(entries))
    assert not second.has_unsaved
    assert outputs(second) == outputs(first)
    second.apply(news(CompletionDelta(0, [6], "b", 1, finish_reason="length"), finished=True))
    assert [output.text for output in outputs(second)] == ["ab", "z"]


def test_only_whole_json_is_parsed() -> None:
    job = running_job(n=2, structured_outputs={"json": {"type": "object"}})
    job.apply(news(CompletionDelta(0, [5], '{"a": 1}', 0, finish_reason="stop")))
    job.apply(news(CompletionDelta(1, [6], '{"a": 1}', 0, finish_reason="length")))
    assert [output.parsed for output in outputs(job)] == [{"a": 1}, None]


def test_prompt_logprobs_are_told_with_the_end() -> None:
    job = running_job()
    last = news(CompletionDelta(0, [5], "a", 0, finish_reason="stop"), finished=True)
    last.prompt_logprobs = [None, TokenLogprobs(2, -0.5, [(3, -0.25)])]
    job.apply(last)
    body = job.result_json(last, tier="token", now=102.0)
    result = Result.model_validate_json(body)
    assert result.prompt_logprobs is not None
    first, second = result.prompt_logprobs
    assert first is not None
    assert second is not None
    assert (first.chosen.token_id, first.chosen.logprob) == (job.prompt_token_ids[0], None)
    assert (second.chosen.token_id, second.chosen.logprob, second.top[0].token_id) == (2, -0.5, 3)
