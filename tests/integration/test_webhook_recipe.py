"""docs/webhooks.md unchanged: its commands, its receiver, its settings."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pagemill import Producer
from tests.conftest import ROOT
from tests.worker.harness import PATIENCE_S, eventually, running_worker, worker_config

PAGE = (ROOT / "docs" / "webhooks.md").read_text()
PORT = "8443"


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@pytest.mark.slow
def test_the_recipe_works(
    valkey_url: str, queue_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    page = PAGE.replace(PORT, port)
    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"^((?:openssl|cat) .+)$", page, re.MULTILINE):
        subprocess.run(line, shell=True, check=True, capture_output=True)  # our own page
    settings = dict(re.findall(r"^export (\w+)=(\S+)$", page, re.MULTILINE))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    (arguments,) = re.findall(r"^python examples/webhook_receiver.py (.+)$", page, re.MULTILINE)
    command = [sys.executable, str(ROOT / "examples" / "webhook_receiver.py"), *arguments.split()]
    log = tmp_path / "receiver.log"
    with log.open("wb") as out:
        receiver = subprocess.Popen(command, stdout=out, env=os.environ)
    try:
        eventually(lambda: "https://localhost" in log.read_text(), "the receiver")
        with (
            running_worker(worker_config(valkey_url, queue_name)),
            Producer(valkey_url, queue=queue_name) as producer,
        ):
            (url,) = re.findall(r'webhook="(.+?)"', page)
            job = producer.submit(prompt="Hello", model="echo", webhook=url)
            assert job.result(timeout=PATIENCE_S).text == "Hello"
            eventually(lambda: f"job.succeeded {job.id}" in log.read_text(), "the delivery")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        forged = urllib.request.Request(url, data=b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(forged, timeout=PATIENCE_S)
    finally:
        receiver.terminate()
        receiver.wait(PATIENCE_S)
