"""Eight worker processes on one queue, and on a Redis Cluster of three masters; some stop and are replaced."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pagemill.producer.wire.calls import history
from pagemill.producer.wire.calls.history import JobHistory
from tests.chaos import invariants
from tests.chaos.fork_server import ForkedWorker, ForkServer
from tests.topologies import ClusterSetup, cluster_setup
from tests.worker.harness import QueueClient, eventually, process_settings

pytestmark = pytest.mark.slow

WORKERS = 8
ROWS = 8
"""Jobs that a worker runs in parallel."""
LARGE, SMALL = "large", ("small-a", "small-b")
LARGE_JOBS, SMALL_JOBS = 450, 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSetup]:
    with cluster_setup(tmp_path_factory.mktemp("cluster")) as setup:
        yield setup


@contextmanager
def queue_client(url: str, queue: str) -> Iterator[QueueClient]:
    client = QueueClient(url, queue)
    try:
        yield client
    finally:
        client.redis.close()


def owner_url(cluster: ClusterSetup, queue: str) -> str:
    """The master that has all of the queue's keys, as a plain server."""
    return f"redis://127.0.0.1:{cluster.nodes[cluster.owner(queue)].port}/0"


def submit(client: QueueClient) -> tuple[list[str], list[str], list[str]]:
    """A tenant's long queue, and behind it the short ones of two others. Returns ids, texts and tenants."""
    tenants = [LARGE] * LARGE_JOBS + [name for name in SMALL for _ in range(SMALL_JOBS)]
    texts = [f"{i:04d} " * random.Random(i).randint(2, 6) for i in range(len(tenants))]
    jobs = [
        {"prompt": text, "max_tokens": len(text), "tenant": tenant}
        for text, tenant in zip(texts, tenants, strict=True)
    ]
    ids: list[str] = []
    for start in range(0, len(jobs), 250):
        ids += client.submit(*jobs[start : start + 250], batch_id="all")
    return ids, texts, tenants


def come_and_go(
    client: QueueClient, workers: list[ForkedWorker], spawn: Callable[[], ForkedWorker], total: int
) -> None:
    """Two are killed, two drained, each replaced, spread over the run by the number of finished jobs.

    No job is started between a worker's exit and the start of its successor: the others would finish first.
    """
    for turn, ended in enumerate((total // 16, total // 6, total // 4, total // 3)):
        eventually(lambda ended=ended: client.counts("all").ended >= ended, f"{ended} jobs to have ended")
        leaving = workers[turn]
        client.pause()
        if turn % 2:
            leaving.signal(signal.SIGTERM)
        else:
            leaving.kill()
        coming = workers[turn] = spawn()
        eventually(
            lambda pid=coming.pid: any(worker.pid == pid for worker in client.workers()),
            "the worker to be there",
        )
        client.pause(False)
        if turn % 2:
            leaving.wait()


def histories(client: QueueClient, ids: list[str]) -> list[JobHistory]:
    found = [client.run(history.history(client.queue, job_id)) for job_id in ids]
    assert all(found)
    return found


def check_fairness(told: list[JobHistory], tenants: list[str]) -> None:
    """The small tenants' jobs started interleaved with the large one's, not behind all of them.

    Only jobs that ran once are checked: the start of an interrupted job is that of its last execution.
    """
    starts = {
        name: [
            job.executions[0].started_at or 0.0
            for job, tenant in zip(told, tenants, strict=True)
            if tenant == name and len(job.executions) == 1
        ]
        for name in (LARGE, *SMALL)
    }
    for name in SMALL:
        last = max(starts[name])
        before = sum(start < last for start in starts[LARGE])
        # One for one, plus the pulls of one moment and the restarts of the small tenants' jobs.
        assert before <= SMALL_JOBS + 2 * WORKERS * ROWS, f"{name} waited for {before} of {LARGE}'s jobs"


@pytest.mark.parametrize("kind", ["one server", "cluster"])
def test_eight_workers_come_and_go_and_every_job_has_one_result(
    kind: str, request: pytest.FixtureRequest, queue_name: str, tmp_path: Path
) -> None:
    if kind == "cluster":
        setup: ClusterSetup = request.getfixturevalue("cluster")
        url, direct = setup.url, owner_url(setup, queue_name)
    else:
        url = direct = request.getfixturevalue("valkey_url")
    settings = process_settings(url, queue_name, model="echo:2", max_num_seqs=ROWS, drain_grace_s=0.0)
    with queue_client(direct, queue_name) as client, ForkServer(tmp_path, settings) as fork_server:
        client.pause()
        ids, texts, tenants = submit(client)
        workers = [fork_server.spawn() for _ in range(WORKERS)]
        eventually(lambda: len(client.workers()) == WORKERS, "all workers to be there")
        client.pause(False)
        come_and_go(client, workers, fork_server.spawn, len(ids))
        outcomes = invariants.check(client, ids)
        invariants.check_echoes(outcomes, texts)
        told = histories(client, ids)
        check_fairness(told, tenants)
        commits = Counter(job.executions[-1].worker for job in told)
        assert len(commits) > WORKERS, f"workers that came later did nothing: {commits}"
        assert any(len(job.executions) > 1 for job in told), "nothing was interrupted"


def test_several_queues_share_a_clusters_masters(cluster: ClusterSetup, tmp_path: Path) -> None:
    """A queue is one slot, so it uses one master: a cluster needs several queues."""
    queues = [cluster.queue_of(node) for node in range(3)]
    calls_before = [script_calls(cluster, node) for node in range(3)]
    with ExitStack() as stack:
        clients = [stack.enter_context(queue_client(owner_url(cluster, name), name)) for name in queues]
        settings = process_settings(cluster.url, queues[0], model="echo:2", max_num_seqs=ROWS)
        fork_server = stack.enter_context(ForkServer(tmp_path, settings))
        texts = [f"{i:03d} " * 3 for i in range(100)]
        ids = [
            client.submit(*({"prompt": text, "max_tokens": len(text)} for text in texts), batch_id="all")
            for client in clients
        ]
        for number in range(WORKERS):
            fork_server.spawn(queue=queues[number % 3])
        for client, own in zip(clients, ids, strict=True):
            invariants.check_echoes(invariants.check(client, own), texts)
        for node, client in enumerate(clients):
            assert script_calls(cluster, node) - calls_before[node] >= 100, "this master had no part in it"
            for other in {0, 1, 2} - {node}:
                with cluster.client(other) as stranger:
                    assert not list(stranger.scan_iter(f"pagemill:{{{client.queue}}}:*"))


def script_calls(cluster: ClusterSetup, node: int) -> int:
    with cluster.client(node) as client:
        return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))
