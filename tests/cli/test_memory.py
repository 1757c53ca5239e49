"""The commands' messages about a server whose memory runs out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.producer.driving import Queue
from tests.producer.small_server import flood, small_server


def pagemill(queue: Queue, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagemill", *arguments, "--redis-url", queue.url, "--queue", "q"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_a_full_server(tmp_path: Path) -> None:
    with small_server(tmp_path) as queue:
        flood(queue)
        assert pagemill(queue, "queue", "limit", "--memory-share", "0.7").returncode == 0
        refused = pagemill(queue, "submit", "x" * 30_000, "--model", "m")
        assert refused.returncode == 5, refused.stderr
        assert "near its maxmemory" in refused.stderr
        lines = [line.split("\t") for line in pagemill(queue, "queue", "stats").stdout.splitlines()]
        shown = {line[0]: line[1] for line in lines if len(line) == 2}
        assert "of maxmemory (30 MiB) in use" in shown["memory of Redis"]
        assert shown["is held by"].startswith("about payloads")
        assert shown["see"] == "pagemill queue limit --jobs N --queue q"
        document = json.loads(pagemill(queue, "queue", "stats", "--json").stdout)
        assert document["memory"]["refused"] > 0
        assert document["memory"]["kinds"]["payloads"] > 0.9
        found = json.loads(pagemill(queue, "doctor", "--json").stdout)["findings"]
        (memory,) = (finding for finding in found if finding["check"] == "memory")
        assert memory["level"] == "error"
        assert "about payloads" in memory["message"]
