"""`durability="fsync"`: a reply means that the data is on the server's disk."""

from __future__ import annotations

import asyncio

import pytest
import redis

from pagemill import AsyncProducer, InvalidJob, Producer
from tests.conftest import RedisServer
from tests.worker.harness import running_worker, worker_config


def waits(client: redis.Redis) -> int:
    """Count the server's waits for its disk."""
    return int(client.info("commandstats").get("cmdstat_waitaof", {}).get("calls", 0))


@pytest.mark.slow
def test_submits_and_ends_wait_for_the_disk(own_valkey: RedisServer) -> None:
    with redis.Redis.from_url(own_valkey.url) as admin:
        admin.config_set("appendfsync", "everysec")
        with Producer(own_valkey.url, queue="q", durability="fsync") as producer:
            handle = producer.submit(prompt="p", model="echo", max_tokens=1)
            assert waits(admin) == 1
            again = producer.submit(prompt="p", model="echo", max_tokens=1, job_id=handle.id)
            assert again.id == handle.id
            assert waits(admin) == 2, "a repeated submit wrote nothing of its own, and must wait all the same"
            batch = producer.submit_many(
                {"prompt": "p", "model": "echo", "max_tokens": 1} for _ in range(600)
            )
            assert waits(admin) == 3, "one wait is enough for all chunks"
            with running_worker(worker_config(own_valkey.url, "q", durability="fsync")):
                assert batch.wait(timeout=120).succeeded == 600
                assert handle.result(timeout=120).text == "p"
            assert waits(admin) > 3

        async def submit() -> None:
            async with AsyncProducer(own_valkey.url, queue="q", durability="fsync") as producer:
                await producer.submit(prompt="p", model="echo")

        before = waits(admin)
        asyncio.run(submit())
        assert waits(admin) == before + 1


def test_without_waitaof_a_server_that_always_syncs_will_do(redis62_url: str, queue_name: str) -> None:
    with (
        redis.Redis.from_url(redis62_url) as admin,
        Producer(redis62_url, queue=queue_name, durability="fsync") as producer,
    ):
        with pytest.raises(InvalidJob, match="WAITAOF") as refused:
            producer.submit(prompt="p", model="echo")
        assert refused.value.code == "unsupported_feature"
        admin.config_set("appendfsync", "always")
        try:
            producer.submit(prompt="p", model="echo")
        finally:
            admin.config_set("appendfsync", "everysec")


def test_without_an_append_only_file_there_is_nothing_to_wait_for(own_valkey: RedisServer) -> None:
    with redis.Redis.from_url(own_valkey.url) as admin:
        admin.config_set("appendonly", "no")
        with (
            Producer(own_valkey.url, queue="q", durability="fsync") as producer,
            pytest.raises(InvalidJob, match="appendonly"),
        ):
            producer.submit(prompt="p", model="echo")


@pytest.mark.slow
def test_a_full_server_can_still_be_waited_for(own_valkey: RedisServer) -> None:
    with (
        redis.Redis.from_url(own_valkey.url) as admin,
        Producer(own_valkey.url, queue="q", durability="fsync") as producer,
        running_worker(worker_config(own_valkey.url, "q", model="echo:5", durability="fsync")),
    ):
        handle = producer.submit(prompt="0123456789" * 20, model="echo", max_tokens=200)
        admin.config_set("maxmemory", 1)
        assert len(handle.result(timeout=120).text) == 200


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidJob, match="durability"):
        Producer(durability="maybe")  # type: ignore[arg-type]
