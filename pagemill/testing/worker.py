"""A worker on threads of this process, with the echo model in place of a real one."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from pagemill.engine.models.echo import Reply, reply_with
from pagemill.worker.config import WorkerConfig
from pagemill.worker.signal_flag import SignalFlag
from pagemill.worker.worker import Worker

LOAD_S = 60.0
STOP_S = 30.0


class EchoWorker:
    """Runs a queue's jobs on threads: repeats the prompt, or returns the text of `reply`, within the job's structure.

    Everything except the model is real: leases, streams, stop strings, schemas, errors and metrics. Echo workers of one
    process share one reply.

    Args:
        url: the queue's server.
        queue: name of the queue.
        model: the served name.
        **settings: settings of the worker, as in `WorkerConfig`.
    """

    def __init__(self, url: str, queue: str = "default", *, model: str = "echo", **settings: Any) -> None:
        given = model if model == "echo" or model.startswith("echo:") else f"echo::{model}"
        defaults = {"model": given, "http_port": 0, "checkpoint_s": 0.05, "log_level": "warning"}
        config = WorkerConfig.load(redis_url=url, queue=queue, **(defaults | settings))
        self._worker = Worker(config, url)

    def start(self) -> Self:
        """Start the worker and wait until it is ready.

        Returns:
            The worker.

        Raises:
            TimeoutError: the worker is not ready in time.
        """
        self._worker.start()
        if not self._worker.wait_ready(timeout=LOAD_S):
            raise TimeoutError(f"the echo worker was not ready within {LOAD_S:g} s")
        return self

    def reply(self, words: str | Reply | None) -> None:
        """Set the reply of later jobs. A structure limits it.

        Args:
            words: a text, or a function from the prompt's text to one; None: the prompt.
        """
        reply_with((lambda _: words) if isinstance(words, str) else words)

    def close(self) -> None:
        """Requeue running jobs and stop."""
        reply_with(None)
        self._worker.drain(0.0, SignalFlag(), time.monotonic() + STOP_S)
        self._worker.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
