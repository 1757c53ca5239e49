"""The engine's process: the loop on its main thread, commands read on another.

It exits when its connection closes, by the worker or by the kernel if the worker is killed. On Linux the
kernel then also kills it, so that a hung process does not keep the device.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

from pagemill.engine.errors import EngineError
from pagemill.monitoring.logging import configure_logging
from pagemill.worker.engine_host.codec import PROTOCOL, encode_report
from pagemill.worker.engine_host.loop import EngineLoop, load
from pagemill.worker.engine_host.messages import (
    AdaptersChanged,
    ChangeAdapter,
    Command,
    Failed,
    RankDied,
    Report,
    StartEngine,
)
from pagemill.worker.engine_host.served import ServedModel
from pagemill.worker.interpreter import prepare_for_steps

if TYPE_CHECKING:
    from pagemill.engine.serving import AnyEngine

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""These also reach this process when sent to a group or a service; only the worker reacts to them."""
_LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1


class Child:
    """Owns the connection. Sends from any thread, one message at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._adapters = ThreadPoolExecutor(1, thread_name_prefix="pagemill-adapter-changes")
        self._engine: AnyEngine | None = None

    def run(self, start: StartEngine) -> int:
        """Serve until stopped. Returns the exit code; every failure is sent first."""
        # Before loading: a worker that exits must stop it too.
        threading.Thread(target=self._read, name="pagemill-engine-commands", daemon=True).start()
        try:
            self._engine = engine = load(start.config)
            prepare_for_steps()
            self._send(pickle.dumps(ServedModel.from_engine(engine), PROTOCOL))
            if start.config.tensor_parallel_size > 1:
                threading.Thread(target=self._watch_ranks, args=(engine,), daemon=True).start()
            EngineLoop(engine, self._inbox, self._report).run()
        except EngineError as error:
            self._send_failure(error)
            return 1
        except BaseException as error:
            logger.exception("the engine died")
            self._send_failure(error)
            return 1
        finally:
            if self._engine is not None:
                self._engine.close()
        return 0

    def _read(self) -> None:
        try:
            while True:
                message = pickle.loads(self._connection.recv_bytes())
                if isinstance(message, ChangeAdapter):
                    self._adapters.submit(self._change_adapter, message)
                else:
                    self._inbox.put(message)
        except (EOFError, OSError):
            _leave(0)

    def _change_adapter(self, change: ChangeAdapter) -> None:
        assert self._engine is not None, "the worker knows of no adapter before"
        pool, error = self._engine.adapters, None
        try:
            if change.action == "remove":
                pool.remove(change.name)
            else:
                assert change.directory is not None
                pool.add(change.name, change.directory)
        except EngineError as refusal:
            error = refusal
        except Exception as failure:  # a folder can make a library raise anything
            logger.exception("adapter %s can't be added", change.name)
            error = EngineError(f"adapter {change.name} can't be read: {type(failure).__name__}")
        self._send(pickle.dumps(AdaptersChanged(change.number, error, pool.registered()), PROTOCOL))

    def _watch_ranks(self, engine: AnyEngine) -> None:
        while (reason := engine.failure()) is None:
            time.sleep(_LOOK_S)
        self._send(pickle.dumps(RankDied(reason), PROTOCOL))

    def _report(self, report: Report) -> None:
        """Send a report. Blocks while the worker reads none and the socket is full, so that reports do not pile up."""
        self._send(encode_report(report))

    def _send_failure(self, error: BaseException) -> None:
        if not isinstance(error, EngineError):  # the worker may lack the library whose error it is
            error = RuntimeError(f"{type(error).__name__}: {error}")
        self._send(pickle.dumps(Failed(error), PROTOCOL))

    def _send(self, data: bytes) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            _leave(0)


def main(connection: Connection) -> NoReturn:
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # processes that this one starts would inherit ignored signals
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.set_inheritable(connection.fileno(), False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        start = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        _leave(0)
    assert isinstance(start, StartEngine)
    configure_logging(start.log_level, start.log_format, fields=start.log_fields)
    _leave(Child(connection).run(start))


def _leave(code: int) -> NoReturn:
    """Exit immediately: tearing down libraries is slow, and their threads might hang."""
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
