"""`python -m tests.golden.write`: add to the fixtures what cases.py has and they have not.

What is there is never written again: it is what released versions have left in people's servers.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pagemill.producer.client.preparer import Preparer, item_id, seed_of
from pagemill.producer.wire.calls import submissions
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.signing import Keys
from tests.conftest import RedisServer, server_binary
from tests.golden.cases import JOBS, KEY, QUEUE, RUN, SIGNED_AT_S
from tests.worker.harness import QueueClient, WorkerProcess, eventually, process_settings

DIRECTORY = Path(__file__).parent


def read(name: str) -> dict[str, Any]:
    path = DIRECTORY / f"{name}.json"
    fixtures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return fixtures


def _write(name: str, fixtures: dict[str, Any]) -> None:
    (DIRECTORY / f"{name}.json").write_text(json.dumps(fixtures, indent=1, ensure_ascii=False) + "\n")


def submission_of(name: str) -> dict[str, Any]:
    """All that a producer makes of a job."""
    fields = {"model": "echo"} | JOBS[name]
    job = Job.parse(fields)
    key = job.key
    job_id = item_id("batch", key or name)
    item = submissions.prepare(job, job_id, key=key, seed=seed_of(job_id))
    with patch.object(time, "time", lambda: SIGNED_AT_S):
        signed = Keys([KEY]).sign_payload(item.payload, queue=QUEUE, job_id=job_id, tenant=job.tenant)
    return {
        "id": job_id,
        "header": json.loads(item.header),
        "payload": item.payload.decode(),
        "signed": signed.decode(),
        "digest": job.digest(),
    }


def bulk_submissions() -> dict[str, Any]:
    """The same jobs as items of a batch, each three times: the later ones are filled into a form."""
    rows = {
        name: {"model": "echo", "tenant": "default"} | fields
        for name, fields in JOBS.items()
        if "idempotency_key" not in fields and "key" not in fields
    }
    preparer = Preparer(QUEUE, "default", Keys())
    found: dict[str, Any] = {}
    for by_content in (False, True):
        names = [f"{name} {number} {by_content}" for number in range(3) for name in rows]
        items = preparer.items([*rows.values()] * 3, "batch", on_invalid="raise", by_content=by_content)
        for name, item in zip(names, items, strict=True):
            found[name] = {
                "id": item.job_id,
                "header": json.loads(item.header),
                "payload": item.payload.decode(),
            }
    return found


def signed_entry(entry: str, job_id: str) -> str:
    return Keys([KEY]).sign_entry(entry.encode(), queue=QUEUE, job_id=job_id, fingerprint="weights").decode()


def _run() -> dict[str, Any]:
    """The data that a worker with the packaged model stores for the jobs in RUN."""
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(server_binary("valkey-server"), Path(directory) / "valkey")
        server.start()
        client = QueueClient(server.url, QUEUE)
        ids = client.submit(*({"model": "smollm2"} | fields for fields in RUN.values()))
        settings = process_settings(server.url, QUEUE, model="smollm2", lease_s=30.0, checkpoint_s=0.2)
        worker = WorkerProcess(settings, Path(directory) / "log")
        checkpoints: dict[str, list[str]] = {}

        def all_ended() -> bool:
            for name, job_id in zip(RUN, ids, strict=True):
                entries = [
                    entry.decode() for entry in client.redis.lrange(keys.checkpoint(QUEUE, job_id), 0, -1)
                ]
                if len(entries) >= len(checkpoints.get(name, ())):
                    checkpoints[name] = entries
            return all(client.status(job_id).done for job_id in ids)

        eventually(all_ended, "the ends", 600)
        found = {
            name: {
                "id": job_id,
                "state": client.status(job_id).state,
                "checkpoint": checkpoints[name],
                "signed": [signed_entry(entry, job_id) for entry in checkpoints[name]],
                "outcome": str(client.redis.get(keys.outcome(QUEUE, job_id)), "utf-8"),
            }
            for name, job_id in zip(RUN, ids, strict=True)
        }
        worker.kill()
        client.redis.close()
        server.stop()
    return found


def main() -> None:
    _write("submissions", {name: submission_of(name) for name in JOBS} | read("submissions"))
    _write("items", bulk_submissions() | read("items"))
    known = read("ends")
    if RUN.keys() - known.keys():
        _write("ends", _run() | known)


if __name__ == "__main__":
    main()
