"""The longest that each script stops the server, at the largest inputs that the limits allow.

    python -m benchmarks.queues.script_times

Times are the server's own (SLOWLOG), of the script alone. A server of each kind is filled for each case.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.queues.server import kinds, start_server
from benchmarks.report import RESULTS
from pagemill.producer.client.flows import STATUS_CHUNK
from pagemill.producer.client.submit_flow import CHUNK_BYTES, CHUNK_JOBS
from pagemill.producer.wire.calls import batches, dead_letters, outbox, reads, registry, transitions
from pagemill.producer.wire.calls.gateway import stored_files
from pagemill.producer.wire.calls.gateway.stored_files import StoredFile
from pagemill.producer.wire.calls.metering import quotas, usage
from pagemill.producer.wire.calls.metering.quotas import Quota
from pagemill.producer.wire.calls.transitions import MAX_COMMITS
from pagemill.producer.wire.schema.dependencies import MAX_PARENTS
from pagemill.producer.wire.schema.job import MAX_METADATA_BYTES, MAX_PAYLOAD_BYTES
from pagemill.producer.wire.server import scripts
from pagemill.worker.jobs.admission import MAX_JOBS_PER_PULL
from pagemill.worker.jobs.running_job import MAX_RESULT_BYTES
from tests.producer.driving import Queue, delta, open_queue, result_json

LIMIT_MS = 50.0
FOLLOWERS = 256
TENANTS = 20_000
EQUAL = {"dedupe": True, "temperature": 0.0}
HOOK = {"webhook": "https://example.com/hook"}
LARGE = "x" * (MAX_RESULT_BYTES - 4096)

Case = Callable[[Queue], Any]


@dataclass(frozen=True, slots=True)
class Longest:
    server: str
    script: str
    case: str
    milliseconds: float


def ids(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def submit_all(queue: Queue, names: Iterable[str], **fields: Any) -> None:
    rest = list(names)
    while rest:
        queue.submit(*rest[:CHUNK_JOBS], **fields)
        rest = rest[CHUNK_JOBS:]


def groups(queue: Queue, count: int, **fields: Any) -> list[str]:
    """Leaders with as many followers as may be, each of another prompt."""
    for number in range(count):
        prompt = {"prompt": f"p{number}"} | EQUAL
        queue.submit(f"lead{number}", **prompt, **fields)
        queue.submit(*ids(f"f{number}.", FOLLOWERS), **prompt)
    return ids("lead", count)


def commit_large(queue: Queue, count: int) -> None:
    while count > 0:
        jobs = queue.pull(min(count, MAX_JOBS_PER_PULL))
        for job in jobs:
            body = result_json(job.job_id, LARGE)
            queue.run(transitions.commit(queue.name, job.job_id, job.token, "succeeded", body))
        count -= len(jobs)


def checkpointed(queue: Queue, names: list[str], **fields: Any) -> None:
    """Jobs whose checkpoints are as large as a result, handed back."""
    queue.submit(*names, **fields)
    for job in queue.pull(len(names)):
        for offset in range(8):
            queue.checkpoint(job, delta(offset, 1, text=LARGE[: len(LARGE) // 8]))
        queue.release(job)


def lapse(queue: Queue, names: list[str], crashes: int) -> None:
    for job in queue.pull(len(names)):
        queue.checkpoint(job)
        queue.client.hset(f"{queue.prefix}job:{job.job_id}", "crashes", crashes)
        queue.lapse(job.job_id)


def full_submit(queue: Queue) -> None:
    text = "m" * (MAX_METADATA_BYTES - 64)
    queue.submit(*ids("small", CHUNK_JOBS))
    queue.submit(*ids("meta", CHUNK_BYTES // MAX_METADATA_BYTES), metadata={"m": text})
    queue.submit("large", prompt="x" * (MAX_PAYLOAD_BYTES - 1024))
    queue.submit(*ids("equal", CHUNK_JOBS), batch_id="b", **EQUAL)


def pull_payloads(queue: Queue) -> None:
    queue.submit(*ids("large", 8), prompt="x" * (MAX_PAYLOAD_BYTES - 1024))
    queue.pull(MAX_JOBS_PER_PULL)


def pull_small(queue: Queue) -> None:
    submit_all(queue, ids("j", 1000))
    queue.pull(MAX_JOBS_PER_PULL)


def pull_past_idle_tenants(queue: Queue) -> None:
    turns = {f"t{number}": number for number in range(TENANTS)}
    queue.client.zadd(f"{queue.prefix}turns:1:1:m", turns)
    queue.submit("one", tenant="last")
    while not queue.pull(1):
        pass


def pull_through_an_index(queue: Queue) -> None:
    """A worker wants a prefix that a whole lane lacks, but for stale entries of its index."""
    wanted, lane = "abc", "1:1:default:m"
    queue.client.hset(f"{queue.prefix}puller:w1", lane, wanted)
    queue.client.zadd(f"{queue.prefix}alike:{lane}", {f"{wanted} {rank:016d}": 0 for rank in range(400)})
    for number in range(40):
        submit_all(queue, ids(f"j{number}", 500), prompt=f"{number} " * 200)
    for _ in range(30):
        queue.client.hset(f"{queue.prefix}puller:w1", lane, wanted)
        queue.pull(MAX_JOBS_PER_PULL)


def pull_a_checkpoint(queue: Queue) -> None:
    checkpointed(queue, ["a"])
    queue.pull()
    queue.run(reads.feed(queue.name, "a", 0, 0))


def crash_leaders(queue: Queue) -> None:
    leaders = groups(queue, 16)
    lapse(queue, leaders, 4)
    while queue.client.zcard(f"{queue.prefix}leases") or queue.client.zcard(f"{queue.prefix}settling"):
        queue.run(transitions.sweep(queue.name))


def expire_leaders(queue: Queue) -> None:
    leaders = groups(queue, 64, ttl=3600.0)
    for leader in leaders:
        queue.client.hset(f"{queue.prefix}job:{leader}", "deadline", 1)
    queue.client.zadd(f"{queue.prefix}deadlines", dict.fromkeys(leaders, 1))
    while queue.client.zcard(f"{queue.prefix}deadlines"):
        queue.run(transitions.sweep(queue.name))


def purge_batches(queue: Queue) -> None:
    submit_all(queue, ids("j", 1000), batch_id="b", delay=3600.0)
    for start in range(0, 1000, 250):
        queue.run(batches.cancel(queue.name, "b", start))
    queue.client.zadd(f"{queue.prefix}bexpiry", {"b": 1})
    for _ in range(17):
        queue.run(transitions.sweep(queue.name))


def commit_shared(queue: Queue) -> None:
    groups(queue, 1, batch_id="b")
    commit_large(queue, 1)
    for _ in range(3):
        queue.run(transitions.sweep(queue.name))
    queue.run(reads.outcome(queue.name, "f0.1"))


def commit_together(queue: Queue) -> None:
    """Leaders that were cancelled, whose followers move up, and then plain jobs, as many as one call takes."""
    groups(queue, MAX_COMMITS)
    submit_all(queue, ids("j", MAX_COMMITS), batch_id="b")
    for _ in range(2):
        held = queue.pull(MAX_COMMITS)
        for job in held:
            if job.job_id.startswith("lead"):
                queue.cancel(job.job_id)
        bodies = ((job, result_json(job.job_id, "x" * 30_000)) for job in held)
        calls = [
            transitions.commit(queue.name, job.job_id, job.token, "succeeded", body) for job, body in bodies
        ]
        for call, _ in transitions.joined(calls):
            queue.run(call)


def read_batches(queue: Queue) -> None:
    submit_all(queue, ids("j", CHUNK_JOBS), batch_id="small")
    while jobs := queue.pull(MAX_JOBS_PER_PULL):
        for job in jobs:
            queue.commit(job, "x" * 4096)
    queue.submit(*ids("l", 4), batch_id="large")
    commit_large(queue, 4)
    for name in ("small", "large"):
        for ordered in (False, True):
            queue.run(batches.page(queue.name, name, 0, ordered=ordered))
        queue.run(batches.ack(queue.name, name, "e250", 0))
        queue.run(batches.ack(queue.name, name, "s250", 0))


def cancel_leaders(queue: Queue) -> None:
    leaders = groups(queue, 64, batch_id="b")
    position = 0
    while position < len(leaders):
        position += queue.run(batches.cancel(queue.name, "b", position))[1]


def bury(queue: Queue) -> None:
    queue.submit(*ids("d", CHUNK_JOBS), max_attempts=1, metadata={"m": "m" * 4000})
    names = ids("d", CHUNK_JOBS)
    while jobs := queue.pull(MAX_JOBS_PER_PULL):
        for job in jobs:
            queue.retry(job)
    queue.run(dead_letters.page(queue.name, 0))
    checkpointed(queue, ["x"], max_attempts=1)
    queue.retry(queue.pull_one())
    queue.run(dead_letters.open_letters(queue.name, ["x"]))
    queue.run(dead_letters.purge(queue.name, names))


def tell(queue: Queue) -> None:
    queue.submit(*ids("h", 8), **HOOK)
    commit_large(queue, 8)
    while queue.run(outbox.claim(queue.name, 8, 60_000)):
        pass


def look(queue: Queue) -> None:
    names = ids("j", STATUS_CHUNK)
    text = "m" * (MAX_METADATA_BYTES - 64)
    for start in range(0, STATUS_CHUNK, 50):
        queue.submit(*names[start : start + 50], metadata={"m": text})
    queue.run(reads.statuses(queue.name, names))
    queue.run(reads.ends(queue.name, names))
    queue.run(transitions.cancel(queue.name, names))


def look_at_many_lanes(queue: Queue) -> None:
    for number in range(TENANTS):
        queue.submit(f"j{number}", tenant=f"t{number}")
    registry.stats(queue.run, queue.name)
    queue.run(registry.set_paused(queue.name, True))
    queue.run(registry.set_paused(queue.name, False))


def crowd(queue: Queue) -> None:
    for number in range(1000):
        queue.run(registry.heartbeat(queue.name, registry.WorkerInfo(id=f"w{number}", models=("m",))))
    queue.run(registry.workers(queue.name))
    queue.submit(*ids("j", CHUNK_JOBS))
    held = [
        (job.job_id, job.token)
        for job in (*queue.pull(64), *queue.pull(64), *queue.pull(64), *queue.pull(64))
    ]
    queue.run(transitions.renew(queue.name, "w1", held))


def store_files(queue: Queue) -> None:
    for number in range(1000):
        file = StoredFile(f"file-{number}", 0.0, 1, 0, "f", "batch", 0)
        queue.run(stored_files.begin(queue.name, "t", file, max_files=1000, max_bytes=1 << 30))
        queue.run(stored_files.finish(queue.name, "t", file.id, 3600.0))
    queue.run(stored_files.find_all(queue.name, "t"))
    large = StoredFile("large", 0.0, 100 << 20, 400, "f", "batch", 0)
    queue.run(stored_files.begin(queue.name, "u", large, max_files=9, max_bytes=1 << 30))
    for number in range(large.chunks):
        queue.run(stored_files.write(queue.name, "u", large.id, number, b"x"))
    queue.run(stored_files.finish(queue.name, "u", large.id, 3600.0))
    queue.run(stored_files.read(queue.name, large.id, 0))


def release(queue: Queue) -> None:
    """Jobs that wait for as many as may be and read all of them, large ones, and a chain that is cancelled."""
    parents = ids("p", MAX_PARENTS)
    queue.submit(*parents)
    submit_all(queue, ids("c", 500), after=parents, prompt="{parent1.text}", batch_id="b")
    for job in queue.pull(MAX_PARENTS):
        queue.commit(job, "x" * 15_000)
    queue.submit("large")
    submit_all(queue, ids("l", 4), after=["large"], prompt="x" * (MAX_PAYLOAD_BYTES - 1024) + "{parent.text}")
    (job,) = (job for job in queue.pull(2000) if job.job_id == "large")
    queue.commit(job, "x" * 250_000)
    queue.submit("begin")
    for number, before in enumerate(["begin", *ids("n", 200)]):
        queue.submit(f"n{number}", after=[before])
    queue.cancel("begin")
    for _ in range(100):
        queue.run(transitions.sweep(queue.name))


def meter_and_erase(queue: Queue) -> None:
    """As many rows as a ledger may have, a third of them of one tenant."""
    today = queue.client.time()[0] // 86_400
    for number in range(today - 24, today):
        rows = {f"{'acme' if n % 3 == 0 else n}:model-{n} key": "1 1 1 1 1" for n in range(4096)}
        queue.client.hset(f"{queue.prefix}usage:{number}", mapping=rows)
        queue.client.zadd(f"{queue.prefix}usage", {str(number): number})
    queue.submit(*ids("j", 200))
    for job in queue.pull(200):
        queue.commit(job)
    queue.run(usage.rows(queue.name, queue.run(usage.days(queue.name))[0]))
    queue.run(usage.totals(queue.name))
    for day in queue.run(usage.days(queue.name)):
        queue.run(usage.erase(queue.name, "acme", day))


def hold_to_quotas(queue: Queue) -> None:
    """Many tenants over their quotas in three lanes each, which all come back together."""
    everybody = TENANTS // 10
    queue.run(quotas.set_quotas(queue.name, {quotas.EVERYBODY: Quota(jobs_per_day=1)}))
    for number in range(everybody):
        for priority in ("high", "normal", "low"):
            queue.submit(
                f"{priority}{number}", f"{priority}{number}.", tenant=f"t{number}", priority=priority
            )
    for _ in range(6 * everybody // MAX_JOBS_PER_PULL):
        queue.pull(MAX_JOBS_PER_PULL)
    own = {f"t{number}": Quota(jobs_per_day=2) for number in range(500)}
    queue.run(quotas.set_quotas(queue.name, own))
    queue.run(quotas.set_quotas(queue.name, dict.fromkeys((*own, quotas.EVERYBODY), Quota())))
    while queue.client.zcard(f"{queue.prefix}parked"):
        queue.run(transitions.sweep(queue.name))
        queue.pull(MAX_JOBS_PER_PULL)


CASES: tuple[Case, ...] = (
    full_submit, pull_payloads, pull_small, pull_past_idle_tenants, pull_through_an_index, pull_a_checkpoint,
    crash_leaders, expire_leaders, purge_batches, commit_shared, commit_together, read_batches, cancel_leaders, bury,
    tell, look, look_at_many_lanes, crowd, store_files, release, meter_and_erase, hold_to_quotas,
)  # fmt: skip


def measure(server: str, url: str) -> Iterator[Longest]:
    """Each script's longest run in each case."""
    names = {scripts.sha1(name).encode(): name for name in scripts.names()}
    for case in CASES:
        queue = open_queue(url, "bench")
        queue.client.flushall()
        queue.client.config_set("slowlog-log-slower-than", 1000)
        queue.client.config_set("slowlog-max-len", 10_000)
        queue.client.slowlog_reset()
        case(queue)
        longest: dict[str, float] = {}
        for entry in queue.client.slowlog_get(10_000):
            command, _, rest = entry["command"].partition(b" ")
            if command.upper() == b"EVALSHA":
                name = names[rest.partition(b" ")[0]]
                longest[name] = max(longest.get(name, 0.0), entry["duration"] / 1000)
        for name, milliseconds in longest.items():
            yield Longest(server, name, case.__name__, milliseconds)
        queue.transport.close()


def show(rows: list[Longest]) -> None:
    """The longest run of each script on each server."""
    table = Table("script", "case", "server", "ms", title=f"Longest runs; the limit is {LIMIT_MS:.0f} ms")
    seen: set[tuple[str, str]] = set()
    for row in sorted(rows, key=lambda row: -row.milliseconds):
        if (row.script, row.server) not in seen:
            seen.add((row.script, row.server))
            table.add_row(row.script, row.case.replace("_", " "), row.server, f"{row.milliseconds:.1f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="write the figures to benchmarks/results, too")
    arguments = parser.parse_args()
    rows: list[Longest] = []
    with tempfile.TemporaryDirectory() as directory:
        for kind in kinds():
            with start_server(kind, Path(directory)) as url:
                rows += measure(kind, url)
    show(rows)
    if arguments.json:
        figures = {"machine": machine.describe(), "longest": [asdict(row) for row in rows]}
        path = RESULTS / f"script-times-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
