"""Interrupted requests: jobs that are run again, the gateway's shutdown, an unavailable server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from pagemill.producer.gateway import bounded_answer
from pagemill.producer.gateway import gateway as gateway_module
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.metrics import GatewayMetrics
from pagemill.producer.wire.calls.transitions import PulledJob
from tests.conftest import RedisServer
from tests.producer.driving import Queue, delta, open_queue
from tests.producer.gateway.listening import Listener, listening
from tests.producer.gateway.serving import Served, gateway, gateway_process
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

LONG = {"model": "echo", "prompt": "y" * 1200, "max_tokens": 1200, "ignore_eos": True}
"""More than two seconds' work for the echo worker below."""
ENDLESS = {"model": "echo", "prompt": "x" * 20, "max_tokens": 4_000, "ignore_eos": True}
"""Practically endless for a worker that takes 20 ms per token."""


@pytest.fixture
def by_hand(valkey_url: str, queue_name: str) -> Iterator[Queue]:
    """A queue whose worker is the test."""
    with open_queue(valkey_url, queue_name) as queue:
        yield queue


@pytest.fixture
def before_it(by_hand: Queue) -> Iterator[Served]:
    with gateway(by_hand.url, by_hand.name, models=("m",), ping_s=0.2) as served:
        yield served


def pulled(queue: Queue) -> PulledJob:
    jobs: list[PulledJob] = eventually(lambda: queue.pull(1), "a job")
    return jobs[0]


def begin(queue: Queue, listener: Listener) -> PulledJob:
    """The job of a stream that has sent one message and is then rerun from its prompt."""
    job = pulled(queue)
    assert queue.checkpoint(job, delta(0, 1, 2, text="one two")) == "ok"
    eventually(lambda: listener.text == "one two", "the first words")
    assert queue.retry(job, restart=True) == "retrying"
    queue.make_due(job.job_id)
    return pulled(queue)


def test_a_stream_whose_job_repeats_itself_goes_on(by_hand: Queue, before_it: Served) -> None:
    with listening(before_it, model="m") as listener:
        job = begin(by_hand, listener)
        by_hand.checkpoint(job, delta(0, 1, text="one"))
        by_hand.checkpoint(job, delta(1, 2, 3, text=" two three"))
        eventually(lambda: listener.text == "one two three", "what is new")
        by_hand.commit(job, "one two three")
    assert listener.text == "one two three"
    assert listener.is_done
    assert not listener.error


def test_a_stream_whose_job_contradicts_itself_ends_with_an_error(by_hand: Queue, before_it: Served) -> None:
    with listening(before_it, model="m") as listener:
        job = begin(by_hand, listener)
        by_hand.checkpoint(job, delta(0, 1, text="one"))
        by_hand.checkpoint(job, delta(1, 3, text=" three"))
    assert listener.text == "one two"
    assert listener.error["code"] == "stream_diverged"
    assert not listener.is_done
    assert "pagemill_gateway_stream_errors_total 1.0\n" in before_it.metrics()
    eventually(
        lambda: by_hand.checkpoint(job, delta(2, 4, text=" four")) == "cancelled", "the end of its job"
    )


def test_a_stream_whose_job_ends_before_what_was_sent(by_hand: Queue, before_it: Served) -> None:
    """The client has text that is not in the result."""
    with listening(before_it, model="m") as listener:
        job = begin(by_hand, listener)
        by_hand.commit(job, "one")
    assert listener.text == "one two"
    assert listener.error["code"] == "stream_diverged"
    assert not listener.is_done


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_open_requests_end(number: int, valkey_url: str, queue_name: str) -> None:
    config = worker_config(valkey_url, queue_name, model="echo:2", max_num_seqs=64)
    with (
        running_worker(config),
        gateway_process(valkey_url, queue_name, drain_s=round(PATIENCE_S)) as (served, process),
        ThreadPoolExecutor(1) as thread,
    ):
        with ExitStack() as streams:
            listeners = [streams.enter_context(listening(served, **LONG)) for _ in range(3)]
            whole = thread.submit(httpx.post, f"{served.base_url}/completions", json=LONG, timeout=PATIENCE_S)
            idle = streams.enter_context(served.connect())
            eventually(lambda: all(listener.text for listener in listeners), "the streams' begin")
            eventually(lambda: "requests_in_flight 5.0\n" in served.metrics(), "the request beside them")
            process.send_signal(number)
            assert idle.recv(1) == b""
        assert [listener.text for listener in listeners] == [LONG["prompt"]] * 3
        assert all(listener.is_done for listener in listeners)
        assert whole.result().json()["choices"][0]["text"] == LONG["prompt"]
        assert process.wait(PATIENCE_S) == 0
        with pytest.raises(httpx.ConnectError):
            served.is_alive()


@pytest.mark.slow
def test_what_outlasts_the_drain_is_told_so_and_its_jobs_end(valkey_url: str, queue_name: str) -> None:
    config = worker_config(valkey_url, queue_name, model="echo:20", max_num_seqs=64)
    with (
        running_worker(config),
        gateway_process(valkey_url, queue_name, drain_s=1) as (served, process),
        ThreadPoolExecutor(1) as thread,
    ):
        with ExitStack() as streams:
            listeners = [streams.enter_context(listening(served, **ENDLESS)) for _ in range(3)]
            whole = thread.submit(
                httpx.post, f"{served.base_url}/completions", json=ENDLESS, timeout=PATIENCE_S
            )
            eventually(lambda: all(listener.text for listener in listeners), "the streams' begin")
            eventually(lambda: "requests_in_flight 5.0\n" in served.metrics(), "the request beside them")
            process.send_signal(signal.SIGTERM)
        assert [listener.error.get("code") for listener in listeners] == ["stopping"] * 3
        answer = whole.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
        assert answer.headers["retry-after"]
        assert process.wait(PATIENCE_S) == 0
        client = QueueClient(valkey_url, queue_name)
        eventually(lambda: client.stats().counts.get("cancelled") == 4, "the end of every job")
        client.redis.close()


async def test_the_gateway_closes_after_its_last_requests_word(valkey_url: str, queue_name: str) -> None:
    """The server does not wait for the requests that it cancels; their cleanup is completed."""
    gateway = Gateway(GatewayConfig(redis_url=valkey_url, queue=queue_name), GatewayMetrics())
    is_seen_through = asyncio.Event()

    async def last_word() -> None:
        await asyncio.sleep(0.05)
        is_seen_through.set()

    async def cancelled_request() -> None:
        await asyncio.sleep(0.05)
        gateway.in_background(last_word())
        gateway.metrics.in_flight -= 1

    gateway.metrics.in_flight += 1
    async with asyncio.TaskGroup() as requests:
        requests.create_task(cancelled_request())
        await gateway.close()
        assert is_seen_through.is_set()


async def test_the_gateway_does_not_wait_for_what_never_ends(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One limit for the complete shutdown, on which a supervisor relies."""
    monkeypatch.setattr(gateway_module, "CLOSE_S", 0.1)
    never = asyncio.Event()
    for stuck in ("batches", "request", "word"):
        gateway = Gateway(GatewayConfig(redis_url=valkey_url, queue=queue_name), GatewayMetrics())
        batches = asyncio.create_task(_deaf(never) if stuck == "batches" else never.wait())
        await asyncio.sleep(0)
        gateway.metrics.in_flight += stuck == "request"
        if stuck == "word":
            gateway.in_background(_deaf(never))
        async with asyncio.timeout(PATIENCE_S):
            await gateway.close(batches)
        assert batches.cancelling()
        assert batches.done() == (stuck != "batches")
    never.set()


async def _deaf(until: asyncio.Event) -> None:
    while not until.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await until.wait()


@pytest.mark.slow
def test_a_server_that_hangs_does_not_hold_the_end_up(own_valkey: RedisServer, queue_name: str) -> None:
    """The server accepts connections and never replies, with a request in progress and one to cancel."""
    with (
        open_queue(own_valkey.url, queue_name) as queue,
        gateway_process(own_valkey.url, queue_name, drain_s=1, models=["m"]) as (served, process),
        ThreadPoolExecutor(1) as thread,
    ):
        asked = {"model": "m", "prompt": "x", "max_tokens": 5}
        whole = thread.submit(httpx.post, f"{served.base_url}/completions", json=asked, timeout=PATIENCE_S)
        pulled(queue)
        assert own_valkey.process is not None
        own_valkey.process.send_signal(signal.SIGSTOP)
        try:
            process.send_signal(signal.SIGTERM)
            answer = whole.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
            assert process.wait(PATIENCE_S) == 0
        finally:
            own_valkey.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_server_that_hangs_is_a_503_for_each_request(
    own_valkey: RedisServer, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests wait in parallel, not sequentially; afterwards the queue does not hold any of their jobs."""
    monkeypatch.setattr(bounded_answer, "ANSWER_S", 0.5)
    with (
        open_queue(own_valkey.url, queue_name) as queue,
        gateway(own_valkey.url, queue_name, models=["m"]) as served,
        ThreadPoolExecutor(8) as threads,
    ):
        asked = {"model": "m", "prompt": "x", "max_tokens": 5}

        def post(_: int) -> httpx.Response:
            return httpx.post(f"{served.base_url}/completions", json=asked, timeout=PATIENCE_S)

        assert own_valkey.process is not None
        own_valkey.process.send_signal(signal.SIGSTOP)
        try:
            answers = list(threads.map(post, range(8)))
        finally:
            own_valkey.process.send_signal(signal.SIGCONT)
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_unavailable")
            assert answer.headers["retry-after"]
        eventually(served.is_alive, "the queue to answer again")
        eventually(lambda: not queue.pull(8), "no job to be left")


def test_the_page_of_jobs_has_a_503_while_the_server_hangs(
    own_valkey: RedisServer, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lists are sequences of calls: none waits longer than the limit of one call."""
    asked = [
        ("GET", "list"), ("GET", "batches"), ("GET", "queue"), ("POST", "batches/b/cancel"), ("GET", "list"),
    ]  # fmt: skip
    with gateway(own_valkey.url, queue_name, models=["m"]) as served, ThreadPoolExecutor(8) as threads:

        def request(one: tuple[str, str]) -> httpx.Response:
            return httpx.request(one[0], f"{served.url}/jobs/api/{one[1]}", timeout=10.0)

        assert [request(one).status_code for one in asked] == [200, 200, 200, 404, 200]
        monkeypatch.setattr(bounded_answer, "ANSWER_S", 0.2)  # only now: a busy machine can need longer
        assert own_valkey.process is not None
        own_valkey.process.send_signal(signal.SIGSTOP)
        try:
            answers = list(threads.map(request, asked))
        finally:
            own_valkey.process.send_signal(signal.SIGCONT)
        assert [answer.status_code for answer in answers] == [503] * len(asked)


@pytest.mark.slow
def test_requests_outlive_a_server_that_comes_back(
    own_valkey: RedisServer, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = worker_config(own_valkey.url, queue_name, model="echo:2", max_num_seqs=64, lease_s=30.0)
    with (
        running_worker(config),
        gateway(own_valkey.url, queue_name) as served,
        ThreadPoolExecutor(1) as thread,
    ):
        url = f"{served.base_url}/completions"
        with listening(served, **LONG) as listener:
            whole = thread.submit(httpx.post, url, json=LONG, timeout=PATIENCE_S)
            eventually(lambda: "requests_in_flight 3.0\n" in served.metrics(), "two requests and ours")
            eventually(lambda: listener.text, "the stream's begin")
            own_valkey.kill()
            new = httpx.post(url, json=LONG, timeout=PATIENCE_S)
            assert (new.status_code, new.json()["error"]["code"]) == (503, "queue_unavailable")
            assert new.headers["retry-after"]
            assert not served.is_alive()
            assert httpx.get(f"{served.url}/healthz", timeout=PATIENCE_S).status_code == 200
            missed = "open batches cannot be looked for now"
            eventually(lambda: missed in caplog.text, "the log's word")
            for _ in range(5):  # each takes as long as the next check for batches
                assert not served.is_alive()
            assert caplog.text.count(missed) == 1
            own_valkey.start()
        assert (listener.text, listener.is_done, listener.error) == (LONG["prompt"], True, {})
        assert whole.result().json()["choices"][0]["text"] == LONG["prompt"]
        eventually(served.is_alive, "the gateway to be ready")
        eventually(lambda: httpx.post(url, json=LONG, timeout=PATIENCE_S).status_code == 200, "an answer")


@pytest.mark.slow
def test_a_server_that_stays_away_holds_no_request_beyond_its_deadline(
    own_valkey: RedisServer, queue_name: str
) -> None:
    queue = open_queue(own_valkey.url, queue_name)
    with gateway(own_valkey.url, queue_name, models=("m",), timeout_s=3.0) as served:
        with listening(served, model="m") as begun, listening(served, model="m") as waiting:
            jobs = [pulled(queue), pulled(queue)]
            queue.checkpoint(jobs[0], delta(0, 1, 2, text="one two"))
            eventually(lambda: begun.text or waiting.text, "the first words")
            own_valkey.kill()
        queue.transport.close()
        ends = sorted([begun, waiting], key=lambda listener: listener.text)
        assert [listener.status for listener in ends] == [504, 200]
        assert ends[1].error["code"] == "deadline_exceeded"
        eventually(
            lambda: "pagemill_gateway_requests_in_flight 1.0\n" in served.metrics(), "no request but ours"
        )
