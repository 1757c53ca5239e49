"""The engine on a thread of the worker's process."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import EngineError
from pagemill.worker.engine_host.host import Deliver, EngineHost
from pagemill.worker.engine_host.loop import EngineLoop, load
from pagemill.worker.engine_host.messages import Command, EngineState, Stop

if TYPE_CHECKING:
    from pagemill.engine.serving import AnyEngine

logger = logging.getLogger(__name__)


class EngineThread(EngineHost):
    """Runs the engine in the interpreter of the worker's other threads."""

    def __init__(self, config: EngineConfig, deliver: Deliver) -> None:
        super().__init__(deliver)
        self._config = config
        self._thread = threading.Thread(target=self._run, name="pagemill-engine", daemon=True)
        self._engine: AnyEngine | None = None
        self._inbox: SimpleQueue[Command] = SimpleQueue()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        self._send(Stop())
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def engine(self) -> AnyEngine:
        assert self._engine is not None, "the engine is not loaded yet"
        return self._engine

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.state is not EngineState.FAILED

    def lost_rank(self) -> str | None:
        return self._engine.failure() if self._engine is not None and self.is_alive else None

    def _send(self, command: Command) -> None:
        self._inbox.put(command)

    def _run(self) -> None:
        try:
            self._engine = load(self._config)
            EngineLoop(self._engine, self._inbox, self._take).run()
            self.state = EngineState.STOPPED
        except EngineError as error:
            self._fail(error)
        except BaseException as error:
            logger.exception("the engine thread died")
            self._fail(error)
        finally:
            if self._engine is not None:
                self._engine.close()
