"""A worker for the duration of a run: a child process, with an embedded server if no URL is given."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from pagemill.cli.terminal.checked import served_name
from pagemill.cli.terminal.waiting import Waiting
from pagemill.engine.errors import EngineError, ModelLoadError
from pagemill.engine.models.directory import LocalModel, obtain_model
from pagemill.engine.models.echo import is_echo
from pagemill.engine.models.source import ModelSource
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.process.dependent import dependent
from pagemill.producer.wire.schema.errors import PagemillError, RedisUnavailable
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.discovery import find_redis, state_dir
from pagemill.producer.wire.server.transport import SyncTransport

SILENCE_LIMIT_S = 600.0
"""A worker that is not ready and has not logged for this long has failed, even on a busy machine."""
STOP_LIMIT_S = 30.0
LOADING_PATIENCE_S = 60.0
"""Time for a worker that is still loading to report its models."""
POLL_S = 0.1
LOG_LINES = 15

TAIL_BYTES = 4096
_MESSAGE = re.compile(r"^\S+Z \[\w+ *\] (.+?) *\[pagemill\.", re.MULTILINE)

Tell = Callable[[str], None]


def _silently(_: str) -> None:
    """Print nothing."""


class WorkerFailed(PagemillError):
    """The worker did not start, or exited early; the message ends with its last output."""


class LocalWorker:
    """Runs `pagemill worker` as a child process; at the end of the context it is stopped with SIGTERM.

    A process and not a thread, so that its step loop shares no interpreter with the caller's work. On Linux
    it also ends with the thread that created this.
    """

    is_quiet = False
    """Do not print to stderr while it stops."""

    def __init__(
        self,
        model: str,
        *,
        queue: str,
        url: str | None = None,
        state_dir: Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """`state_dir`: the data directory of the embedded server that is used without `url`."""
        if not is_echo(model) and importlib.util.find_spec("torch") is None:
            raise WorkerFailed("a worker needs more than a producer: pip install 'pagemill[worker]'")
        _download(model)
        self._queue = queue
        self._url = url
        self._state_dir = state_dir
        self._log = tempfile.NamedTemporaryFile(prefix="pagemill-worker-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "pagemill", "worker", "--model", model, "--queue", queue]
        if state_dir is not None:
            command += ["--state-dir", str(state_dir)]
        environment = dict(os.environ)
        if url is not None:
            # Not as an argument: a URL may hold a password, and all users can see arguments.
            environment["PAGEMILL_REDIS_URL"] = url
        # The variable is for a worker that is scraped; several private ones may run next to it.
        environment["PAGEMILL_HTTP_PORT"] = "0"
        # A separate session: the caller handles Ctrl-C, and the worker gets one SIGTERM.
        self._process = subprocess.Popen(
            dependent([*command, *options]),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env=environment,
        )

    def wait_ready(self, tell: Tell = _silently) -> tuple[str, WorkerInfo]:
        """Wait until the worker serves; return the server's URL and the worker's info. Raises WorkerFailed.

        `tell` is called many times per second with the worker's activity, as in its log.
        """
        message, silent_since = "", time.monotonic()
        while time.monotonic() < silent_since + SILENCE_LIMIT_S:
            self.check()
            if (latest := self._last_message()) != message:
                message, silent_since = latest, time.monotonic()
            tell(message)
            with contextlib.suppress(RedisUnavailable):
                url = find_redis(self._url, self._state_dir)
                for info in live_workers(url, self._queue):
                    if info.pid == self._process.pid and info.state == "ready":
                        return url, info
            time.sleep(POLL_S)
        raise self._failed(f"the worker is not ready and logged nothing for {SILENCE_LIMIT_S:.0f} s")

    def check(self) -> None:
        """Raise WorkerFailed if the worker has exited."""
        if self._process.poll() is not None:
            raise self._failed(f"the worker ended with exit code {self._process.returncode}")

    def stop(self, tell: Tell = _silently) -> int:
        """Stop the worker; returns its exit code. `tell` as in `wait_ready`."""
        self._process.terminate()
        give_up = time.monotonic() + STOP_LIMIT_S
        try:
            while self._process.poll() is None:
                if time.monotonic() > give_up:
                    self._process.kill()
                tell(self._last_message())
                time.sleep(POLL_S)
            return self._process.wait()
        finally:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with Waiting(
            "stopping the worker", Console(stderr=True, quiet=self.is_quiet), is_short=True
        ) as waiting:
            self.stop(waiting.report)

    def _last_message(self) -> str:
        with Path(self._log.name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            messages = _MESSAGE.findall(log.read().decode(errors="replace"))
        return messages[-1].strip() if messages else ""

    def _failed(self, reason: str) -> WorkerFailed:
        tail = Path(self._log.name).read_text(errors="replace").splitlines()[-LOG_LINES:]
        return WorkerFailed("\n".join([reason, *tail]))


def live_workers(url: str, queue: str) -> list[WorkerInfo]:
    """Return the live workers of a queue. Raises RedisUnavailable."""
    with open_client(url, queue) as client:
        return SyncTransport(client).run(registry.workers(queue))


def serving_workers(url: str, queue: str, model: str, say: Callable[[str], None]) -> list[WorkerInfo]:
    """Return the workers that serve the model. Waits for loading ones: a second would halve the machine.

    Args:
        say: called once with a message if waiting is necessary.

    Raises RedisUnavailable.
    """
    name = served_name(model)
    message = f"waiting for the worker of queue {queue} to load its model"
    alive = settled_workers(url, queue, lambda info: name in info.models, partial(say, message))
    return [info for info in alive if name in info.models]


def settled_workers(
    url: str, queue: str, is_wanted: Callable[[WorkerInfo], bool], announce: Callable[[], None]
) -> list[WorkerInfo]:
    """Return the live workers once one is suitable, none is loading, or `LOADING_PATIENCE_S` have passed.

    Args:
        announce: called once if there is something to wait for.

    Raises RedisUnavailable.
    """
    give_up = time.monotonic() + LOADING_PATIENCE_S
    is_announced = False
    while True:
        alive = live_workers(url, queue)
        is_loading = any(info.state == "loading" for info in alive)
        if any(map(is_wanted, alive)) or not is_loading or time.monotonic() > give_up:
            return alive
        if not is_announced:
            announce()
            is_announced = True
        time.sleep(POLL_S)


def can_load(model: str) -> bool:
    """Return whether a local worker could load the model: False for names and paths that only exist elsewhere."""
    try:
        source = ModelSource.parse(model)
    except ModelLoadError:
        return False
    return source.kind not in ("folder", "gguf") or Path(source.name).expanduser().exists()


def _download(model: str) -> None:
    """Download a hub's model here, where its progress is seen, and not in the child. Raises WorkerFailed."""
    try:
        if ModelSource.parse(model).is_remote:
            download(model)
    except EngineError as error:
        raise WorkerFailed(str(error)) from error


def download(model: str) -> LocalModel:
    """Download a hub's model, unless no worker could run it. Ctrl-C ends the process. Raises `EngineError`."""
    with _left_at_ctrl_c(
        f"stopped; files that are whole are kept, the rest comes with: pagemill pull {model}"
    ):
        return obtain_model(model, _print_stderr, _refuse_unrunnable)


@contextlib.contextmanager
def _left_at_ctrl_c(message: str) -> Iterator[None]:
    """Exit immediately at Ctrl-C: the hubs' libraries would first wait for the files that their threads download."""

    def leave(*_: object) -> None:
        _print_stderr(f"\n{message}")
        os._exit(128 + signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _print_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _refuse_unrunnable(directory: Path) -> None:
    """Raise ModelLoadError if config.json shows that no worker could run the model."""
    try:
        from pagemill.engine.runnable import check_config
    except ModuleNotFoundError:  # no worker runs here, but one may run on another host
        return
    check_config(directory)


def has_server(url: str | None) -> bool:
    """Return whether there is an address to connect to."""
    try:
        find_redis(url, state_dir())
    except RedisUnavailable:
        return False
    return True
