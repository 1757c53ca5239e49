"""A plan's estimates for Redis, compared with a real server."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import redis

from pagemill import Producer
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.schema.outputs import Output, Result, Usage
from pagemill.producer.wire.server.transport import SyncTransport
from pagemill.sizing.redis_cost import job_bytes
from tests.conftest import RedisServer

JOBS = 4000


@pytest.mark.slow
@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(50, 16), (500, 64), (100, 400)])
def test_bytes_of_jobs(prompt_tokens: int, output_tokens: int, own_valkey: RedisServer) -> None:
    planned = job_bytes(prompt_tokens, output_tokens, 4.0)
    text, tokens = "word" * output_tokens, (12_345,) * output_tokens
    output = Output(index=0, text=text, token_ids=tokens, finish_reason="length")
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=output_tokens)
    row: dict[str, Any] = {"model": "model", "max_tokens": output_tokens, "temperature": 0.0}
    with (
        redis.Redis.from_url(own_valkey.url) as client,
        Producer(own_valkey.url) as producer,
        closing(SyncTransport(redis.Redis.from_url(own_valkey.url))) as transport,
    ):

        def used() -> int:
            return int(client.info("memory")["used_memory"])

        def end_all() -> None:
            while jobs := transport.run(
                transitions.pull("default", "w", ["model"], 100, 1 << 40, 60_000)
            ).jobs:
                for job in jobs:
                    result = Result(id=job.job_id, outputs=(output,), usage=usage, model="model", seed=1)
                    body = result.model_dump_json()
                    transport.run(transitions.commit("default", job.job_id, job.token, "succeeded", body))

        producer.submit_many([row | {"prompt": "the scripts are loaded with it"}])
        end_all()
        before = used()
        producer.submit_many(
            [row | {"prompt": f"{i:06d}" + "x" * (4 * prompt_tokens - 6)} for i in range(JOBS)]
        )
        assert (used() - before) / JOBS == pytest.approx(planned.waiting, rel=0.15)
        end_all()
        assert (used() - before) / JOBS == pytest.approx(planned.ended, rel=0.15)
