"""The process of a rank above 0: loads its share, then runs the plans that it receives. It does not have requests,
a queue or sampling.

It exits with its connection to rank 0, which rank 0 closes, or the kernel if rank 0 crashes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

logger = logging.getLogger(__name__)


class Inbox:
    """Messages from rank 0, read ahead on a thread, which also detects a crash of rank 0 during a collective."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._run, name="pagemill-inbox", daemon=True).start()

    def take(self) -> bytes:
        return self._messages.get()

    def _run(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            _leave(0)


def main(connection: Connection) -> NoReturn:
    """Run the rank. Does not raise: every failure ends the process, which rank 0 detects."""
    from pagemill.engine.errors import ConfigError
    from pagemill.engine.execution.parallel.messages import Failed, LoadShare

    try:
        task = connection.recv()
        assert isinstance(task, LoadShare)
        logging.basicConfig(
            level=logging.WARNING, format=f"%(asctime)s rank {task.rank} %(levelname)s %(message)s"
        )
        try:
            runner, plans = _get_ready(connection, task)
        except Exception as error:
            if not isinstance(error, ConfigError):
                logger.exception("rank %d can't get ready", task.rank)
            connection.send(Failed(str(error) or type(error).__name__, isinstance(error, ConfigError)))
            _leave(1)
        _run_plans(runner, plans)
    except (EOFError, OSError):  # rank 0 exited while this one was loading
        _leave(0)
    except Exception:
        logger.exception("the step failed")
        _leave(1)


def _get_ready(connection: Connection, task: Any) -> tuple[Any, Inbox]:
    """Load the rank's share, agree on limits, connect; return the `ModelRunner` and the inbox of its plans."""
    from pagemill.engine.config import resolve_limits, resolve_max_model_len
    from pagemill.engine.devices.registry import find_device
    from pagemill.engine.execution.kv_cache import num_blocks_for, num_host_blocks_for, resolve_cache_dtype
    from pagemill.engine.execution.model_runner import ModelRunner
    from pagemill.engine.execution.parallel.messages import Loaded, Ready
    from pagemill.engine.execution.prepared_model import PreparedModel
    from pagemill.engine.execution.rehearsal import step_bytes
    from pagemill.engine.layers.rank_group import RankGroup
    from pagemill.engine.models.loader import load_model

    config = task.config
    group = RankGroup(task.rank, config.tensor_parallel_size)
    device = find_device(config.device)
    device.tune_process(config.num_threads)
    model = load_model(config, device, group)
    cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, model.dtype)
    max_model_len = resolve_max_model_len(config, model.context_length, model.longest_context)
    shape = replace(model.kv_cache_shape(config.block_size, max_model_len), dtype=cache_dtype)
    prepared = PreparedModel.from_model(model, config, shape, max_model_len)
    limits = replace(
        resolve_limits(config, max_model_len, (), device.step_defaults), kv_windows=shape.windows
    )
    room = step_bytes(prepared, config, limits, shape, group)
    num_blocks = num_blocks_for(config, shape, device, room, limits)
    connection.send(Loaded(num_blocks, num_host_blocks_for(config, shape, device)))
    limits = connection.recv()
    plans = Inbox(
        connection
    )  # started early: waiting for the others and compiling kernels must stop if rank 0 crashes
    group.connect(task.rendezvous, device.collectives)
    runner = ModelRunner(prepared, config, limits, shape, group)
    connection.send(Ready(model.weight_bytes()))
    return runner, plans


def _run_plans(runner: Any, inbox: Inbox) -> NoReturn:
    from pagemill.engine.execution.parallel.plan_delta import decode

    while True:
        runner.launch(decode(inbox.take()))


def _leave(code: int) -> NoReturn:
    """Exit immediately: tearing down a collective that waits for a dead rank may take as long as its timeout."""
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    # A signal to the process group also reaches rank 0, which handles it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    main(Connection(int(sys.argv[1])))
