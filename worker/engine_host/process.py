"""The worker's side of an engine in a separate process: start, communication, and stop.

The worker's threads and the step loop then do not share an interpreter. The number of requests is limited by
admission, so the messages waiting in either process are bounded by its credit.
"""

from __future__ import annotations

import logging
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any, Literal

from pagemill.engine.child_process import ending, environment
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import DeviceLost, EngineError
from pagemill.engine.models.echo import is_echo
from pagemill.engine.text.tokenizer_files import import_libraries
from pagemill.worker.engine_host.child import STOP_SIGNALS
from pagemill.worker.engine_host.codec import decode_report
from pagemill.worker.engine_host.host import Deliver, EngineHost
from pagemill.worker.engine_host.messages import (
    AdaptersChanged,
    AddRequest,
    Command,
    EngineState,
    Failed,
    RankDied,
    Report,
    StartEngine,
    Stop,
)
from pagemill.worker.engine_host.remote_adapters import RemoteAdapters
from pagemill.worker.engine_host.sender import Sender
from pagemill.worker.engine_host.served import ServedModel

logger = logging.getLogger(__name__)

_CHILD = "pagemill.worker.engine_host.child"
_EXIT_S = 5.0
"""Seconds that a process has to exit after its connection has closed."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The arguments of `configure_logging`."""

    level: str = "info"
    format: Literal["console", "json"] = "console"
    fields: dict[str, str] = field(default_factory=dict)


class EngineProcess(EngineHost):
    """An engine in another process. If it exits unexpectedly, the device counts as lost."""

    def __init__(self, config: EngineConfig, deliver: Deliver, log: LogSettings | None = None) -> None:
        super().__init__(deliver)
        log = log or LogSettings()
        self._config = config
        self._connection, self._theirs = Pipe()
        self._sender = Sender(self._connection)
        self._sender.put(StartEngine(config, log.level, log.format, log.fields))
        self._thread = threading.Thread(target=self._run, name="pagemill-engine", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._model: ServedModel | None = None
        self._is_stopping = False
        self._rank_died: str | None = None
        self._in_engine: set[str] = set()
        """Requests that were sent and whose end has not been reported."""
        self._counting = threading.Lock()
        self._num_sent = 0
        self._unanswered_since: float | None = None
        """`time.monotonic()` of the last command that the process took, while others are pending."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the loop to exit after its step; kill it after `timeout` seconds, or while it loads."""
        self._is_stopping = True
        self._send(Stop())
        if self._thread.ident is None:
            self._connection.close()
            self._theirs.close()
            return True
        self._thread.join(timeout if self._loaded.is_set() else 0.0)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join(_EXIT_S)
        return not self._thread.is_alive()

    @property
    def engine(self) -> ServedModel:
        assert self._model is not None, "the engine is not loaded yet"
        return self._model

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.state is not EngineState.FAILED

    def lost_rank(self) -> str | None:
        return self._rank_died if self.is_alive else None

    def stalled_for(self) -> float:
        """As for an engine on a thread; also grows while the process does not take commands."""
        stalled_s, since = super().stalled_for(), self._unanswered_since
        return stalled_s if since is None else max(stalled_s, time.monotonic() - since)

    def _send(self, command: Command) -> None:
        is_request = isinstance(command, AddRequest)
        if isinstance(command, AddRequest):
            self._in_engine.add(command.request_id)
        with self._counting:
            self._num_sent += 1
            if self._unanswered_since is None and self._loaded.is_set():
                self._unanswered_since = time.monotonic()
        self._sender.put(command, waits=is_request)

    def _run(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            self._fail(EngineError(f"the engine's process can't be started: {error}"))
            return
        try:
            if not (self._config.skip_tokenizer_init or is_echo(self._config.model)):
                import_libraries()
            while (data := self._receive()) is not None:
                self._handle(pickle.loads(data))
        except EngineError as error:  # the tokenizer is read again here
            self._fail(error)
        except BaseException as error:
            logger.exception("the engine's process can't be followed")
            self._fail(error)
        self._end()

    def _spawn(self) -> None:
        """Start the process from this thread. The kernel kills the process when this thread ends."""
        # Blocked until the process has handlers: until then a signal to the whole service would end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        with self._theirs:
            fd = self._theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(fd)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=(fd,),
                start_new_session=True,  # Ctrl-C is for the worker, which may have to finish jobs
            )
        self.pid = self._process.pid
        self._sender.start()

    def _receive(self) -> bytes | None:
        """Return the next message; None after the process has closed its end."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            return None

    def _handle(self, message: Any) -> None:
        match message:
            case tuple():
                self._take(decode_report(message))
            case ServedModel():
                if isinstance(message.adapters, RemoteAdapters):
                    message.adapters.connect(self._sender.put)
                self._model = message
            case AdaptersChanged():
                assert isinstance(self.engine.adapters, RemoteAdapters)
                self.engine.adapters.take(message)
            case RankDied(reason):
                self._rank_died = reason
            case Failed(error):
                self._fail(error)

    def _take(self, report: Report) -> None:
        with self._counting:
            self._unanswered_since = None if report.num_taken >= self._num_sent else report.progress_at
        for output in report.outputs:
            if output.finished:
                self._in_engine.discard(output.request_id)
        super()._take(report)

    def _end(self) -> None:
        """Let the process exit, and log how it ended if the worker did not request it."""
        self._sender.close()
        self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
            code = self._process.wait()
            if self._is_stopping:
                self.state = EngineState.STOPPED if self.error is None else EngineState.FAILED
            elif self.error is None:
                lost = DeviceLost(f"the engine's process {ending(code)}")
                lost.request_ids = frozenset(self._in_engine)
                self._fail(lost)
        if self._model is not None and isinstance(self._model.adapters, RemoteAdapters):
            self._model.adapters.give_up()
