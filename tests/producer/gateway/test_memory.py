"""A gateway whose server runs out of memory."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from pagemill.producer.wire.calls import limits
from tests.producer.gateway.serving import PATIENCE_S, gateway
from tests.producer.small_server import flood, small_server


@pytest.mark.slow
def test_requests_are_told_to_come_again(tmp_path: Path) -> None:
    with small_server(tmp_path) as queue, gateway(queue.url, "q", models=("m",), timeout_s=0.4) as served:
        flood(queue)
        queue.run(limits.set_limits("q", limits.QueueLimits(memory_share=0.7)))
        body = {"model": "m", "prompt": "x" * 30_000}
        answer = httpx.post(f"{served.base_url}/completions", json=body, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_out_of_memory")
        assert int(answer.headers["retry-after"]) > 0
        files = {"file": ("f.jsonl", b"{}\n" * 3_000_000)}
        upload = httpx.post(
            f"{served.base_url}/files", files=files, data={"purpose": "batch"}, timeout=PATIENCE_S
        )
        assert upload.status_code == 503, upload.text
        queue.client.delete(*queue.client.keys(f"{queue.prefix}in:*"))
        queue.run(limits.set_limits("q", limits.QueueLimits()))
        assert httpx.post(f"{served.base_url}/completions", json=body, timeout=PATIENCE_S).status_code == 504
