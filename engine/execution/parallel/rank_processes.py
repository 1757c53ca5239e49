"""Management of the other ranks' processes by rank 0."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from pagemill.engine.child_process import ending, environment
from pagemill.engine.config import EngineConfig, SchedulerConfig
from pagemill.engine.devices.backend import DeviceBackend
from pagemill.engine.errors import ConfigError, EngineError, RankLost
from pagemill.engine.execution.parallel.messages import Failed, Loaded, LoadShare, Ready
from pagemill.engine.layers.rank_group import RankGroup

_CHILD = "pagemill.engine.execution.parallel.rank_process"
_END_S = 2.0
"""Seconds after which a process that has not exited since its connection was closed is killed."""
_LOOK_S = 0.2
"""The interval at which the processes are checked during a wait for them."""
_NOTICE_S = 1.0
"""Maximum time for the kernel to report the exit status after a connection broke."""

Answer = TypeVar("Answer", Loaded, Ready)


class RankProcesses:
    """The processes of ranks 1 and up, on this machine. They exit when this object is deleted or this process exits.

    Only one thread may send; `failure` is safe on any thread.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the processes; each starts to load its share of the model."""
        self.config = replace(config, num_threads=_threads_of_a_rank(config))
        """The configuration of every rank."""
        self.group = RankGroup(0, config.tensor_parallel_size)
        directory = tempfile.mkdtemp(prefix="pagemill-ranks-")
        self._rendezvous = str(Path(directory) / "store")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._broken: str | None = None
        self._end = weakref.finalize(self, _end, self._processes, self._connections, directory)
        for rank in range(1, config.tensor_parallel_size):
            connection, theirs = Pipe()
            with theirs:
                self._processes.append(_spawn(theirs.fileno(), self.config.num_threads))
            self._connections.append(connection)
            connection.send(LoadShare(self.config, rank, self._rendezvous))

    def agree(self, limits: SchedulerConfig, device: DeviceBackend) -> SchedulerConfig:
        """Wait until all ranks have loaded, agree on a pool size that fits on each, and connect them.

        Raises:
            ConfigError: a rank cannot load its share, or a device lacks memory for a pool.
            RankLost: a rank's process crashed.
        """
        loaded = self._answers(Loaded)
        limits = replace(
            limits,
            num_kv_blocks=min(limits.num_kv_blocks, *(answer.num_kv_blocks for answer in loaded)),
            num_host_blocks=min(limits.num_host_blocks, *(answer.num_host_blocks for answer in loaded)),
        )
        for rank, connection in enumerate(self._connections, start=1):
            with self._watch(rank):
                connection.send(limits)
        try:
            self._meet(device)
        except RuntimeError as error:
            raise RankLost(self._why(f"the ranks can't connect: {error}")) from error
        return limits

    def _meet(self, device: DeviceBackend) -> None:
        """Connect the ranks, on a thread: the call itself would wait minutes for a rank that crashes meanwhile."""
        met: Future[None] = Future()

        def run() -> None:
            try:
                device.claim(self.group.rank)
                self.group.connect(self._rendezvous, device.collectives)
            except Exception as error:
                met.set_exception(error)
            else:
                met.set_result(None)

        threading.Thread(target=run, name="pagemill-ranks", daemon=True).start()
        while not wait([met], _LOOK_S).done:
            if (reason := self.failure()) is not None:
                raise RankLost(reason)
        met.result()

    def wait_ready(self) -> int:
        """Wait until all ranks accept plans; return the total bytes of their weights. Raises as `agree` does."""
        return sum(answer.weight_bytes for answer in self._answers(Ready))

    def send(self, plan: bytes) -> None:
        """Send a plan to every rank. Raises `RankLost`."""
        if self._broken is not None or not self._end.alive:
            raise RankLost(self._broken or "the ranks have been ended")
        for rank, connection in enumerate(self._connections, start=1):
            with self._watch(rank):
                connection.send_bytes(plan)

    def give_up(self, error: Exception) -> RankLost:
        """Stop the ranks after a step failed on rank 0: their progress in it is unknown. Return the error to raise."""
        if self._broken is None:
            self._broken = self._why(f"a step failed on rank 0: {type(error).__name__}: {error}")
            self.close()
        return RankLost(self._broken)

    def failure(self) -> str | None:
        """The process that has exited, and its status; None while all are alive."""
        if self._broken is not None:
            return self._broken
        for rank, process in enumerate(self._processes if self._end.alive else (), start=1):
            if (code := process.poll()) is not None:
                return f"the process of rank {rank} {ending(code)}"
        return None

    def close(self) -> None:
        """Stop the processes. Safe to call repeatedly."""
        self._end()
        self.group.close()  # after them: they would report it as their own failure

    def _answers(self, kind: type[Answer]) -> list[Answer]:
        answers = []
        for rank, connection in enumerate(self._connections, start=1):
            with self._watch(rank):
                answer = connection.recv()
            if isinstance(answer, Failed):
                refusal = ConfigError if answer.is_config_error else EngineError
                raise refusal(f"rank {rank}: {answer.message}")
            assert isinstance(answer, kind), f"rank {rank} says {answer!r}"
            answers.append(answer)
        return answers

    @contextmanager
    def _watch(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise RankLost(self._why(f"rank {rank} does not answer: {error}")) from error

    def _why(self, otherwise: str) -> str:
        """Describe the process that exited, if any; its connections break just before the kernel reports it."""
        give_up_at = time.monotonic() + _NOTICE_S
        while (reason := self.failure()) is None and time.monotonic() < give_up_at:
            time.sleep(0.01)
        return reason or otherwise


def _threads_of_a_rank(config: EngineConfig) -> int:
    """Return a rank's CPU threads: the ranks share the cores."""
    return config.num_threads or max(1, torch.get_num_threads() // config.tensor_parallel_size)


def _spawn(connection_fd: int, num_threads: int | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", _CHILD, str(connection_fd)],
        env=environment() | {"OMP_NUM_THREADS": str(num_threads)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(connection_fd,),
        start_new_session=True,  # Ctrl-C is for rank 0, which may finish its work first
    )


def _end(processes: list[subprocess.Popen[bytes]], connections: list[Connection], directory: str) -> None:
    """Stop the processes by closing their connections; kill any that is stuck in a collective or stopped."""
    for connection in connections:
        connection.close()
    give_up_at = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(0.0, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(directory, ignore_errors=True)
