"""From flags, variables and a file to the start arguments of each child."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.supervisor import layout
from pagemill.supervisor.child import ChildSpec
from pagemill.supervisor.ports import Ports, is_free
from pagemill.supervisor.settings import SettingsError, UpSettings
from tests.conftest import ROOT, run_python

URL = "redis://:secret@127.0.0.1:6379/0"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PAGEMILL_") or name == "CUDA_VISIBLE_DEVICES":
            monkeypatch.delenv(name)


def load(
    file: str = "", path: Path | None = None, options: dict[str, Any] | None = None, **flags: Any
) -> UpSettings:
    if path is not None:
        path.write_text(file)
    return UpSettings.load(path, flags, options or {})


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def described(settings: UpSettings, listener: socket.socket) -> dict[str, ChildSpec]:
    groups = layout.worker_groups(settings)
    ports = Ports(tuple(range(9100, 9100 + len(groups))), 9200, listener)
    return {spec.name: spec for spec in layout.specs(settings, groups, ports, URL)}


def test_a_file_says_it_all(tmp_path: Path, listener: socket.socket) -> None:
    file = """
    model = "echo:5"
    queue = "labels"
    devices = "0|2,3"
    http_host = "0.0.0.0"
    log_format = "json"
    stop_timeout_s = 90
    [worker]
    max_num_seqs = 32
    served_model_name = ["a", "b"]
    enable_prefix_caching = false
    [gateway]
    max_in_flight = 9
    model = ["echo", "other"]
    separate_reasoning = true
    [exporter]
    queue = "labels"
    """
    settings = load(file, tmp_path / "up.toml")
    found = described(settings, listener)
    assert list(found) == ["worker-0", "worker-1", "gateway", "exporter"]
    first, second = found["worker-0"], found["worker-1"]
    assert first.arguments == ("worker", "--http-port", "9100")
    assert (first.url, second.url) == ("http://127.0.0.1:9100", "http://127.0.0.1:9101")
    assert dict(first.environment) == {
        "PAGEMILL_QUEUE": "labels", "PAGEMILL_HTTP_HOST": "0.0.0.0", "PAGEMILL_LOG_FORMAT": "json",
        "PAGEMILL_LOG_LEVEL": "info", "PAGEMILL_REDIS_URL": URL, "PAGEMILL_MODEL": "echo:5",
        "PAGEMILL_MAX_NUM_SEQS": "32", "PAGEMILL_SERVED_MODEL_NAME": "a b",
        "PAGEMILL_ENABLE_PREFIX_CACHING": "False", "PAGEMILL_DEVICE": "cuda",
        "PAGEMILL_TENSOR_PARALLEL_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert second.environment["PAGEMILL_TENSOR_PARALLEL_SIZE"] == "2"
    assert found["gateway"].arguments[-7:] == (
        "--max-in-flight", "9", "--model", "echo", "--model", "other", "--separate-reasoning",
    )  # fmt: skip
    assert found["gateway"].listener == listener.fileno()
    assert found["exporter"].arguments[-2:] == ("--queue", "labels")
    assert layout.timeouts(settings).stop_s == 90
    for spec in found.values():
        assert not any("secret" in word for word in spec.arguments), "all users can read a command line"
        assert "secret" not in repr(spec)


def test_workers_on_the_cpu_share_it(listener: socket.socket) -> None:
    found = described(load(model="echo", workers=2), listener)
    for name in ("worker-0", "worker-1"):
        environment = found[name].environment
        assert environment["PAGEMILL_DEVICE"] == "cpu"
        assert int(environment["PAGEMILL_NUM_THREADS"]) == found[name].threads
        assert int(environment["PAGEMILL_KV_CACHE_MEMORY_BYTES"]) > 0
    alone = described(load(model="echo", workers=1), listener)["worker-0"].environment
    assert "PAGEMILL_NUM_THREADS" not in alone
    told = described(
        load(model="echo", workers=2, options={"num_threads": "3", "num_kv_blocks": "9"}), listener
    )
    assert told["worker-0"].environment["PAGEMILL_NUM_THREADS"] == "3"
    assert "PAGEMILL_KV_CACHE_MEMORY_BYTES" not in told["worker-0"].environment


def test_flags_come_before_variables_and_those_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    file = 'queue = "file"\nlog_level = "debug"\nmodel = "echo"\n[worker]\nmax_num_seqs = 1\nblock_size = 8\n'
    monkeypatch.setenv("PAGEMILL_QUEUE", "variable")
    monkeypatch.setenv("PAGEMILL_LOG_LEVEL", "error")
    monkeypatch.setenv("PAGEMILL_MAX_NUM_SEQS", "2")
    settings = load(file, tmp_path / "up.toml", queue="flag", options={"block_size": "4"})
    assert (settings.queue, settings.log_level) == ("flag", "error")
    environment = described(settings, listener)["worker-0"].environment
    assert "PAGEMILL_MAX_NUM_SEQS" not in environment, "the child has the variable itself"
    assert environment["PAGEMILL_BLOCK_SIZE"] == "4"


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert load('\ufeffqueue = "file"\nmodel = "echo"\n', tmp_path / "up.toml").queue == "file"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("queue = ", "is not TOML"),
        ('color = "red"', "color"),
        ("workers = 0", "workers"),
        ('workers = 2\ndevices = "0"', "exclude each other"),
        ('devices = "0|0"', "named twice"),
        ('model = "/no/such/model"', "/no/such/model"),
        ('model = "echo"\n[worker]\nmax_num_seqs = -1', "max_num_seqs"),
        ('model = "echo"\n[worker]\nno_such = 1', "no_such"),
        ('model = "echo"\n[worker]\nhmac_keys = "0123456789abcdef"', "PAGEMILL_HMAC_KEYS in the environment"),
        ('model = "echo"\n[worker]\nqueue = "x"', "above the tables"),
        ('model = "echo"\n[gateway]\nport = 1', "gateway_port"),
        ('model = "echo"\n[gateway]\nkeys = { a = 1 }', "gateway"),
        ("", "model"),
    ],
)
def test_what_makes_no_sense_is_named(
    file: str, message: str, tmp_path: Path, listener: socket.socket
) -> None:
    with pytest.raises(SettingsError, match=message):
        described(load(file, tmp_path / "up.toml"), listener)


def test_the_bound_of_a_stop_is_beyond_the_workers_own() -> None:
    assert layout.timeouts(load(model="echo")).stop_s > 25
    assert layout.timeouts(load(model="echo", options={"shutdown_s": "300"})).stop_s > 300


def test_ports_are_distinct_and_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        settings = load(model="echo", http_port=0, gateway_port=0, exporter_port=0)
        ports = Ports.choose(settings, 20)
        assert ports.gateway is not None
        with ports.gateway:
            chosen = [*ports.workers, ports.exporter, ports.gateway.getsockname()[1]]
            assert len(set(chosen)) == 22
            assert busy not in chosen
        for flags in ({"http_port": busy}, {"exporter_port": busy}, {"gateway_port": busy}):
            with pytest.raises(SettingsError, match=str(busy)):
                Ports.choose(load(**{"model": "echo", "gateway_port": 0, "exporter_port": 0} | flags), 1)


def test_by_default_workers_leave_the_exporter_its_port() -> None:
    first = next(port for port in range(9790, 9990) if is_free("127.0.0.1", port))
    ports = Ports.choose(load(model="echo", gateway=False, exporter_port=first), 3)
    assert (ports.gateway, ports.exporter) == (None, first)
    assert len(set(ports.workers)) == 3
    assert min(ports.workers) > first


@pytest.mark.slow
def test_it_imports_no_model_library() -> None:
    modules = [path.stem for path in (ROOT / "pagemill/supervisor").glob("*.py") if path.stem != "__init__"]
    program = "import sys; " + "; ".join(f"import pagemill.supervisor.{name}" for name in modules)
    program += "; import pagemill.cli.processes.up"
    program += "; heavy = {'torch', 'transformers', 'numba', 'triton'} & set(sys.modules)"
    done = run_python("-c", program + "; print(sorted(heavy))", cwd=ROOT, check=True)
    assert done.stdout == "[]\n"
