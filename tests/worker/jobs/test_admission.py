"""Pull credit: arithmetic on the engine's status and the running jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from pagemill.engine.outputs import Capacity, EngineStats, KVCacheStats, LoadedModel
from pagemill.engine.sampling_params import SamplingParams
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from pagemill.worker.engine_host.messages import AddRequest, EngineState
from pagemill.worker.engine_host.thread import EngineThread
from pagemill.worker.jobs.admission import MAX_JOBS_PER_PULL, MAX_MEDIA_BYTES, OutputForecast, credit
from pagemill.worker.jobs.running_job import RunningJob

BLOCK_SIZE = 16


@dataclass
class EngineFigures:
    """The part of an engine that admission reads."""

    available_blocks: int = 100
    max_num_seqs: int = 8
    state: EngineState = EngineState.RUNNING
    stalled_s: float = 0.0
    block_limits: tuple[int | None, ...] = (None,)

    @property
    def capacity(self) -> Capacity | None:
        return Capacity(self.max_num_seqs, self.available_blocks, BLOCK_SIZE, 0, self.block_limits)

    @property
    def stats(self) -> EngineStats:
        kv = KVCacheStats(200, BLOCK_SIZE, 100, 0, 100, 0, 0, 100, 0)
        return EngineStats(kv, loaded=LoadedModel(max_num_seqs=self.max_num_seqs))

    def stalled_for(self) -> float:
        return self.stalled_s


def job(prompt: int = 32, max_tokens: int = 48, generated: int = 0, done: int = 0, n: int = 1) -> RunningJob:
    running = RunningJob(
        pulled=PulledJob("j", 1, b"", "", (), 1, 0, False, 0.0, None),
        job=Job.parse({"prompt": "p", "model": "m"}),
        request=AddRequest(
            request_id="j#1", prompt_token_ids=[0] * prompt, params=SamplingParams(max_tokens=max_tokens, n=n)
        ),
        started_at=0.0,
        expires_at=None,
    )
    running.prompt_tokens_done = done
    running.samples[0].token_ids = [0] * generated
    return running


def credit_of(figures: EngineFigures, *running: RunningJob, forecast: OutputForecast | None = None):
    return credit(cast(EngineThread, figures), list(running), forecast or OutputForecast())


def test_an_idle_engine_gives_all_it_has() -> None:
    given = credit_of(EngineFigures(available_blocks=100, max_num_seqs=8))
    assert (given.jobs, given.tokens, given.blocked) == (8, 1600, None)


def test_running_jobs_keep_room_to_grow() -> None:
    # 32 + 48 more tokens for the job that the engine has not started, 48 - 8 for the job that decodes.
    given = credit_of(EngineFigures(), job(), job(done=32, generated=8))
    assert given.tokens == 1600 - (32 + 48) - 40


def test_where_layers_have_windows_long_jobs_take_fewer_blocks_for_their_tokens() -> None:
    figures = EngineFigures(block_limits=(None, 6))
    assert credit_of(figures).tokens == 100 // 2 * BLOCK_SIZE
    # Out of 320 tokens: 20 blocks in one group, 6 in the other. The running job has 10 and 6, and will need 10 more.
    long = job(prompt=160, max_tokens=160, done=160)
    assert credit_of(figures, long).tokens == (100 - 10) * 320 // 26
    samples = job(prompt=160, max_tokens=80, done=160, n=2)
    assert credit_of(figures, samples).tokens == (100 - 2 * 10) * 320 // 26
    assert credit_of(EngineFigures(available_blocks=10, block_limits=(None, 6)), long).blocked == "kv"
    # One window for all layers: past it, tokens need no more blocks.
    assert credit_of(EngineFigures(block_limits=(6,)), long).tokens == 100 * 320 // 6


def test_every_sample_takes_a_row_and_its_own_output() -> None:
    given = credit_of(EngineFigures(max_num_seqs=8), job(n=3))
    assert (given.jobs, given.tokens) == (5, 1600 - 32 - 3 * 48)


def test_images_of_running_jobs_are_bounded() -> None:
    first, second = job(), job()
    first.media_bytes, second.media_bytes = MAX_MEDIA_BYTES // 2, MAX_MEDIA_BYTES // 2
    assert credit_of(EngineFigures(), first).blocked is None
    assert credit_of(EngineFigures(), first, second).blocked == "rows"
    second.has_left_engine = True
    assert credit_of(EngineFigures(), first, second).blocked is None


def test_no_row_and_no_block_are_told_apart() -> None:
    assert credit_of(EngineFigures(max_num_seqs=2), job(), job()).blocked == "rows"
    assert credit_of(EngineFigures(available_blocks=5), job()).blocked == "kv"


def test_without_running_jobs_even_an_empty_pool_is_asked_for_one() -> None:
    # The job that never fits must fail, not wait forever.
    given = credit_of(EngineFigures(available_blocks=0))
    assert (given.jobs > 0, given.tokens, given.blocked) == (True, 0, None)


def test_a_job_that_has_left_the_engine_holds_nothing() -> None:
    done = job()
    done.has_left_engine = True
    assert credit_of(EngineFigures(max_num_seqs=1), done).jobs == 1


def test_rows_that_the_next_step_frees_are_given_while_it_runs() -> None:
    ends = job(max_tokens=4, done=32, generated=3)
    goes_on = job(max_tokens=4, done=32, generated=2)
    given = credit_of(EngineFigures(max_num_seqs=2), ends, goes_on)
    assert (given.jobs, given.blocked) == (1, None)
    # The job that was pulled for the batch slot waits for it and uses it: no more jobs are pulled.
    assert credit_of(EngineFigures(max_num_seqs=2), ends, goes_on, job()).blocked == "rows"


def test_a_row_is_not_given_before_its_job_is_past_its_prompt() -> None:
    resumed = job(max_tokens=4, done=0, generated=3)
    in_chunks = job(max_tokens=1, done=31)
    assert credit_of(EngineFigures(max_num_seqs=2), resumed, in_chunks).blocked == "rows"


def test_all_samples_of_a_job_must_be_about_to_end() -> None:
    one_of_two = job(max_tokens=4, done=32, generated=3, n=2)
    assert credit_of(EngineFigures(max_num_seqs=2), one_of_two).blocked == "rows"
    one_of_two.samples[1].finish_reason = "stop"
    assert credit_of(EngineFigures(max_num_seqs=2), one_of_two).jobs == 2


def test_jobs_that_end_early_leave_room_for_more() -> None:
    forecast = OutputForecast()
    before = credit_of(EngineFigures(), job(done=32), forecast=forecast).tokens
    for _ in range(100):
        forecast.observe(job(generated=5))
    after = credit_of(EngineFigures(), job(done=32), forecast=forecast).tokens
    assert after > before
    # The estimate never expects it to finish immediately.
    assert forecast.remaining(job(done=32, generated=40)) >= 1


def test_an_engine_that_cannot_take_jobs_gets_none() -> None:
    assert credit_of(EngineFigures(state=EngineState.LOADING)).blocked == "loading"
    assert credit_of(EngineFigures(state=EngineState.HELD)).blocked == "results"
    assert credit_of(EngineFigures(stalled_s=3.0)).blocked == "engine"


def test_a_pull_stays_small_enough_to_tokenise_within_a_lease() -> None:
    assert credit_of(EngineFigures(max_num_seqs=1024)).jobs == MAX_JOBS_PER_PULL
