"""The same requests through the whole product: a producer, a Valkey with an append-only file, and a worker process.

The clock runs from the first submit until the last result has been read back.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import measure

QUEUE = "benchmark"
START_LIMIT_S = 600.0


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import redis

    from pagemill import Producer
    from pagemill.producer.wire.server.discovery import find_redis

    state_dir = Path(tempfile.mkdtemp(prefix="pagemill-benchmark-"))
    worker = _start_worker(request, state_dir)
    url = _when_ready(worker, lambda: find_redis(directory=state_dir))
    producer = Producer(url, queue=QUEUE)
    served = _when_ready(worker, lambda: served_model(url, QUEUE))

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        jobs = (
            {
                "model": served, "prompt_token_ids": prompt, "max_tokens": count, "temperature": 0.0,
                "ignore_eos": True,
            }
            for prompt, count in zip(prompts, max_tokens, strict=True)
        )  # fmt: skip
        batch = producer.submit_many(jobs)
        outputs: dict[int, list[int]] = {}
        for item in batch.results():
            if item.result is None:
                raise RuntimeError(f"job {item.id} {item.state}: {item.error}")
            outputs[int(item.key)] = list(item.result.token_ids)
        return [outputs[index] for index in range(len(prompts))]

    with redis.Redis.from_url(url) as client:
        return generate, {"server": str(client.info("server").get("valkey_version", "?"))}


def worker_command(settings: dict[str, Any]) -> list[str]:
    """Return the command of a worker's process; `settings`: the fields of `WorkerConfig`."""
    code = (
        "import json, sys\nfrom pagemill.worker.config import WorkerConfig\n"
        "from pagemill.worker.process import run_worker\n"
        "sys.exit(run_worker(WorkerConfig.load(**json.loads(sys.argv[1]))))"
    )
    return [sys.executable, "-c", code, json.dumps(settings)]


def _start_worker(request: measure.Request, state_dir: Path) -> subprocess.Popen[bytes]:
    options = {"kv_cache_memory_bytes": request.kv_cache_memory_bytes, "skip_tokenizer_init": True}
    settings = {
        "model": request.model,
        "queue": QUEUE,
        "state_dir": str(state_dir),
        "http_port": 0,
        "engine_stall_s": 3600.0,  # it is stopped while others make their passes
    }
    environment = {name: value for name, value in os.environ.items() if name != "PAGEMILL_REDIS_URL"}
    with (state_dir / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            worker_command(settings | options | request.options),
            stdout=log,
            stderr=log,
            env=environment,
        )
    atexit.register(_stop, worker)
    return worker


def _when_ready(worker: subprocess.Popen[bytes], ask: Any) -> Any:
    """Return the result of `ask` once it has one."""
    from pagemill import RedisUnavailable

    give_up = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up and worker.poll() is None:
        try:
            if answer := ask():
                return answer
        except RedisUnavailable:
            pass
        time.sleep(0.1)
    raise RuntimeError("the worker did not start; see worker.log in its state directory")


def served_model(url: str, queue: str) -> str | None:
    """Return the name under which a live worker of the queue serves its model, if there is one yet."""
    from pagemill.producer.wire.calls import registry
    from pagemill.producer.wire.server.clients import open_client
    from pagemill.producer.wire.server.transport import SyncTransport

    with open_client(url, queue) as client:
        workers = SyncTransport(client).run(registry.workers(queue))
    return next((model for worker in workers for model in worker.models), None)


def _stop(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(30)
    except subprocess.TimeoutExpired:
        worker.kill()


if __name__ == "__main__":
    measure.run(load)
