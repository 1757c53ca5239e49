"""Jobs of the packaged model run again: on another worker, on a different kind of worker, from modified records."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pagemill import AsyncProducer, Producer, Unverifiable, Verification
from pagemill.__main__ import app
from pagemill.producer.client.replay.comparison import Difference
from pagemill.producer.wire.schema import keys
from pagemill.worker.config import WorkerConfig
from tests.chaos.fork_server import ForkServer
from tests.integration.replay.conftest import LOADING_S, announced_worker
from tests.worker.harness import QueueClient, eventually, process_settings, running_worker

QUEUE = "replays"
STORY = "Once upon a time there was a small robot who"
CHAT = [{"role": "user", "content": "Say hello."}]
TOOL = {"type": "function", "function": {"name": "greet", "parameters": {"type": "object", "properties": {}}}}
JOBS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": STORY, "temperature": 0.0, "max_tokens": 48},
    "unseeded": {"prompt": STORY, "max_tokens": 24},
    "seeded": {"prompt": STORY, "max_tokens": 24, "seed": 7, "logprobs": 2, "prompt_logprobs": 1},
    "several": {"prompt": STORY, "n": 3, "max_tokens": 12, "logprobs": 0},
    "labels": {"prompt": "The film was", "structured_outputs": {"choice": [" good", " bad"]}, "label_probs": "product"},
    "json": {
        "messages": CHAT,
        "max_tokens": 24,
        "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
    "tools": {"messages": CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
    "score": {"task": "score", "prompt": STORY, "continuations": [" lived", " ran"], "logprobs": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """Jobs that ran once, on a worker that no longer exists."""

    producer: Producer
    client: QueueClient
    ids: dict[str, str]
    batch: str
    config: Callable[..., WorkerConfig]

    def record(self, name: str) -> dict[str, Any]:
        stored = self.client.redis.get(keys.outcome(QUEUE, self.ids[name]))
        assert stored is not None
        record: dict[str, Any] = json.loads(stored)
        return record


@pytest.fixture(scope="module")
def ran(valkey_url: str, smollm2: Any) -> Iterator[Ran]:
    with (
        QueueClient(valkey_url, QUEUE) as client,
        Producer(valkey_url, queue=QUEUE, model="smollm2") as producer,
    ):
        with running_worker(smollm2(QUEUE, batch_invariant=True), load_patience_s=LOADING_S):
            handles = {name: producer.submit(fields, keep_input=True) for name, fields in JOBS.items()}
            after = {"story": handles["greedy"]}
            fields = {"prompt": "{story.text} And then", "temperature": 0.0, "max_tokens": 12}
            handles["dependent"] = producer.submit(fields, after=after, keep_input=True)
            rows = [{"prompt": f"Row {row}:", "max_tokens": 4, "keep_input": row != 3} for row in range(6)]
            rows.append({"prompt": "too long", "max_tokens": 4, "prompt_logprobs": 1, "stop": "x" * 100_000})
            batch = producer.submit_many(rows)
            for handle in handles.values():
                handle.result(timeout=300)
            batch.wait(timeout=300)
        yield Ran(producer, client, {name: handle.id for name, handle in handles.items()}, batch.id, smollm2)


@pytest.fixture(scope="module")
def again(ran: Ran) -> Iterator[Ran]:
    """Another worker of the same kind, which runs other jobs concurrently."""
    with announced_worker(ran.config(QUEUE, batch_invariant=True), ran.client):
        yield ran


@pytest.mark.slow
@pytest.mark.parametrize("name", [*JOBS, "dependent"])
def test_another_worker_gives_the_same_to_the_bit(again: Ran, name: str) -> None:
    beside = [again.producer.submit(prompt=f"Beside {row}", max_tokens=16) for row in range(3)]
    found = again.producer.verify(again.ids[name], timeout=300)
    assert (found.exactness, found.promise, found.honoured) == ("bitwise", "bitwise", True), found
    assert found.is_reproduced
    assert found.comparison is not None
    assert found.comparison.difference is None
    assert found.copies == 1
    wants_numbers = {
        "seeded": "logprobs", "several": "logprobs", "labels": "label_probs", "score": "logprobs",
    }  # fmt: skip
    if name in wants_numbers:
        assert wants_numbers[name] in found.comparison.compared
    copy = again.client.status(found.replayed_as or "")
    assert (copy.priority, copy.metadata) == ("low", {"verifies": again.ids[name]})
    for handle in beside:
        handle.result(timeout=300)


@pytest.mark.slow
def test_an_unseeded_job_is_replayed_with_the_seed_that_its_result_records(again: Ran) -> None:
    found = again.producer.verify(again.ids["unseeded"], timeout=300)
    copied = again.producer.job(found.replayed_as or "").result()
    assert found.seed == again.record("unseeded")["seed"] == copied.seed
    assert copied.token_ids == tuple(again.record("unseeded")["outputs"][0]["token_ids"])


def difference_of(found: Verification) -> Difference:
    assert found.comparison is not None
    assert found.comparison.difference is not None
    return found.comparison.difference


def changed(again: Ran, name: str, change: Callable[[dict[str, Any]], None]) -> Verification:
    """Verify a job whose stored result was modified."""
    key = keys.outcome(QUEUE, again.ids[name])
    before = again.client.redis.get(key)
    assert before is not None
    record = json.loads(before)
    change(record)
    again.client.redis.set(key, json.dumps(record))
    try:
        return again.producer.verify(again.ids[name], timeout=300)
    finally:
        again.client.redis.set(key, before)


@pytest.mark.slow
def test_a_changed_token_is_found_with_both_log_probabilities(again: Ran) -> None:
    def change(record: dict[str, Any]) -> None:
        record["outputs"][0]["token_ids"][5] = 42

    found = changed(again, "greedy", change)
    assert (found.exactness, found.honoured, found.is_reproduced) == ("neither", False, False)
    difference = difference_of(found)
    replayed = again.record("greedy")["outputs"][0]["token_ids"][5]
    assert (difference.what, difference.position) == ("token", 5)
    assert (difference.stored, difference.replayed) == (42, replayed)
    # Not recorded, so scored by the worker: a greedy job takes the more likely one.
    assert difference.stored_logprob is not None
    assert difference.replayed_logprob is not None
    assert difference.stored_logprob < difference.replayed_logprob <= 0.0
    assert difference.gap == pytest.approx(difference.replayed_logprob - difference.stored_logprob)


@pytest.mark.slow
def test_a_token_too_few_is_found(again: Ran) -> None:
    def change(record: dict[str, Any]) -> None:
        del record["outputs"][1]["token_ids"][-1]

    found = changed(again, "several", change)
    difference = difference_of(found)
    assert found.exactness == "neither"
    assert (difference.output, difference.position, difference.stored) == (1, 11, None)


@pytest.mark.slow
def test_a_changed_bit_of_a_log_probability_is_found(again: Ran) -> None:
    def change(record: dict[str, Any]) -> None:
        record["outputs"][0]["logprobs"][3]["top"][1]["logprob"] += 2.0**-20

    found = changed(again, "seeded", change)
    assert (found.exactness, found.promise, found.honoured) == ("token", "bitwise", False)
    difference = difference_of(found)
    assert (difference.what, difference.position) == ("logprob", 3)
    assert found.comparison is not None
    assert found.comparison.max_logprob_difference == pytest.approx(2.0**-20)


@pytest.mark.slow
def test_a_changed_text_and_a_damaged_record_are_found(again: Ran) -> None:
    def change(record: dict[str, Any]) -> None:
        record["outputs"][0]["text"] = record["outputs"][0]["text"][:4] + "!!"

    found = changed(again, "greedy", change)
    assert (found.exactness, difference_of(found).what) == ("neither", "text")
    assert difference_of(found).position == 4
    assert "!!" not in found.model_dump_json()
    with pytest.raises(Unverifiable, match="is damaged"):
        changed(again, "greedy", lambda record: record.pop("outputs"))


def test_a_changed_label_probability_is_found(again: Ran) -> None:
    def change(record: dict[str, Any]) -> None:
        record["outputs"][0]["label_probs"][" bad"] += 1e-9

    found = changed(again, "labels", change)
    assert (found.exactness, difference_of(found).what) == ("token", "label_prob")


@pytest.mark.slow
async def test_asyncio_has_it_too(again: Ran, valkey_url: str) -> None:
    async with AsyncProducer(valkey_url, queue=QUEUE) as producer:
        found = await producer.verify(again.ids["seeded"], timeout=300, priority="high")
        assert found.exactness == "bitwise"
        several = [one async for one in producer.verify_batch(again.batch, sample=3, timeout=300)]
    assert len(several) == 3
    assert again.client.status(found.replayed_as or "").priority == "high"


def test_a_sample_of_a_batch(again: Ran) -> None:
    found = list(again.producer.verify_batch(again.batch, sample=100, timeout=300))
    assert [one.exactness for one in found] == ["bitwise"] * 3 + [None] + ["bitwise"] * 2 + [None]
    assert "keep_input" in (found[3].reason or "")
    assert "failed" in (found[6].reason or "")
    assert len(list(again.producer.verify_batch(again.batch, sample=2, timeout=300))) == 2


def command(url: str, *words: str) -> Any:
    return CliRunner().invoke(app, ["verify", *words, "--queue", QUEUE, "--redis-url", url])


@pytest.mark.slow
def test_the_command_says_it_in_words_json_and_exit_codes(again: Ran, valkey_url: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "pagemill", "verify", again.ids["seeded"], "--queue", QUEUE, "--redis-url", valkey_url],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = dict(line.split("\t") for line in shown.stdout.splitlines())
    assert shown.returncode == 0, shown.stderr
    assert (lines["result"], lines["promised"]) == ("bitwise", "bitwise: honoured")
    assert lines["compared"] == "tokens, text, logprobs, prompt_logprobs"
    document = json.loads(command(valkey_url, again.ids["labels"], "--json").stdout)
    assert (document["exactness"], document["is_reproduced"]) == ("bitwise", True)

    key = keys.outcome(QUEUE, again.ids["greedy"])
    before = again.client.redis.get(key)
    record = again.record("greedy")
    record["outputs"][0]["token_ids"][9] = 11
    again.client.redis.set(key, json.dumps(record))
    broken = command(valkey_url, again.ids["greedy"])
    again.client.redis.set(key, before or b"")
    assert broken.exit_code == 1, broken.stderr
    assert "token of output 0 at 9; 11, replayed" in broken.stdout

    unknown = command(valkey_url, "nobody")
    assert (unknown.exit_code, unknown.stdout) == (4, "")
    assert "no job nobody" in unknown.stderr
    assert command(valkey_url).exit_code == 2
    batch = command(valkey_url, "--batch", again.batch, "--sample", "7")
    assert batch.exit_code == 4
    assert batch.stderr.strip().endswith("5 bitwise, 2 no verdict")
    assert [line.split("\t")[1] for line in batch.stdout.splitlines()] == ["no verdict"] * 2


@pytest.fixture
def paused(again: Ran) -> Iterator[Ran]:
    again.client.pause()
    yield again
    again.client.pause(paused=False)


def test_what_ended_otherwise_has_no_verdict(paused: Ran) -> None:
    producer = paused.producer
    cancelled, waiting = (producer.submit(prompt="a", max_tokens=4, keep_input=True) for _ in range(2))
    cancelled.cancel()
    expired = producer.submit(prompt="a", max_tokens=4, keep_input=True, deadline=1.0)
    for handle, message in ((cancelled, "cancelled"), (expired, "expired"), (waiting, "is queued")):
        with pytest.raises(Unverifiable, match=message):
            producer.verify(handle.id)
    with pytest.raises(TimeoutError, match="is cancelled"):
        producer.verify(paused.ids["greedy"], timeout=0.2)
    with pytest.raises(Unverifiable, match="never submitted"):
        producer.verify("nobody")


@pytest.mark.slow
def test_a_changed_input_fails_its_signature(again: Ran, valkey_url: str) -> None:
    key = "k" * 32
    job_id = again.ids["greedy"]
    with Producer(valkey_url, queue=QUEUE, hmac_key=key) as signing:
        with pytest.raises(Unverifiable, match="not signed"):
            signing.verify(job_id)
        handle = signing.submit(JOBS["greedy"], keep_input=True, model="smollm2")
        handle.result(timeout=300)
        assert signing.verify(handle.id, timeout=300).exactness == "bitwise"
        name = keys.payload(QUEUE, handle.id)
        stored = again.client.redis.get(name) or b""
        again.client.redis.set(name, stored.replace(b"robot", b"rabbi"))
        with pytest.raises(Unverifiable, match="signature"):
            signing.verify(handle.id)


@pytest.mark.slow
def test_without_a_worker_of_its_kind_the_live_ones_are_named(
    ran: Ran, valkey_url: str, smollm2: Any
) -> None:
    """Only an int8 worker computes different results: no verdict, or with `any_worker` one without a guarantee."""
    name = "replays-int8"
    client = QueueClient(valkey_url, name)
    with Producer(valkey_url, queue=name, model="smollm2") as producer:
        with announced_worker(smollm2(name), client):
            handle = producer.submit(JOBS["greedy"] | {"max_tokens": 160}, keep_input=True)
            stored = handle.result(timeout=300)
        with pytest.raises(Unverifiable, match="no live worker serves smollm2"):
            producer.verify(handle.id)
        with announced_worker(smollm2(name, quantization="int8"), client) as live:
            with pytest.raises(Unverifiable, match="no live worker of smollm2 computes") as refused:
                producer.verify(handle.id)
            assert stored.fingerprint in str(refused.value)
            assert live in str(refused.value)
            found = producer.verify(handle.id, any_worker=True, timeout=300)
            assert (found.promise, found.honoured) == ("nothing", None)
            assert found.fingerprint != found.replayed_fingerprint == live
            difference = difference_of(found)
            assert found.exactness == "neither", "160 greedy tokens of this model part under int8"
            assert not found.is_reproduced
            assert difference.position is not None
            assert stored.token_ids[difference.position] == difference.stored != difference.replayed
            assert None not in (difference.stored_logprob, difference.replayed_logprob, difference.gap)
            with announced_worker(smollm2(name), client):
                # Both serve the model: copies run until one runs where the original did.
                found = producer.verify(handle.id, timeout=300)
            assert (found.exactness, found.promise, found.honoured) == ("bitwise", "token", True)
    client.redis.close()


@pytest.mark.slow
def test_a_job_that_survived_a_killed_worker_is_reproduced_to_the_bit(
    valkey_url: str, tmp_path: Path
) -> None:
    """Part of the stored result was resumed from a checkpoint; the copy runs without a break."""
    client = QueueClient(valkey_url, "replays-killed")
    settings = process_settings(
        valkey_url, client.queue, model="smollm2", kv_cache_memory_bytes=128 << 20, num_threads=1,
        batch_invariant=True, checkpoint_tokens=8, lease_s=6.0,
    )  # fmt: skip
    with ForkServer(tmp_path, settings) as fork_server, Producer(valkey_url, queue=client.queue) as producer:
        worker = fork_server.spawn()
        handle = producer.submit(
            prompt=STORY, model="smollm2", max_tokens=400, ignore_eos=True, logprobs=1, keep_input=True
        )
        eventually(lambda: client.generated(handle.id) > 16, "a checkpoint", LOADING_S)
        worker.signal(signal.SIGKILL)
        worker.wait()
        fork_server.spawn()
        stored = handle.result(timeout=LOADING_S)
        assert 0 < stored.resumed_tokens < 400
        found = producer.verify(handle.id, timeout=LOADING_S)
    assert (found.exactness, found.honoured) == ("bitwise", True), found
    client.redis.close()
