"""A worker without an engine: pulls, streams words and commits, according to its script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue, open_queue


def echo(queue: Queue, pulled: PulledJob) -> None:
    """Commit the prompt; a prompt that begins with "fail" fails, one with "die" crashes the worker."""
    prompt = Job.from_payload(pulled.payload).prompt or ""
    if prompt.startswith("fail"):
        queue.fail(pulled)
    elif prompt.startswith("die"):
        queue.fail(pulled, "dead")
    else:
        queue.commit(pulled, prompt)


@contextmanager
def scripted_worker(
    url: str,
    name: str,
    run: Callable[[Queue, PulledJob], None] = echo,
    models: tuple[str, ...] = ("m",),
) -> Iterator[threading.Event]:
    """Serve a queue from a thread until the block is left."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def serve() -> None:
        queue = open_queue(url, name)
        try:
            while not stop.is_set():
                jobs = queue.pull(50, models=models)
                for job in jobs:
                    run(queue, job)
                if not jobs:
                    stop.wait(0.005)
        except BaseException as error:
            failures.append(error)
        finally:
            queue.transport.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(timeout=120)
    assert not failures, failures
