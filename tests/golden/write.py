"""`python -m tests.golden.write`: add to the fixtures what they lack.

Until the tag 0.1.0, delete a fixture to have it written again. After it they are frozen: they are what released
versions have left in people's servers.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pagemill.producer.client.preparer import item_id, seed_of
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
    """A line for each fixture."""
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in fixtures.items())
    (DIRECTORY / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def members() -> dict[str, list[str]]:
    """The members of a job's envelope and of what is in them, with the words that each may be."""
    schema = Job.model_json_schema()
    return {
        name: [word for member, form in part["properties"].items() for word in _words(member, form)]
        for name, part in {"Job": schema, **schema["$defs"]}.items()
    }


def _words(member: str, form: Any) -> Iterator[str]:
    yield member
    for value in _values(form):
        yield f"{member}={value}"


def _values(form: Any) -> Iterator[Any]:
    if isinstance(form, dict):
        yield from form.get("enum", ())
        yield from (form[name] for name in ("const",) if name in form)
        for name in form.keys() - {"enum", "const", "default"}:
            yield from _values(form[name])
    elif isinstance(form, list):
        for part in form:
            yield from _values(part)


def submission_of(name: str) -> dict[str, Any]:
    """All that a producer makes of a job."""
    job = Job.parse({"model": "echo"} | JOBS[name])
    job_id = item_id("batch", job.key or name)
    item = submissions.prepare(job, job_id, seed=seed_of(job_id))
    with patch.object(time, "time", lambda: SIGNED_AT_S):
        signed = Keys([KEY]).sign_payload(item.payload, queue=QUEUE, job_id=job_id, tenant=job.tenant)
    return {"header": json.loads(item.header), "signed": signed.decode(), "digest": job.digest()}


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
                "checkpoint": [signed_entry(entry, job_id) for entry in checkpoints[name]],
                "outcome": str(client.redis.get(keys.outcome(QUEUE, job_id)), "utf-8"),
            }
            for name, job_id in zip(RUN, ids, strict=True)
        }
        worker.kill()
        client.redis.close()
        server.stop()
    return found


def main() -> None:
    _write("members", read("members") or members())
    _write("jobs", {name: submission_of(name) for name in JOBS} | read("jobs"))
    ends = read("ends")
    _write("ends", ends if RUN.keys() <= ends.keys() else _run() | ends)


if __name__ == "__main__":
    main()
