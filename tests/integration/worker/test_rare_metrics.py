"""Faults and shortages that no other test makes a worker count (`tests/produced_metrics.py` requires all of them)."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pagemill.engine.builder import _ECHO_BLOCK_BYTES
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.producer.wire.server.scripts import Call
from pagemill.worker.job_queue import JobQueue
from pagemill.worker.jobs.admission import OutputForecast
from pagemill.worker.signal_flag import SignalFlag
from pagemill.worker.worker import Worker
from tests.conftest import RedisServer
from tests.engine.images.tiny_checkpoint import write_checkpoint
from tests.engine.models.generic.tiny_configs import tiny_config
from tests.engine.models.generic.trial import build
from tests.engine.tiny_model import save_tiny_llama, save_tiny_ministral
from tests.integration.test_images import PICTURES, chat, job
from tests.integration.worker.test_faults import fail_in_the_engine
from tests.produced_metrics import children
from tests.worker.harness import QueueClient, eventually, get, running_worker, worker_config

SLOW = "echo:5"
TWO_ECHO_BLOCKS_GIB = 2 * _ECHO_BLOCK_BYTES / 2**30


@pytest.fixture
def client(own_valkey: RedisServer, queue_name: str) -> Iterator[QueueClient]:
    with QueueClient(own_valkey.url, queue_name) as client:
        yield client


def scrape(worker: Worker) -> dict[str, float]:
    return dict(children(get(f"{worker.http_url}/metrics")[1]))


def has_counted(worker: Worker, *names: str) -> None:
    """Wait until each series was above 0 in a scrape."""
    missing = set(names)

    def all_seen() -> bool:
        found = scrape(worker)
        missing.difference_update([name for name in missing if found[name]])
        return not missing

    try:
        eventually(all_seen, "the series", patience_s=60)
    except AssertionError as error:
        raise AssertionError(f"never above 0: {sorted(missing)}") from error


@pytest.mark.slow
def test_a_clock_that_is_off_is_counted(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's clock jumps after startup: an alert reports the difference."""
    server_time, off = JobQueue.server_time, [0.0]
    monkeypatch.setattr(JobQueue, "server_time", lambda queue: server_time(queue) + off[0])
    with running_worker(worker_config(valkey_url, queue_name, model="echo", lease_s=1.0)) as worker:
        assert abs(scrape(worker)["redis_clock_skew_seconds{}"]) < 30
        off[0] = -3600.0
        eventually(lambda: scrape(worker)["redis_clock_skew_seconds{}"] < -3500, "a heartbeat")


@pytest.mark.slow
def test_memory_for_a_fraction_of_the_jobs(client: QueueClient) -> None:
    """Sequences outgrow the cache: some are preempted, others wait."""
    settings = {"num_kv_blocks": 24, "max_num_batched_tokens": 32, "max_num_seqs": 8, "host_cache_gib": 0.001}
    with running_worker(worker_config(client.url, client.queue, model=SLOW, **settings)) as worker:
        jobs = [{"prompt": str(i) * 40, "max_tokens": 150, "ignore_eos": True} for i in range(24)]
        ids = client.submit(*jobs)
        has_counted(
            worker,
            "kv_cache_allocation_failures_total{}",
            "kv_cache_host_blocks{state=used}",
            "kv_cache_host_blocks{state=free}",
            "kv_cache_host_copied_blocks_total{direction=load}",
            "kv_cache_host_copied_blocks_total{direction=store}",
            "prefix_cache_tier_hit_tokens_total{source=host}",
            "preemptions_total{}",
            "requests_waiting{reason=kv}",
        )
        assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}
        has_counted(worker, "job_seconds_total{cause=kv_block}", "job_seconds_total{cause=preempted}")


@pytest.mark.slow
def test_keys_and_values_that_are_moved(
    client: QueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are longer than forecast."""
    monkeypatch.setattr(OutputForecast, "remaining", lambda *_: 1)
    save_tiny_llama(tmp_path)
    settings = {"num_kv_blocks": 24, "max_num_batched_tokens": 32, "max_num_seqs": 8, "host_cache_gib": 0.01}
    config = worker_config(
        client.url, client.queue, model=str(tmp_path), skip_tokenizer_init=True, **settings
    )
    with running_worker(config) as worker:
        job = {"model": worker.model, "max_tokens": 150, "ignore_eos": True}
        ids = client.submit(*({**job, "prompt_token_ids": [i + 1] * 40} for i in range(24)))
        has_counted(
            worker,
            "kv_cache_host_copied_bytes_total{direction=load}",
            "kv_cache_host_copied_bytes_total{direction=store}",
        )
        assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}


@pytest.mark.slow
def test_a_host_tier_that_is_full_of_blocks_in_use(client: QueueClient) -> None:
    """A block is evicted, and one step needs to store more than the tier holds."""
    settings = {"num_kv_blocks": 24, "max_num_seqs": 8, "host_cache_gib": TWO_ECHO_BLOCKS_GIB}
    with running_worker(worker_config(client.url, client.queue, model=SLOW, **settings)) as worker:
        ids = client.submit(*({"prompt": str(i) * 150, "max_tokens": 5} for i in range(24)))
        has_counted(worker, "kv_cache_host_skipped_blocks_total{}")
        assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}


@pytest.mark.slow
def test_a_drain_that_lets_jobs_run_on(client: QueueClient) -> None:
    with running_worker(worker_config(client.url, client.queue, model=SLOW)) as worker:
        (job_id,) = client.submit({"prompt": "x" * 100, "max_tokens": 100})
        eventually(lambda: client.generated(job_id), "the first tokens")
        worker.drain(60.0, SignalFlag(), time.monotonic() + 120)
        assert client.outcome(job_id).state == "succeeded"
        has_counted(worker, "admission_blocked_seconds_total{reason=draining}")


@pytest.mark.slow
def test_an_output_that_repeats_its_prompt(client: QueueClient) -> None:
    config = worker_config(client.url, client.queue, model=SLOW, num_speculative_tokens=4)
    with running_worker(config) as worker:
        (job_id,) = client.submit({"prompt": "all of this again, please", "max_tokens": 200})
        has_counted(worker, "draft_tokens_total{}", "draft_tokens_accepted_total{}")
        assert client.wait([job_id])[0].result.outputs[0].text == "all of this again, please"


@pytest.mark.slow
def test_samples_of_one_prompt_share_its_blocks(client: QueueClient, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    config = worker_config(client.url, client.queue, model=str(tmp_path), skip_tokenizer_init=True)
    with running_worker(config) as worker:
        job = {"prompt_token_ids": list(range(4, 44)), "n": 4, "max_tokens": 20, "ignore_eos": True}
        ids = client.submit({"model": worker.model, **job})
        has_counted(worker, "engine_sharing_rows_total{}")
        assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}


@pytest.mark.slow
def test_blocks_that_windows_leave_behind(client: QueueClient, tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    save_tiny_ministral(tmp_path, kinds, std=0.3, vocab_size=61, eos=[3])
    settings = {"num_kv_blocks": 120, "block_size": 4, "max_num_batched_tokens": 32}
    config = worker_config(
        client.url, client.queue, model=str(tmp_path), skip_tokenizer_init=True, **settings
    )
    with running_worker(config) as worker:
        job = {"model": worker.model, "max_tokens": 100, "ignore_eos": True}
        ids = client.submit(*({**job, "prompt_token_ids": [i + 4] * 60} for i in range(12)))
        has_counted(
            worker,
            "kv_cache_window_frees_total{}",
            "kv_cache_window_blocks{window=6}",
            "kv_cache_window_blocks{window=all}",
        )
        document = json.loads(get(f"{worker.http_url}/live.json")[1])
        assert [group["window"] for group in document["kv"]["windows"]] == [None, 6]
        assert document["kv"]["window_frees"] > 0
        assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}


@pytest.mark.slow
def test_slots_of_recurrent_state(client: QueueClient, tmp_path: Path) -> None:
    build("lfm2", tiny_config("lfm2", 0)).save_pretrained(tmp_path)
    settings = {"max_num_seqs": 4, "skip_tokenizer_init": True, "verify": False}
    config = worker_config(client.url, client.queue, model=str(tmp_path), **settings)
    with running_worker(config) as worker:
        job = {"prompt_token_ids": [5, 6, 7] * 6, "max_tokens": 120, "ignore_eos": True}
        ids = client.submit(*[{"model": worker.model, **job}] * 4)
        has_counted(
            worker,
            "kv_cache_state_slots{state=active}",
            "kv_cache_state_slots{state=cached}",
            "kv_cache_state_slots{state=free}",
            "kv_cache_state_bytes{}",
        )
        assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}


@pytest.mark.slow
def test_samples_that_need_every_row(client: QueueClient) -> None:
    with running_worker(worker_config(client.url, client.queue, model=SLOW, max_num_seqs=4)) as worker:
        (first,) = client.submit({"prompt": "x" * 200, "max_tokens": 200})
        eventually(lambda: worker.table.by_job(first), "its start")
        wide = client.submit({"prompt": "wide", "max_tokens": 4, "n": 4, "temperature": 1.0})
        has_counted(worker, "requests_waiting{reason=rows}")
        client.wait(wide)
        has_counted(worker, "job_seconds_total{cause=sequence_slot}")


@pytest.mark.slow
def test_weights_that_are_not_numbers(client: QueueClient, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    settings = {"model": str(tmp_path), "num_kv_blocks": 64, "skip_tokenizer_init": True}
    with running_worker(worker_config(client.url, client.queue, **settings)) as worker:
        client.submit(
            {"model": worker.model, "prompt_token_ids": [5, 6, 7], "max_tokens": 4, "max_attempts": 1}
        )
        has_counted(worker, "invalid_logits_total{}")


@pytest.mark.slow
def test_an_output_that_its_structure_does_not_allow(client: QueueClient) -> None:
    with running_worker(worker_config(client.url, client.queue, model=SLOW)) as worker:
        (job_id,) = client.submit({"prompt": "x" * 200, "max_tokens": 200, "max_attempts": 2})
        eventually(lambda: worker.table.by_job(job_id), "its start")
        fail_in_the_engine(worker, job_id, "output_invalid")
        has_counted(
            worker, "job_failures_total{code=output_invalid}", "job_retries_total{reason=output_invalid}"
        )


@pytest.mark.slow
def test_an_answer_to_a_commit_that_is_lost(client: QueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_worker(worker_config(client.url, client.queue, model=SLOW)) as worker:
        send, lost = JobQueue.run_many, threading.Event()

        def send_and_lose(queue: JobQueue, calls: Sequence[Call[Any]]) -> list[Any]:
            replies = send(queue, calls)
            if "committed" in replies and not lost.is_set():
                lost.set()
                raise RedisUnavailable("the connection was reset")
            return replies

        monkeypatch.setattr(JobQueue, "run_many", send_and_lose)
        client.wait(client.submit({"prompt": "x", "max_tokens": 1}))
        has_counted(worker, "result_commits_total{result=already_done}")


@pytest.mark.slow
def test_results_that_cannot_be_written(client: QueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls still work, so the worker reports that results block them, not that Redis is unavailable."""
    send, works_again = JobQueue.run_many, threading.Event()

    def reject_results(queue: JobQueue, calls: Sequence[Call[Any]]) -> list[Any]:
        if not works_again.is_set() and any(call.script == "commit" for call in calls):
            raise RedisUnavailable("the connection was reset")
        return send(queue, calls)

    monkeypatch.setattr(JobQueue, "run_many", reject_results)
    config = worker_config(client.url, client.queue, model=SLOW, max_held_results=2)
    with running_worker(config) as worker:
        ids = client.submit(*({"prompt": "x" * length, "max_tokens": length} for length in (2, 2, 400)))
        has_counted(worker, "admission_blocked_seconds_total{reason=results}")
        works_again.set()
        assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}


@pytest.mark.slow
def test_prompts_longer_than_a_step(client: QueueClient) -> None:
    settings = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    with running_worker(worker_config(client.url, client.queue, model=SLOW, **settings)) as worker:
        client.submit(*({"prompt": "x" * 400, "max_tokens": 4} for _ in range(3)))
        has_counted(worker, "requests_waiting{reason=budget}", "job_seconds_total{cause=step_budget}")


@pytest.mark.slow
def test_a_job_that_another_worker_takes(client: QueueClient) -> None:
    """The stale token's next checkpoint is rejected."""
    with running_worker(
        worker_config(client.url, client.queue, model=SLOW, renew_s=20.0, lease_s=60.0)
    ) as worker:
        (job_id,) = client.submit({"prompt": "x" * 400, "max_tokens": 400})
        eventually(lambda: client.generated(job_id), "a checkpoint")
        client.redis.zadd(keys.prefix(client.queue) + "leases", {job_id: 1}, xx=True)
        client.run(transitions.pull(client.queue, "thief", ["echo"], 1, 10_000))
        has_counted(worker, "progress_writes_total{result=refused}", "leases_lost_total{}")


class _NoRedis(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.slow
def test_a_server_that_refuses_hangs_or_is_another(client: QueueClient, own_valkey: RedisServer) -> None:
    with running_worker(worker_config(client.url, client.queue)) as worker:
        client.redis.replicaof("127.0.0.1", own_valkey.port)
        has_counted(worker, "redis_errors_total{kind=response}")
        client.redis.replicaof("no", "one")
        client.redis.client_pause(7000, all=True)  # longer than the worker's socket timeout
        has_counted(worker, "redis_errors_total{kind=timeout}")
        own_valkey.kill()
        socketserver.ThreadingTCPServer.allow_reuse_address = True
        with socketserver.ThreadingTCPServer(("127.0.0.1", own_valkey.port), _NoRedis) as stranger:
            stranger.daemon_threads = True
            threading.Thread(target=stranger.serve_forever, daemon=True).start()
            has_counted(worker, "redis_errors_total{kind=other}")
            stranger.shutdown()
        own_valkey.start()
        (job_id,) = client.submit({"prompt": "back", "max_tokens": 4})
        assert client.wait([job_id])[0].state == "succeeded"


@pytest.mark.slow
def test_a_start_is_seen_and_counted(client: QueueClient) -> None:
    config = worker_config(client.url, client.queue)
    worker = Worker(config, client.url)
    try:
        worker.start()
        has_counted(worker, "worker_state{state=starting}")
        assert worker.wait_ready(timeout=60)
        has_counted(worker, "admission_blocked_seconds_total{reason=loading}", "worker_state{state=ready}")
    finally:
        worker.close()


@pytest.mark.slow
def test_figures_that_cannot_be_read(client: QueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_worker(worker_config(client.url, client.queue)) as worker:
        monkeypatch.setattr(type(worker.engine), "stats", property(lambda _: 1 / 0))
        monkeypatch.setattr(worker._queue_reader, "read", lambda: 1 / 0)
        has_counted(
            worker, "scrape_source_errors_total{source=engine}", "scrape_source_errors_total{source=queue}"
        )
        monkeypatch.undo()


@pytest.mark.slow
def test_images(client: QueueClient, tmp_path: Path) -> None:
    """Three questions about one picture, and a file that is not a picture."""
    write_checkpoint("llava", tmp_path)
    settings = {"num_kv_blocks": 128, "num_threads": 1, "engine_process": "off"}
    config = worker_config(client.url, client.queue, model=str(tmp_path), **settings)
    with running_worker(config) as worker:
        chats = [*(chat(PICTURES[0], f"{number}?") for number in range(3)), chat(b"<html>", "What?")]
        ids = client.submit(*(job(each, 2) | {"model": worker.model} for each in chats))
        assert [outcome.state for outcome in client.wait(ids)] == ["succeeded"] * 3 + ["failed"]
        has_counted(
            worker,
            "images_encoded_total{}",
            "image_cache_hits_total{}",
            "image_encoder_seconds_total{}",
            "image_cache_bytes{}",
            "job_failures_total{code=invalid_image}",
        )
