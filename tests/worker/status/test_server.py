from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import Gauge

from pagemill.supervisor.ports import is_free
from pagemill.worker.status.server import Health, PortTaken, Probes, StatusServer
from tests.worker.harness import get


class Answers:
    def __init__(self) -> None:
        self.health = Health(ok=True)
        self.readiness = Health(ok=True)
        self.startup = Health(ok=True)

    def probes(self) -> Probes:
        return Probes(
            metrics=lambda encode: encode(Gauge("one", "A metric.", registry=None)),
            health=lambda: self.health,
            readiness=lambda: self.readiness,
            startup=lambda: self.startup,
        )


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def server(answers: Answers) -> Iterator[StatusServer]:
    server = StatusServer("127.0.0.1", 0, answers.probes())
    yield server
    server.close()


def test_metrics_are_served_in_the_format_that_is_asked_for(server: StatusServer) -> None:
    assert get(f"{server.url}/metrics") == (200, b"# HELP one A metric.\n# TYPE one gauge\none 0.0\n")
    request = urllib.request.Request(
        f"{server.url}/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert response.read() == b"# HELP one A metric.\n# TYPE one gauge\none 0.0\n# EOF\n"


def test_probes_answer_503_when_they_are_not_good_and_say_why(server: StatusServer, answers: Answers) -> None:
    assert get(f"{server.url}/healthz")[0] == 200
    answers.readiness = Health(ok=False, details={"state": "draining"})
    status, body = get(f"{server.url}/readyz")
    assert status == 503
    assert json.loads(body) == {"ok": False, "state": "draining"}
    assert get(f"{server.url}/healthz")[0] == 200


@pytest.mark.parametrize("host", ["::1", "::"])
def test_an_ipv6_address_is_listened_on(host: str, answers: Answers) -> None:
    if not is_free("::1", 0):
        pytest.skip("this machine has no IPv6")
    server = StatusServer(host, 0, answers.probes())
    try:
        assert get(f"{server.url.replace('[::]', '[::1]')}/healthz")[0] == 200
    finally:
        server.close()


def test_an_unknown_path_is_404(server: StatusServer) -> None:
    assert get(f"{server.url}/nonsense")[0] == 404


def test_an_explicit_port_that_is_taken_is_an_error(server: StatusServer, answers: Answers) -> None:
    with pytest.raises(PortTaken, match=f"^port {server.port} .* is taken"):
        StatusServer("127.0.0.1", server.port, answers.probes())


def test_an_address_of_another_machine_is_named(answers: Answers) -> None:
    with pytest.raises(OSError, match=r"^port 0 on 192\.0\.2\.1 can't be listened on: .*choose another"):
        StatusServer("192.0.2.1", 0, answers.probes())


def test_the_default_port_moves_on_when_it_is_taken(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("pagemill.worker.status.server.DEFAULT_HTTP_PORT", taken.getsockname()[1])
        server = StatusServer("127.0.0.1", None, answers.probes())
        try:
            assert server.port > taken.getsockname()[1]
            assert get(f"{server.url}/metrics")[0] == 200
        finally:
            server.close()
