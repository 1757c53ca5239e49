"""`python -m tests.worker.screenshots`: takes docs/live-page-*.png of a busy worker, and docs/jobs-page-light.png.

It starts a server, a gateway, a worker with the echo model, and enough jobs for two minutes.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import ROOT, RedisServer, server_binary
from tests.producer.gateway.serving import gateway
from tests.worker.browser import PHONE, open_browser
from tests.worker.harness import QueueClient, running_worker, worker_config

DOCS = ROOT / "docs"
WARM_UP_S = 75.0
INSTRUCTIONS = (
    "You label product reviews. Read the review, weigh what the buyer says about quality, price and delivery, "
    "and answer with one word: positive, negative or mixed. Do not explain. Review: "
)


def submit_jobs(client: QueueClient) -> None:
    draw = random.Random(7)
    for _ in range(40):
        for _ in range(10):
            review = "".join(draw.choices("abcdefghij ", k=draw.randint(20, 400)))
            fields = {"prompt": INSTRUCTIONS + review, "max_tokens": draw.randint(40, 400)}
            client.submit(fields | {"priority": draw.choice(("high", "normal", "normal", "low"))})
        client.submit({"prompt": INSTRUCTIONS, "max_tokens": 60, "n": 3, "temperature": 0.8})
        if draw.random() < 0.2:
            client.submit({"prompt": "word " * 2000})


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(server_binary("valkey-server"), Path(directory) / "valkey")
        server.start()
        client = QueueClient(server.url, "reviews")
        config = worker_config(server.url, "reviews", model="echo:25", num_kv_blocks=640, max_num_seqs=24)
        with (
            gateway(server.url, "reviews", public_url="http://127.0.0.1:8000") as served,
            running_worker(config) as worker,
            open_browser() as browser,
        ):
            submit_jobs(client)
            browser.view((1360, 1000))
            browser.open(str(worker.http_url))
            time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else WARM_UP_S)
            for name, size, dark in (("light", (1360, 1000), False), ("dark", (1360, 1000), True),
                                     ("phone", PHONE, False)):  # fmt: skip
                browser.view(size, dark=dark, scale=2.0 if size == PHONE else 1.0)
                time.sleep(2.5)
                browser.screenshot(DOCS / f"live-page-{name}.png")
            browser.open(f"{served.url}/jobs")
            browser.view((1360, 1000))
            time.sleep(2.5)
            browser.screenshot(DOCS / "jobs-page-light.png")
        client.redis.close()
        server.stop()


if __name__ == "__main__":
    main()
