"""The same requests through the complete system: a producer, Valkey with an append-only file, and a worker process.

The measured time is from the first `submit` call until the last result has been read.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from benchmarks import measure

if TYPE_CHECKING:
    from pagemill import Producer

QUEUE = "benchmark"
START_LIMIT_S = 600.0
WORKER = """
import json, sys
from pagemill.worker.config import WorkerConfig
from pagemill.worker.process import run_worker
sys.exit(run_worker(WorkerConfig.load(**json.loads(sys.argv[1]))))
"""


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import redis

    options = {"kv_cache_memory_bytes": request.kv_cache_memory_bytes, "skip_tokenizer_init": True}
    # The worker is stopped during the passes of others.
    settings = {"model": request.model, "engine_stall_s": 3600.0, **options, **request.options}
    directory, stack = Path(tempfile.mkdtemp(prefix="pagemill-benchmark-")), contextlib.ExitStack()
    atexit.register(stack.close)
    log = stack.enter_context((directory / "worker.log").open("wb"))
    url, producer, model = stack.enter_context(serving(settings, directory, log))

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        settings = {"temperature": 0.0, "ignore_eos": True}
        return outputs_of(producer, model, prompts, max_tokens, [settings] * len(prompts))

    with redis.Redis.from_url(url) as client:
        return generate, {"server": str(client.info("server").get("valkey_version", "?"))}


def outputs_of(
    producer: Producer, model: str, prompts: Sequence[list[int]], max_tokens: Sequence[int],
    settings: Sequence[dict[str, Any]],
) -> list[list[int]]:  # fmt: skip
    """Run the requests as one batch. Raises RuntimeError for a job that does not succeed."""
    jobs = (
        {"model": model, "prompt_token_ids": prompt, "max_tokens": count} | fields
        for prompt, count, fields in zip(prompts, max_tokens, settings, strict=True)
    )
    outputs: dict[int, list[int]] = {}
    for item in producer.submit_many(jobs).results():
        if item.result is None:
            raise RuntimeError(f"job {item.id} {item.state}: {item.error}")
        outputs[int(item.key)] = list(item.result.token_ids)
    return [outputs[index] for index in range(len(prompts))]


@contextlib.contextmanager
def serving(
    settings: dict[str, Any], state_dir: Path, log: IO[bytes] | None = None
) -> Iterator[tuple[str, Producer, str]]:
    """Run a worker with a dedicated server: yields the server's URL, a producer, and the name of the model.

    Args:
        settings: fields of `WorkerConfig`.
        log: receives the worker's output, which otherwise goes to this process's output.
    """
    from pagemill import Producer
    from pagemill.producer.wire.server.discovery import find_redis

    fields = {"queue": QUEUE, "state_dir": str(state_dir), "http_port": 0} | settings
    os.environ.pop(
        "PAGEMILL_REDIS_URL", None
    )  # the worker has its dedicated server, and the producer finds it
    command = [sys.executable, "-c", WORKER, json.dumps(fields)]
    worker = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = _when_ready(worker, lambda: find_redis(directory=state_dir))
        name = _when_ready(worker, lambda: _served_model(url))
        with Producer(url, queue=QUEUE) as producer:
            yield url, producer, name
    finally:
        worker.terminate()
        try:
            worker.wait(30)
        except subprocess.TimeoutExpired:
            worker.kill()


def _when_ready(worker: subprocess.Popen[bytes], ask: Callable[[], str | None]) -> str:
    """Return the result of `ask` once it is available."""
    from pagemill import RedisUnavailable

    give_up = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up and worker.poll() is None:
        with contextlib.suppress(RedisUnavailable):
            if answer := ask():
                return answer
        time.sleep(0.1)
    raise RuntimeError(f"the worker did not start: exit code {worker.poll()}; see its output")


def _served_model(url: str) -> str | None:
    """Return the name under which a live worker serves its model, if any."""
    from pagemill.producer.wire.calls import registry
    from pagemill.producer.wire.server.clients import open_client
    from pagemill.producer.wire.server.transport import SyncTransport

    with open_client(url, QUEUE) as client:
        workers = SyncTransport(client).run(registry.workers(QUEUE))
    return next((model for worker in workers for model in worker.models), None)


if __name__ == "__main__":
    measure.run(load)
