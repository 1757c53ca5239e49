"""Celery as a producer: native jobs, Celery's results, links, chains and chords, on a real server."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from celery.signals import task_success

from pagemill import InvalidJob, Producer
from pagemill.common.error_codes import END_CODES, FINAL_CODES, RETRYABLE_CODES
from pagemill.producer.celery import generation_task
from pagemill.producer.celery.progress import ProgressWriter
from pagemill.producer.celery.relay import Relay
from pagemill.producer.celery.task import job_fields, plain_error
from pagemill.producer.wire.calls import outbox
from pagemill.producer.wire.schema.errors import JobDead, JobFailed
from tests.conftest import ROOT, RedisServer
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config


@pytest.fixture(scope="module")
def engine(server: RedisServer) -> Iterator[Any]:
    with running_worker(worker_config(server.url, "native", model="echo:5")) as worker:
        yield worker


@pytest.fixture(scope="module")
def shop(server: RedisServer, engine: Any) -> Any:
    os.environ["SHOP_BROKER"] = server.url
    module = importlib.import_module("tests.integration.celery.native_shop")
    yield module
    module.generate.producer.close()


@pytest.fixture(scope="module")
def ordinary_worker(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Celery's own worker for the shop's other tasks."""
    log_path = tmp_path_factory.mktemp("log") / "celery.log"
    app = "tests.integration.celery.native_shop"
    command = [sys.executable, "-m", "celery", "-A", app, "worker", "-P", "threads", "-c", "2", "-l", "INFO"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=environment(server.url), cwd=ROOT, stdout=log, stderr=log)
    eventually(lambda: process.poll() is not None or b" ready." in log_path.read_bytes(), "the Celery worker")
    assert process.poll() is None, log_path.read_text()
    yield
    process.terminate()
    process.wait(timeout=PATIENCE_S)


def environment(url: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    return kept | {"SHOP_BROKER": url}


def relay_process(url: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "pagemill", "celery-relay", "--celery-app", "tests.integration.celery.native_shop:app",
        "--redis-url", url, "--queue", "native", "--queue", "native-two",
    ]  # fmt: skip
    return subprocess.Popen(command, env=environment(url), cwd=ROOT, stderr=subprocess.DEVNULL)


@pytest.fixture
def relay(server: RedisServer, shop: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = relay_process(server.url)
    yield process
    process.terminate()
    assert process.wait(timeout=PATIENCE_S) == 0


@pytest.mark.slow
def test_delay_and_get(shop: Any, relay: Any) -> None:
    handle = shop.generate.delay(prompt="hello", max_tokens=20)
    result = handle.get(timeout=PATIENCE_S)
    assert result["text"] == "hello"
    assert result["id"] == handle.id
    assert handle.state == "SUCCESS"


@pytest.mark.slow
def test_chains_and_chords(shop: Any, relay: Any, ordinary_worker: None) -> None:
    loud = chain(shop.generate.s(prompt="this", max_tokens=9), shop.shout.s()).apply_async()
    twice = chain(shop.generate.s(prompt="once", max_tokens=9), shop.generate.s(max_tokens=9)).apply_async()
    many = chord([shop.generate.s(prompt=f"row {i}", max_tokens=9) for i in range(50)])(shop.collect.s())
    assert loud.get(timeout=PATIENCE_S) == "THIS"
    assert twice.get(timeout=PATIENCE_S)["text"] == "once"
    assert many.get(timeout=PATIENCE_S) == [f"row {i}" for i in range(50)]


@pytest.mark.slow
def test_a_group_after_a_native_task_is_native(shop: Any, relay: Any) -> None:
    """The relay starts it on a thread, where Celery knows no app unless it is set."""
    steps = chain(shop.generate.s(prompt="once", max_tokens=9), group(shop.generate.s(), shop.generate.s()))
    assert [result["text"] for result in steps.apply_async().get(timeout=PATIENCE_S)] == ["once"] * 2


@pytest.mark.slow
def test_stamps_reach_the_results_of_native_tasks(shop: Any, relay: Any) -> None:
    signature = shop.generate.s(prompt="hello", max_tokens=9)
    signature.stamp(customer="abc")
    assert signature.apply_async().get(timeout=PATIENCE_S)["text"] == "hello"


@pytest.mark.slow
def test_a_task_that_is_sent_twice_under_one_id_is_one(shop: Any, relay: Any) -> None:
    handles = [
        shop.generate.apply_async(kwargs={"prompt": "hello", "max_tokens": 9}, task_id="order-7")
        for _ in range(2)
    ]
    assert [handle.get(timeout=PATIENCE_S)["text"] for handle in handles] == ["hello"] * 2
    with pytest.raises(InvalidJob, match="same task_id"):
        shop.generate.delay(prompt="hello", idempotency_key="order-7")


@pytest.mark.slow
def test_a_failed_job_fails_its_task(shop: Any, relay: Any) -> None:
    handle = shop.generate.delay(prompt="x" * 9000)
    with pytest.raises(ValueError, match="prompt_too_long"):
        handle.get(timeout=PATIENCE_S)


def test_calls_without_a_message_wait_for_their_job(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shop.generate("hello")["text"] == "hello"
    assert shop.generate.apply(kwargs={"prompt": "hello"}).get()["text"] == "hello"
    monkeypatch.setitem(shop.app.conf, "task_always_eager", True)
    assert shop.generate.apply_async(kwargs={"prompt": "hello"}, task_id="e1").get()["text"] == "hello"
    assert chain(shop.generate.s("this"), shop.shout.s()).delay().get() == "THIS"
    refused = shop.generate.delay(prompt="hello", max_tokens=-1)
    assert refused.failed()
    assert "max_tokens" in str(refused.result)
    monkeypatch.setitem(shop.app.conf, "task_eager_propagates", True)
    with pytest.raises(ValueError, match="max_tokens"):
        shop.generate.delay(prompt="hello", max_tokens=-1)


def test_a_wrong_job_is_refused_in_the_caller(shop: Any) -> None:
    with pytest.raises(InvalidJob):
        shop.generate.delay(prompt="x", max_tokens=0)
    with pytest.raises(InvalidJob, match="an id is"):
        shop.generate.apply_async(kwargs={"prompt": "x"}, task_id="order:7 (b)")


def test_times_become_the_jobs(shop: Any, server: RedisServer) -> None:
    handle = shop.generate.apply_async(kwargs={"prompt": "late"}, countdown=3600, expires=7200)
    status = shop.generate.producer.job(handle.id).status()
    assert status.state == "delayed"
    assert status.deadline == pytest.approx(status.created_at + 7200, abs=5)
    assert shop.generate.producer.job(handle.id).cancel()


def test_a_countdown_that_has_passed_is_none() -> None:
    task = generation_task(Celery("late"), model="echo", url="redis://127.0.0.1:1", queue="native")
    assert task._times({"countdown": -0.5}) == {}
    assert task._times({"countdown": 0.5}) == {"delay": 0.5}


def test_times_are_those_that_celery_accepts() -> None:
    task = generation_task(Celery("times"), model="echo", url="redis://127.0.0.1:1", queue="native")
    noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    assert task._times({"eta": noon.isoformat()}) == {"run_at": noon.timestamp()}
    assert task._times({"expires": "2026-05-01T12:00:00"}) == {"deadline": noon.timestamp()}
    assert task._times({"eta": noon, "countdown": 5}) == {"delay": 5.0}
    for wrong in ("tomorrow", 7):
        with pytest.raises(InvalidJob, match="is not a time"):
            task._times({"eta": wrong})


def test_a_task_without_a_model_takes_the_one_that_is_served() -> None:
    assert job_fields((), {"prompt": "x", "model": None}, None) == {"prompt": "x"}
    assert job_fields((), {"prompt": "x", "model": None}, "m") == {"prompt": "x", "model": "m"}
    assert job_fields((), {"prompt": "x", "model": "n"}, "m") == {"prompt": "x", "model": "n"}


def test_a_task_that_has_expired_is_revoked(shop: Any, relay: Any) -> None:
    handle = shop.generate.apply_async(kwargs={"prompt": "late"}, expires=-1)
    with pytest.raises(TaskRevokedError, match="expired"):
        handle.get(timeout=PATIENCE_S)


def long_task(shop: Any, **options: Any) -> Any:
    """A task of 3,000 steps of 5 ms each."""
    return shop.generate.apply_async(kwargs={"prompt": "x" * 3000, "max_tokens": 3000}, **options)


def revoke_until_ended(handle: Any, **options: Any) -> None:
    """Revoke repeatedly: until a relay listens, no process receives a revocation."""

    def ended() -> bool:
        handle.revoke(**options)
        return bool(handle.ready())

    eventually(ended, "the revoked task's end")


@pytest.mark.parametrize(
    ("options", "priority"),
    [
        ({}, "normal"), ({"priority": 0}, "high"), ({"priority": 5}, "normal"), ({"priority": 9}, "low"),
        ({"priority": "low"}, "low"),
    ],
)  # fmt: skip
def test_the_priority_is_that_of_celerys_redis(shop: Any, options: dict[str, Any], priority: str) -> None:
    handle = shop.generate.apply_async(kwargs={"prompt": "late"}, countdown=3600, **options)
    job = shop.generate.producer.job(handle.id)
    assert job.status().priority == priority
    assert job.cancel()


def test_a_priority_among_the_keywords_wins_and_another_broker_counts_the_other_way() -> None:
    app = Celery("rabbits", broker="amqp://localhost")
    task = generation_task(app, model="echo", url="redis://127.0.0.1:1", queue="native")
    assert task._priority({"priority": 9}) == {"priority": "high"}
    assert task._priority({"priority": 0}) == {"priority": "low"}


def test_a_keyword_wins_over_celerys_priority(shop: Any) -> None:
    fields = {"prompt": "late", "priority": "high"}
    handle = shop.generate.apply_async(kwargs=fields, countdown=3600, priority=9)
    assert shop.generate.producer.job(handle.id).status().priority == "high"
    assert shop.generate.producer.job(handle.id).cancel()


@pytest.mark.slow
def test_the_queue_is_the_native_one(shop: Any, relay: Any, server: RedisServer) -> None:
    with running_worker(worker_config(server.url, "native-two")):
        handle = shop.generate.apply_async(kwargs={"prompt": "there", "max_tokens": 9}, queue="native-two")
        assert handle.get(timeout=PATIENCE_S)["text"] == "there"
    assert shop.generate.producer_of("native-two").job(handle.id).status().queue == "native-two"
    with pytest.raises(InvalidJob):
        shop.generate.apply_async(kwargs={"prompt": "x"}, queue="no such queue")


@pytest.mark.slow
def test_time_limits_raise_celerys_errors(shop: Any, relay: Any) -> None:
    soft = long_task(shop, soft_time_limit=0.5, time_limit=60)
    hard = long_task(shop, time_limit=0.5)
    with pytest.raises(SoftTimeLimitExceeded):
        soft.get(timeout=PATIENCE_S)
    with pytest.raises(TimeLimitExceeded):
        hard.get(timeout=PATIENCE_S)


@pytest.mark.slow
def test_progress_with_meta_then_the_end(shop: Any, relay: Any, engine: Any) -> None:
    handle = long_task(shop)
    seen = eventually(lambda: handle.info if handle.state == "PROGRESS" else None, "PROGRESS")
    assert 0 < seen["generated_tokens"] <= 3000
    assert seen["phase"] == "decode"
    revoke_until_ended(handle, terminate=True)
    with pytest.raises(TaskRevokedError):
        handle.get(timeout=PATIENCE_S)
    eventually(lambda: len(engine.table) == 0, "the engine to let go")
    assert handle.state == "REVOKED"


@pytest.mark.slow
def test_revoking_what_waits_needs_no_terminate(shop: Any, relay: Any) -> None:
    running = long_task(shop)
    eventually(lambda: running.state == "PROGRESS", "its start")
    waiting = shop.generate.apply_async(kwargs={"prompt": "late"}, countdown=3600)
    running.revoke()
    revoke_until_ended(waiting)
    with pytest.raises(TaskRevokedError):
        waiting.get(timeout=PATIENCE_S)
    assert shop.generate.producer.job(running.id).status().state == "running"
    revoke_until_ended(running, terminate=True)
    with pytest.raises(TaskRevokedError):
        running.get(timeout=PATIENCE_S)


def test_a_revocation_touches_no_job_of_others(shop: Any, server: RedisServer) -> None:
    with Producer(server.url, queue="native") as producer:
        job = producer.submit(model="echo", prompt="mine", delay=3600)
        with closing(Relay(shop.app, server.url, "native")) as relay:
            relay.revoke([job.id, "no-such-job"], True)
        assert job.status().state == "delayed"
        assert job.cancel()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")  # of Celery's backend
def test_progress_of_a_moment_ago_does_not_hide_the_end(shop: Any, server: RedisServer) -> None:
    """Two relays: one read a status before the end, the other has stored the end before the first one writes."""
    handle = long_task(shop, soft_time_limit=1)
    job = shop.generate.producer.job(handle.id)
    status = eventually(lambda: (s := job.status()).progress.generated_tokens and s, "tokens")
    relay = Relay(shop.app, server.url, "native")
    eventually(lambda: relay.relay() and handle.ready(), "its end")
    transport = QueueClient(server.url, "native")
    ProgressWriter(shop.app, "native", transport).store([status])  # type: ignore[arg-type]
    assert handle.state == "FAILURE"
    assert isinstance(handle.result, SoftTimeLimitExceeded)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")  # of Celery's backend
def test_the_runtime_is_the_jobs(shop: Any, server: RedisServer) -> None:
    handle = shop.generate.delay(prompt="x" * 200, max_tokens=200)
    result = shop.generate.producer.job(handle.id).result(timeout=PATIENCE_S)
    told: dict[str, float] = {}

    def note(sender: Any, **fields: Any) -> None:
        told[sender.request.id] = fields["runtime"]

    task_success.connect(note)
    try:
        with closing(Relay(shop.app, server.url, "native")) as relay:
            eventually(relay.relay, "its end")
    finally:
        task_success.disconnect(note)
    assert result.timing.e2e_s is not None
    assert result.timing.queue_s is not None
    ran_s = result.timing.e2e_s - result.timing.queue_s
    assert ran_s > 0.5, "200 steps of 5 ms"
    assert told[handle.id] >= ran_s


@pytest.mark.slow
def test_a_relay_that_is_killed_leaves_nothing_undone(shop: Any, server: RedisServer) -> None:
    handles = [shop.generate.delay(prompt=f"row {i}", max_tokens=9) for i in range(60)]
    first = relay_process(server.url)
    eventually(lambda: any(handle.ready() for handle in handles), "the first result")
    first.send_signal(signal.SIGKILL)
    first.wait()
    queue = QueueClient(server.url, "native")
    claimed = queue.redis.zcard("pagemill:{native}:outbox:celery")
    queue.redis.zunionstore("pagemill:{native}:outbox:celery", {"pagemill:{native}:outbox:celery": 0})
    assert claimed <= 60
    second = relay_process(server.url)
    try:
        assert [handle.get(timeout=PATIENCE_S)["text"] for handle in handles] == [
            f"row {i}" for i in range(60)
        ]
        eventually(lambda: not queue.redis.zcard("pagemill:{native}:outbox:celery"), "an empty outbox")
    finally:
        second.send_signal(signal.SIGHUP)
        assert second.wait(timeout=PATIENCE_S) == 0


@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")  # of Celery's backend
def test_an_end_is_relayed_to_its_own_box(shop: Any, server: RedisServer) -> None:
    """Claims of one relay do not see another's, nor the webhooks'."""
    handle = shop.generate.delay(prompt="mine", max_tokens=9)
    shop.generate.producer.job(handle.id).result(timeout=PATIENCE_S)
    queue = QueueClient(server.url, "native")
    assert queue.run(outbox.claim("native", 10, 1000)) == []
    assert queue.run(outbox.claim("native", 10, 1000, relay="other")) == []
    # Other tests of this server may have left notifications: they are claimed too, and not relayed below.
    claimed = queue.run(outbox.claim("native", 1000, 60_000, relay="celery"))
    (notice,) = (each for each in claimed if each.outcome.job_id == handle.id)
    assert queue.run(outbox.claim("native", 10, 1000, relay="celery")) == [], "claimed twice"
    assert not queue.run(
        outbox.finish_delivery("native", handle.id, notice.tries + 1, None, relay="celery")
    ), "a stale try"
    assert queue.run(outbox.finish_delivery("native", handle.id, notice.tries, 0, relay="celery"))
    with closing(Relay(shop.app, server.url, "native")) as relay:
        assert relay.relay() == 1
    queue.redis.close()
    assert handle.get(timeout=PATIENCE_S)["text"] == "mine"


@pytest.mark.slow
def test_a_wrong_job_is_a_value_error_whatever_is_wrong() -> None:
    assert {type(plain_error(JobFailed("no", code))) for code in FINAL_CODES} == {ValueError}
    others = RETRYABLE_CODES | END_CODES
    assert {type(plain_error(JobDead("no", code))) for code in others} == {RuntimeError}
