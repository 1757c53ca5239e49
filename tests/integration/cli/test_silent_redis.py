"""A server that accepts connections and does not reply: commands report the reason for their wait."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.integration.cli.test_run import environment
from tests.topologies import RedisServer
from tests.worker.harness import PATIENCE_S


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("queue", "pause"), ("submit", "hello", "--model", "echo"), ("queue", "stats")], ids=" ".join
)
def test_a_command_says_that_it_waits(
    own_valkey: RedisServer, queue_name: str, command: tuple[str, ...]
) -> None:
    assert own_valkey.process is not None
    own_valkey.process.send_signal(signal.SIGSTOP)
    process = subprocess.Popen(
        [sys.executable, "-m", "pagemill", *command],
        env=environment(own_valkey.url, queue_name),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "waiting for Redis" in process.stderr.readline()
    finally:
        own_valkey.process.send_signal(signal.SIGCONT)
        output = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
