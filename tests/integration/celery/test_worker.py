"""A Celery shop and `pagemill celery-worker`, both as processes, on a real server."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord, group
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from tests.conftest import ROOT, RedisServer
from tests.topologies import Certificates, tls_server
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

TASK = "pagemill.generate"


@pytest.fixture(scope="module")
def engine(server: RedisServer) -> Iterator[Any]:
    """The worker behind the native queue; 5 ms per step, so that a job lasts long enough to be revoked or killed."""
    with running_worker(worker_config(server.url, "celery", model="echo:5", lease_s=6.0)) as worker:
        yield worker


@pytest.fixture(scope="module")
def shop(server: RedisServer) -> Any:
    os.environ["SHOP_BROKER"] = server.url
    module = importlib.import_module("tests.integration.celery.shop")
    return module


@contextmanager
def celery_worker(
    url: str,
    log: Path,
    *options: str,
    until: str = " ready.",
    level: str = "INFO",
    app: str | None = "tests.integration.celery.shop:app",
) -> Iterator[subprocess.Popen[bytes]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    environment = kept | {"SHOP_BROKER": url, "PAGEMILL_REDIS_URL": url}
    command = [
        sys.executable, "-m", "pagemill", "celery-worker", "--model", "echo", "--concurrency", "100", *options,
        *(("--celery-app", app) if app else ()), "--", "-n", f"{uuid.uuid4().hex[:8]}@test",
        "--loglevel", level,
    ]  # fmt: skip
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, cwd=ROOT, start_new_session=True
        )
    try:
        eventually(lambda: process.poll() is not None or until in log.read_text(), "the Celery worker")
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def plain_worker(url: str, log: Path, queue: str) -> Iterator[None]:
    """Celery's own worker for the same app, with one thread."""
    command = [
        sys.executable, "-m", "celery", "-A", "tests.integration.celery.shop:app", "worker", "-P", "threads", "-c", "1",
        "-Q", queue, "-n", f"{uuid.uuid4().hex[:8]}@test", "--loglevel", "INFO", "--prefetch-multiplier", "1",
    ]  # fmt: skip
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env=os.environ | {"SHOP_BROKER": url}, stdout=file, stderr=file, cwd=ROOT
        )
    try:
        eventually(lambda: process.poll() is not None or " ready." in log.read_text(), "Celery's worker")
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def worker(
    server: RedisServer, engine: Any, shop: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    with celery_worker(server.url, log_path(tmp_path_factory), level="DEBUG") as process:
        yield process


def log_path(factory: pytest.TempPathFactory) -> Path:
    return factory.getbasetemp() / "celery-worker.log"


@pytest.fixture
def generate(shop: Any, worker: Any) -> Callable[..., Any]:
    """Send a task as any app can: a name, keywords, a queue."""

    def send(*args: Any, options: dict[str, Any] | None = None, **fields: Any) -> Any:
        return shop.app.send_task(TASK, args=args, kwargs=fields, queue="pagemill", **(options or {}))

    return send


def test_a_task_and_its_result(generate: Callable[..., Any]) -> None:
    result = generate(prompt="hello", max_tokens=20).get(timeout=PATIENCE_S)
    assert result["text"] == "hello"
    assert result["usage"]["prompt_tokens"] == 5
    assert result["outputs"][0]["finish_reason"] == "stop"


@pytest.mark.slow
def test_an_idempotency_key_gives_the_earlier_result(generate: Callable[..., Any]) -> None:
    first, second = (generate(prompt="hello", max_tokens=9, idempotency_key="order-7") for _ in range(2))
    texts = [handle.get(timeout=PATIENCE_S) for handle in (first, second)]
    assert texts[0]["id"] == texts[1]["id"]
    assert texts[1]["text"] == "hello"


def test_any_id_of_a_task_works(generate: Callable[..., Any]) -> None:
    handle = generate(prompt="hello", max_tokens=9, options={"task_id": "user:42/r\u00e9port " + "x" * 80})
    assert handle.get(timeout=PATIENCE_S)["text"] == "hello"


@pytest.mark.slow
def test_a_chain_goes_on_in_the_shop_s_own_worker(
    server: RedisServer, engine: Any, shop: Any, tmp_path: Path
) -> None:
    """Without the shop's app, follow-up tasks go to Celery's default queue, and generations to Pagemill's."""
    first = shop.app.signature(TASK, kwargs={"prompt": "hi", "max_tokens": 9}, queue="apart")
    with (
        celery_worker(server.url, tmp_path / "apart.log", "--queue", "apart", app=None),
        plain_worker(server.url, tmp_path / "plain.log", "celery"),
    ):
        made = chain(first, shop.app.signature(TASK, kwargs={"max_tokens": 9}), shop.shout.s()).apply_async()
        assert made.get(timeout=PATIENCE_S) == "HI"


@pytest.mark.slow
def test_a_generation_does_not_start_after_its_expiry(
    server: RedisServer, engine: Any, shop: Any, tmp_path: Path
) -> None:
    """One thread runs another task, which is acknowledged early: the generation is received, and waits for it."""
    options = ("--concurrency", "1", "--queue", "one-thread")
    with celery_worker(server.url, tmp_path / "worker.log", *options):
        busy = shop.app.send_task("shop.nap", (3.0,), queue="one-thread")
        late = shop.app.send_task(TASK, kwargs={"prompt": "late"}, queue="one-thread", expires=1.5)
        with pytest.raises(TaskRevokedError, match="expired"):
            late.get(timeout=PATIENCE_S)
        assert busy.get(timeout=PATIENCE_S) == 3.0


@pytest.mark.slow
@pytest.mark.parametrize("is_ours", [True, False], ids=["pagemill celery-worker", "celery worker -P threads"])
def test_own_tasks_end_as_with_celerys_own_threads(
    is_ours: bool, server: RedisServer, engine: Any, shop: Any, tmp_path: Path
) -> None:
    """Neither checks the expiry of a task that waits for a thread, or has time limits, as docs/celery.md states."""
    queue = f"threads-{is_ours}"
    with (
        celery_worker(server.url, tmp_path / "worker.log", "--concurrency", "1", "--queue", queue)
        if is_ours
        else plain_worker(server.url, tmp_path / "worker.log", queue)
    ):
        busy = shop.app.send_task("shop.nap", (2.0,), queue=queue, soft_time_limit=1, time_limit=1)
        late = shop.app.send_task("shop.nap", (0.0,), queue=queue, expires=1)
        assert busy.get(timeout=PATIENCE_S) == 2.0
        assert late.get(timeout=PATIENCE_S) == 0.0


def test_labels_have_probabilities(generate: Callable[..., Any]) -> None:
    shape = {"choice": ["good", "bad"]}
    value = generate("bad or good?", structured_outputs=shape, label_probs="product").get(timeout=PATIENCE_S)
    assert value["label"] == value["text"] == "bad"
    assert list(value["label_probs"]) == ["good", "bad"]
    assert sum(value["label_probs"].values()) == pytest.approx(1.0)


def test_neither_prompt_nor_text_is_in_the_log_whatever_its_level(
    generate: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    handle = generate(prompt="dromedary", max_tokens=20)
    assert handle.get(timeout=PATIENCE_S)["text"] == "dromedary"
    log = log_path(tmp_path_factory)
    end = f"{handle.id}] succeeded"
    eventually(lambda: end in log.read_text(), "the line of its end")
    assert "DEBUG" in log.read_text()
    assert "dromedary" not in log.read_text()


@pytest.mark.slow
def test_the_runtime_is_the_generations(
    generate: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    handle = generate(prompt="x" * 200, max_tokens=200)
    timing = handle.get(timeout=PATIENCE_S)["timing"]
    line = re.compile(rf"{handle.id}\] succeeded in ([0-9.]+)s")
    found = eventually(lambda: line.search(log_path(tmp_path_factory).read_text()), "the line of its end")
    assert timing["e2e_s"] - timing["queue_s"] > 0.5, "200 steps of 5 ms"
    assert float(found[1]) >= timing["e2e_s"] - timing["queue_s"]


@pytest.mark.slow
def test_hundreds_share_the_batch(generate: Callable[..., Any], engine: Any) -> None:
    """200 tasks of 50 steps of 5 ms: sequentially they would take 50 s."""
    before = engine.engine.stats.steps.finished
    handles = [generate(prompt=f"{i:03d} " + "x" * 46, max_tokens=60) for i in range(200)]
    assert [handle.get(timeout=PATIENCE_S)["text"][:3] for handle in handles] == [
        f"{i:03d}" for i in range(200)
    ]
    steps = engine.engine.stats.steps.finished - before
    assert steps < 200 * 50 / 5, steps


def test_chains_groups_and_links(generate: Callable[..., Any], shop: Any) -> None:
    signature = shop.app.signature(TASK, kwargs={"max_tokens": 30}, queue="pagemill")
    made = chain(shop.make_prompt.s("this"), signature, shop.shout.s()).apply_async()
    assert made.get(timeout=PATIENCE_S) == "SAY THIS"
    many = group(
        shop.app.signature(TASK, kwargs={"prompt": str(i), "max_tokens": 9}, queue="pagemill")
        for i in range(5)
    ).apply_async()
    assert [result["text"] for result in many.get(timeout=PATIENCE_S)] == list("01234")


@pytest.mark.slow
def test_a_chord_of_200(generate: Callable[..., Any], shop: Any) -> None:
    header = [
        shop.app.signature(TASK, kwargs={"prompt": f"row {i}", "max_tokens": 9}, queue="pagemill")
        for i in range(200)
    ]
    result = chord(header)(shop.collect.s())
    assert result.get(timeout=PATIENCE_S) == [f"row {i}" for i in range(200)]


@pytest.mark.slow
def test_ordinary_tasks_run_beside(shop: Any, worker: Any) -> None:
    assert shop.make_prompt.delay("me").get(timeout=PATIENCE_S) == "say me"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": "x", "max_tokens": 0}, ValueError),
        ({"no_such": 1}, ValueError),
        ({"prompt": "x" * 9000}, ValueError),
    ],
)
def test_errors_reach_a_caller_without_our_code(
    generate: Callable[..., Any], fields: dict[str, Any], error: type[Exception]
) -> None:
    handle = generate(**fields)
    with pytest.raises(error):
        handle.get(timeout=PATIENCE_S)
    assert handle.state == "FAILURE"


@pytest.mark.slow
def test_progress_then_success(generate: Callable[..., Any]) -> None:
    handle = generate(prompt="x" * 700, max_tokens=700)
    seen = eventually(lambda: handle.info if handle.state == "PROGRESS" else None, "PROGRESS")
    assert 0 < seen["generated_tokens"] <= 700
    assert len(handle.get(timeout=PATIENCE_S)["text"]) == 700
    time.sleep(1.5)
    assert handle.state == "SUCCESS", "PROGRESS was written over the end"


@pytest.mark.slow
def test_revoking_hits_the_right_one(generate: Callable[..., Any], shop: Any, engine: Any) -> None:
    doomed, spared = (generate(prompt=letter * 1000, max_tokens=1000) for letter in "ds")
    eventually(lambda: doomed.state == "PROGRESS", "its start")
    shop.app.control.revoke(doomed.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        doomed.get(timeout=PATIENCE_S)
    assert spared.get(timeout=PATIENCE_S)["text"] == "s" * 1000
    eventually(lambda: len(engine.table) == 0, "the engine to let go")


@pytest.mark.slow
def test_time_limits(generate: Callable[..., Any], engine: Any) -> None:
    soft = generate(prompt="x" * 2000, max_tokens=2000, options={"soft_time_limit": 1})
    hard = generate(prompt="y" * 2000, max_tokens=2000, options={"time_limit": 1})
    with pytest.raises(SoftTimeLimitExceeded):
        soft.get(timeout=PATIENCE_S)
    with pytest.raises(TimeLimitExceeded):
        hard.get(timeout=PATIENCE_S)
    eventually(lambda: len(engine.table) == 0, "the engine to let go")


@pytest.mark.slow
def test_celerys_own_inspection_answers(generate: Callable[..., Any], shop: Any) -> None:
    handle = generate(prompt="x" * 2000, max_tokens=2000)
    # There is one worker: without the limit, each call would wait for others, and the task would end meanwhile.
    inspect = shop.app.control.inspect(timeout=10, limit=1)
    eventually(
        lambda: handle.id in {task["id"] for tasks in (inspect.active() or {}).values() for task in tasks},
        "the task among the active ones",
    )
    replies = dict[str, Any]()
    eventually(lambda: replies.update(inspect.stats() or {}) or replies, "the statistics")
    (stats,) = replies.values()
    assert stats["pool"]["implementation"].endswith("pool:TaskPool")
    for change in (shop.app.control.pool_grow, shop.app.control.pool_shrink):
        (answer,) = change(1, reply=True, timeout=PATIENCE_S, limit=1)
        assert "another --concurrency" in str(answer)
    assert len(handle.get(timeout=PATIENCE_S)["text"]) == 2000


@pytest.fixture
def flower(server: RedisServer, worker: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Flower's process next to the shop; a call queries its HTTP API."""
    if importlib.util.find_spec("flower") is None:
        pytest.skip("flower is not installed; it is in the dev extra")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / "flower.log"
    environment = os.environ | {"SHOP_BROKER": server.url, "FLOWER_UNAUTHENTICATED_API": "true"}
    command = [
        sys.executable, "-m", "celery", "-A", "tests.integration.celery.shop:app", "flower",
        "--address=127.0.0.1", f"--port={port}",
    ]  # fmt: skip
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=ROOT)

    def ask(path: str, *, post: bool = False) -> Any:
        """None: it does not respond, or not yet with the requested data."""
        assert process.poll() is None, log.read_text()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/api/{path}", method="POST" if post else "GET"
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return json.load(reply)
        except OSError:
            return None

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


@pytest.mark.slow
def test_flower_shows_the_worker_and_its_tasks_and_revokes_one(
    flower: Callable[..., Any], generate: Callable[..., Any], engine: Any
) -> None:
    (found,) = eventually(lambda: flower("workers?refresh=1"), "Flower to find the worker").values()
    assert found["stats"]["pool"]["implementation"].endswith("pool:TaskPool")
    assert [queue["name"] for queue in found["active_queues"]] == ["pagemill"]
    assert TASK in found["registered"]

    def is_listed(task_id: str, state: str) -> bool:
        task = flower(f"task/info/{task_id}")
        return bool(task) and (task["name"], task["state"]) == (TASK, state)

    def shows_an_end() -> bool:
        # A separate task each time: Flower shows events that it has received, and it may have just subscribed.
        done = generate(prompt="hello")
        assert done.get(timeout=PATIENCE_S)["text"] == "hello"
        give_up = time.monotonic() + 10
        while not is_listed(done.id, "SUCCESS") and time.monotonic() < give_up:
            time.sleep(0.2)
        return is_listed(done.id, "SUCCESS")

    eventually(shows_an_end, "Flower to show the end")
    doomed = generate(prompt="x" * 2500, max_tokens=2500)
    eventually(lambda: doomed.state == "PROGRESS", "its start")
    assert flower(f"task/revoke/{doomed.id}?terminate=true", post=True)
    with pytest.raises(TaskRevokedError):
        doomed.get(timeout=PATIENCE_S)
    eventually(lambda: is_listed(doomed.id, "REVOKED"), "Flower to show the revocation")
    eventually(lambda: len(engine.table) == 0, "the engine to let go")


@pytest.mark.slow
def test_a_worker_that_is_loading_is_waited_for(server: RedisServer, queue_name: str, tmp_path: Path) -> None:
    client = QueueClient(server.url, queue_name)
    loading = WorkerInfo(id="loading", models=(), state="loading")
    client.run(registry.heartbeat(queue_name, loading, ttl_ms=300_000))
    client.redis.close()
    log = tmp_path / "celery.log"
    options = ("--queue", queue_name, "--native-queue", queue_name)
    with (
        celery_worker(server.url, log, *options, until="waiting for the worker") as process,
        running_worker(worker_config(server.url, queue_name)),
    ):
        eventually(lambda: process.poll() is not None or " ready." in log.read_text(), "the Celery worker")
    assert f"a live worker of queue {queue_name} serves echo; using it" in log.read_text()
    assert "starting a worker" not in log.read_text()


def received(url: str) -> bool:
    """No message waits or is in flight, and all of them are on record, without changes between two checks."""
    with redis.Redis.from_url(url, decode_responses=True) as client, client.pipeline() as pipe:
        pipe.llen("pagemill").hlen("pagemill:celery:unacked")
        waiting, unacked = pipe.execute()
    return waiting == 0 and unacked >= 40


@pytest.mark.slow
def test_tls_needs_no_option_of_celerys(tmp_path: Path) -> None:
    with tls_server(tmp_path, Certificates(tmp_path / "certificates")) as url:
        app = Celery(broker=f"{url}&ssl_cert_reqs=required", backend=f"{url}&ssl_cert_reqs=required")
        with celery_worker(url, tmp_path / "log", app=None):
            sent = app.send_task(TASK, kwargs={"prompt": "over TLS"}, queue="pagemill")
            assert sent.get(timeout=PATIENCE_S)["text"] == "over TLS"


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGQUIT, marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_a_chord(
    number: int, server: RedisServer, engine: Any, shop: Any, tmp_path: Path
) -> None:
    """Its messages are delivered again to another worker, and the engine does not repeat its work."""
    header = [
        shop.app.signature(
            TASK, kwargs={"prompt": f"{i:02d}" + "x" * 598, "max_tokens": 610}, queue="pagemill"
        )
        for i in range(40)
    ]
    with celery_worker(server.url, tmp_path / "first.log") as first:
        result = chord(header)(shop.collect.s())
        # Until it has recorded a message as unacknowledged, Celery's own broker client holds it only in memory.
        eventually(lambda: received(server.url) and len(engine.table) >= 10, "generations under way")
        os.killpg(first.pid, number)
        first.wait()
        with celery_worker(server.url, tmp_path / "second.log"):
            texts = result.get(timeout=2 * PATIENCE_S)
    assert [text[:2] for text in texts] == [f"{i:02d}" for i in range(40)]


@pytest.mark.slow
def test_messages_in_hand_are_kept_from_coming_again(
    generate: Callable[..., Any], server: RedisServer, shop: Any
) -> None:
    """The index of unacknowledged messages is Pagemill's, and its times advance while a task runs."""
    handle = generate(prompt="x" * 3000, max_tokens=3000)
    eventually(lambda: handle.state == "PROGRESS", "its start")
    with redis.Redis.from_url(server.url) as client:
        index = "pagemill:celery:unacked_index"
        (first,) = client.zrange(index, 0, -1, withscores=True)
        eventually(lambda: client.zscore(index, first[0]) > first[1], "a refresh")
        assert not client.exists("unacked_index")
    shop.app.control.revoke(handle.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        handle.get(timeout=PATIENCE_S)
