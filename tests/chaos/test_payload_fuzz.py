"""Random bytes in the queue: each job fails alone, or runs; the worker survives, every other job finishes."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.common.error_codes import FINAL_CODES
from pagemill.producer.wire.calls import reads, submissions
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import END_STATES
from pagemill.worker.worker import Worker
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow


CHUNK = 200

# JSON of every shape, numbers outside every float's range, and text with every kind of character.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\ud800", "\x00", "1e999", "NaN", "a" * 5000, "echo", "\u202e"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
FIELDS = st.dictionaries(st.sampled_from([*sorted(Job.model_fields), "v", "mac", "x"]), VALUES, max_size=6)
PAYLOADS = (
    st.binary(max_size=300)
    | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | VALUES.map(lambda value: json.dumps(value).encode())
    | FIELDS.map(lambda fields: json.dumps({"v": 1, "prompt": "p", "model": "echo"} | fields).encode())
)
GOOD = Job.parse({"prompt": "good", "model": "echo", "max_tokens": 4}).to_payload()


@pytest.fixture(scope="module")
def worker(valkey_url: str) -> Iterator[Worker]:
    with running_worker(worker_config(valkey_url, "fuzz")) as worker:
        yield worker


@pytest.fixture
def client(valkey_url: str) -> Iterator[QueueClient]:
    with QueueClient(valkey_url, "fuzz") as client:
        yield client


def run(client: QueueClient, worker: Worker, payloads: list[bytes]) -> Counter[str]:
    """Submit payloads with a good job after every tenth, wait for all; returns the outcomes of the payloads."""
    given = [
        item for i, payload in enumerate(payloads) for item in ([payload, GOOD] if i % 10 == 9 else [payload])
    ]
    lane = keys.lane("1", "normal", "default", "echo")
    items = []
    for payload in given:
        job_id = random.randbytes(12).hex()
        items.append(
            Submission(job_id, json.dumps({"id": job_id, "lane": lane, "cost": 1}).encode(), payload)
        )
    client.run(submissions.submit(client.queue, items))
    ids = [item.job_id for item in items]
    eventually(lambda: all(client.run(reads.ends(client.queue, ids))), "all jobs to end")
    ends: Counter[str] = Counter()
    for payload, job_id in zip(given, ids, strict=True):
        outcome = client.outcome(job_id)
        assert outcome.state in END_STATES
        if payload is GOOD:
            assert outcome.value().text == "good"  # type: ignore[union-attr]
        elif outcome.state == "failed":
            assert outcome.error is not None
            assert outcome.error.code in FINAL_CODES
        ends[str(outcome.state)] += 1
    client.redis.unlink(
        *(f"{keys.prefix(client.queue)}{kind}:{i}" for i in ids for kind in ("job", "in", "out", "ckpt"))
    )
    assert worker.failure() is None
    assert worker.counters.leases_lost.read() == 0
    return ends


@pytest.mark.parametrize(
    "examples", [40, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_shapes_that_hypothesis_thinks_of(examples: int, client: QueueClient, worker: Worker) -> None:
    @settings(
        max_examples=examples, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )  # fmt: skip
    @given(st.lists(PAYLOADS, min_size=1, max_size=20))
    def check(payloads: list[bytes]) -> None:
        run(client, worker, payloads)

    check()


def mutated(rng: random.Random) -> bytes:
    """Random bytes, or a real envelope with a few of its bytes changed, cut or doubled."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.randrange(200))
    fields: dict[str, Any] = {
        "prompt": "text " * rng.randrange(1, 20), "temperature": 0.5, "n": 2, "stop": ["x"], "logit_bias": {"5": 1.0},
        "structured_outputs": {"choice": ["a", "b"]}, "metadata": {"k": [1, {"z": None}]}, "logprobs": 2, "seed": 3,
        "prompt_logprobs": 1, "bad_words": ["w"], "max_tokens": 8, "min_p": 0.1, "tenant": "t", "priority": "high",
    }  # fmt: skip
    chosen = dict(rng.sample(sorted(fields.items()), rng.randrange(len(fields))))
    payload = bytearray(json.dumps({"v": 1, "model": "echo", "prompt": "p"} | chosen).encode())
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(payload))
        match rng.randrange(4):
            case 0:
                payload[place] = rng.randrange(256)
            case 1:
                del payload[place : place + rng.randrange(1, 20)]
            case 2:
                payload[place:place] = payload[place : place + 30] or b"x"
            case 3:
                payload[place:place] = rng.choice(
                    [b"1e400", b"NaN", b'"', b"[" * 200, b"\xff", b"-", b"\\ud800"]
                )
        payload = payload or bytearray(b"{")
    return bytes(payload)


@pytest.mark.parametrize(
    "payloads", [2_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_bytes_at_random(payloads: int, client: QueueClient, worker: Worker) -> None:
    rng = random.Random(payloads)
    ends: Counter[str] = Counter()
    for start in range(0, payloads, CHUNK):
        ends += run(client, worker, [mutated(rng) for _ in range(min(CHUNK, payloads - start))])
    assert ends["failed"] > payloads / 4
    assert ends["succeeded"] > payloads / 10


@given(st.binary(max_size=400) | VALUES.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=200, deadline=None)
def test_an_envelope_is_refused_by_name_and_never_quoted(payload: bytes) -> None:
    marker = b"SECRETSECRET"
    text = payload.replace(b'"', b'"' + marker, 2)
    reason = ""
    try:
        Job.from_payload(text)
    except InvalidJob as error:
        reason = str(error)
    assert "SECRETSECRET" not in reason


CHECKPOINTS = st.lists(
    st.binary(max_size=80)
    | st.fixed_dictionaries(
        {},
        optional={
            "index": st.integers(-1, 3), "offset": st.integers(-1, 5), "text": st.text(max_size=5),
            "token_ids": st.lists(st.integers(-5, 2**33), max_size=4), "finish_reason": st.sampled_from(["stop", "x"]),
            "logprobs": VALUES,
        },
    ).map(lambda delta: json.dumps(delta).encode()),
    min_size=1,
    max_size=4,
)  # fmt: skip


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(entries=CHECKPOINTS)
def test_a_checkpoint_that_is_none_starts_its_job_over(
    client: QueueClient, worker: Worker, entries: list[bytes]
) -> None:
    """A checkpoint is untrusted input: the job runs from its prompt, and the others are not affected."""
    fingerprint = worker.engine.engine.fingerprint
    client.pause()
    eventually(lambda: worker.admission.blocked == "paused", "the worker to pause")
    broken, other = client.submit(
        {"prompt": "start over", "max_tokens": 10}, {"prompt": "other", "max_tokens": 5}
    )
    prefix = keys.prefix(client.queue)
    client.redis.hset(f"{prefix}job:{broken}", mapping={"fingerprint": fingerprint})
    client.redis.rpush(f"{prefix}ckpt:{broken}", *entries)
    client.pause(False)
    outcomes = client.wait([broken, other])
    assert outcomes[1].value().text == "other"  # type: ignore[union-attr]
    assert outcomes[0].state in END_STATES
    assert worker.failure() is None
