"""Ray Data through the queue, on a local Ray: every row once, even if Ray's workers are killed."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pagemill import InvalidJob, JobNotFound, Producer
from pagemill.producer import ray_data
from pagemill.producer.wire.calls import history
from pagemill.producer.wire.schema.job import Job
from tests.conftest import ROOT
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config


def echo(row: Mapping[str, Any]) -> dict[str, Any]:
    text = f"{row['text']}"
    return {"model": "echo", "prompt": text, "max_tokens": len(text)}


def actor(client: QueueClient, **options: Any) -> ray_data.QueueActor:
    return ray_data.QueueActor(echo, **({"run": "r", "url": client.url, "queue": client.queue} | options))


# The actor, without Ray


@pytest.mark.parametrize("unit", ["D", "s", "us", "ns"])
def test_times_are_python_times_whatever_their_unit(unit: str) -> None:
    numpy = pytest.importorskip("numpy")
    batch = {
        "at": numpy.array(["2026-11-29", "NaT"], f"datetime64[{unit}]"),
        "took": numpy.array([2 * 86_400_000_000_000, "NaT"], "timedelta64[ns]").astype(
            f"timedelta64[{unit}]"
        ),
        "n": numpy.array([1, 2]),
    }
    first, second = ray_data._rows(batch)
    assert first == {"at": datetime(2026, 11, 29), "took": timedelta(days=2), "n": 1}
    assert second == {"at": None, "took": None, "n": 2}


@pytest.mark.slow
def test_rows_keep_their_order_and_get_their_own_results(client: QueueClient, valkey_url: str) -> None:
    batch = {"id": list(range(50)), "text": [f"row {i % 20}" for i in range(50)]}
    with running_worker(worker_config(valkey_url, client.queue)):
        made = actor(client, window=7)(batch)
    assert list(made) == ["id", "text", *ray_data.OUTPUT_COLUMNS]
    assert made["output"] == batch["text"]
    assert made["error"] == [""] * 50
    assert made["completion_tokens"] == [len(text) for text in batch["text"]]
    assert client.counts("r").total == 20, "equal rows are one job"


@pytest.mark.slow
def test_a_second_actor_finds_what_the_first_has_done(client: QueueClient, valkey_url: str) -> None:
    batch = {"text": [f"row {i}" for i in range(10)]}
    with running_worker(worker_config(valkey_url, client.queue)):
        first = actor(client)(batch)
    # No worker computes any more, and rows arrive in other batches.
    assert actor(client)({"text": batch["text"][5:]})["output"] == first["output"][5:]
    assert ray_data.forget("r", client.url, queue=client.queue) == 10
    with pytest.raises(JobNotFound, match="name another run"):
        actor(client)(batch)


@pytest.mark.slow
def test_never_more_than_a_window_is_under_way(client: QueueClient, valkey_url: str) -> None:
    calling = threading.Thread(
        target=lambda: actor(client, window=8)({"text": [f"row {i}" for i in range(100)]})
    )
    calling.start()

    def total() -> int:
        try:
            return client.counts("r").total
        except AttributeError:  # no such batch yet
            return 0

    eventually(lambda: total() == 8, "the window to be full")
    with running_worker(worker_config(valkey_url, client.queue, max_num_seqs=2)):
        most = 0
        while calling.is_alive():
            counts = client.counts("r")
            most = max(most, counts.total - counts.ended)
            time.sleep(0.01)
    calling.join(PATIENCE_S)
    assert 0 < most <= 8
    assert client.counts("r").succeeded == 100


def test_a_key_does_not_make_different_work_equal(client: QueueClient, valkey_url: str) -> None:
    def job(row: Mapping[str, Any]) -> dict[str, Any]:
        return echo(row) | {"key": row["key"], "tenant": row["tenant"]}

    rows = [
        ("a", "k", "t"),
        ("b", "k", "t"),
        ("a", "k", "t"),
        ("a", "l", "t"),
        ("a", "k", "u"),
        ("c", "k" * 128, "t"),
    ]
    batch = dict(zip(("text", "key", "tenant"), zip(*rows, strict=True), strict=True))
    with running_worker(worker_config(valkey_url, client.queue)):
        made = ray_data.QueueActor(job, run="r", url=client.url, queue=client.queue)(batch)
    assert made["output"] == [text for text, _, _ in rows]
    assert client.counts("r").succeeded == 5


@pytest.mark.slow
def test_a_row_that_is_no_job_fails_alone(client: QueueClient, valkey_url: str) -> None:
    def job(row: Mapping[str, Any]) -> dict[str, Any]:
        return echo(row) | {"max_tokens": row["tokens"]}

    batch = {"text": ["good", "bad", "long" * 2000], "tokens": [4, -1, 4]}
    with running_worker(worker_config(valkey_url, client.queue)):
        made = ray_data.QueueActor(job, run="r", url=client.url, queue=client.queue)(batch)
    assert made["output"] == ["good", "", ""]
    assert made["error"] == ["", "invalid_job", "prompt_too_long"]


@pytest.mark.slow
def test_jobs_that_the_server_lost_are_submitted_again(client: QueueClient, valkey_url: str) -> None:
    batch = {"text": ["a", "b"]}
    with running_worker(worker_config(valkey_url, client.queue)):
        calling = actor(client)
        assert calling(batch)["output"] == ["a", "b"]
        names = list(client.redis.scan_iter(f"pagemill:{{{client.queue}}}:*b*:*"))
        client.redis.delete(*names)
        assert calling(batch)["output"] == ["a", "b"]


def test_options_that_make_no_sense_are_refused(client: QueueClient) -> None:
    with pytest.raises(InvalidJob, match="window"):
        actor(client, window=0)
    with pytest.raises(InvalidJob, match="an id"):
        actor(client, run="no spaces please")
    with pytest.raises(InvalidJob, match="columns output already"):
        actor(client)({"text": ["a"], "output": ["b"]})


def test_the_page_s_example_makes_jobs() -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    function = re.search(r"^def job\(row\):\n(?:    .*\n)+", page, re.MULTILINE)
    assert function is not None
    names: dict[str, Any] = {}
    exec(function[0], names)
    assert Job.parse(names["job"]({"text": "It broke."})).model == "model"
    assert re.findall(r"^\| (`.+) \| .+ \|$", page, re.MULTILINE) == [
        "`output`", "`finish_reason`", "`error`", "`prompt_tokens`, `completion_tokens`",
    ]  # fmt: skip


# With Ray


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagemill[ray]'")
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        object_store_memory=100 * 2**20, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def kill_one_half_way(client: QueueClient, run: str, half: int, pids: Path) -> threading.Thread:
    """SIGKILL one of the processes that have submitted jobs, once this many jobs have finished."""

    def kill() -> None:
        with Producer(client.url, queue=client.queue) as producer:

            def is_half_way() -> bool:
                try:
                    return producer.batch(run).counts().ended >= half
                except JobNotFound:
                    return False

            eventually(is_half_way, "half of the jobs", 240)
        os.kill(int(min(path.name for path in pids.iterdir())), signal.SIGKILL)
        (pids / "killed").touch()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", [1_200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_ray_worker_killed_half_way_costs_nothing_twice(
    rows: int, ray: Any, client: QueueClient, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()

    def job(row: Mapping[str, Any]) -> dict[str, Any]:
        (pids / str(os.getpid())).touch()
        return {"model": "echo", "prompt": row["text"], "max_tokens": 12}

    dataset = ray.data.from_items(
        [{"id": i, "text": f"row {i:08d}"} for i in range(rows)], override_num_blocks=6
    )
    labeled = ray_data.through_queue(
        dataset, job, run="labels", url=client.url, queue=client.queue, window=64, batch_rows=rows // 6
    )
    with running_worker(worker_config(client.url, client.queue, max_num_seqs=64)):
        killing = kill_one_half_way(client, "labels", rows // 2, pids)
        found = labeled.take_all()
        killing.join(PATIENCE_S)
    assert (pids / "killed").exists()
    assert len([path for path in pids.iterdir() if path.name.isdigit()]) > 2, (
        "nobody took the dead one's place"
    )
    assert sorted(row["id"] for row in found) == list(range(rows)), "a row is lost or doubled"
    assert all(row["output"] == row["text"] and not row["error"] for row in found)
    counts = client.counts("labels")
    assert (counts.total, counts.succeeded) == (rows, rows)
    assert sum(client.stats().counts.values()) == rows, "something was submitted under two ids"
    ids = [item.id for item in _items(client)]
    told = [client.run(history.history(client.queue, job_id)) for job_id in ids[:: max(1, rows // 500)]]
    assert all(len(job.executions) == 1 for job in told), "a job ran twice"


def _items(client: QueueClient) -> list[Any]:
    with Producer(client.url, queue=client.queue) as producer:
        return list(producer.batch("labels").results())
