"""Partially generated jobs whose worker was killed, with two revisions of a model on the queue."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill import LLM, SamplingParams
from pagemill.producer.wire.calls import rollouts
from pagemill.producer.wire.calls.rollouts import Rollout
from pagemill.producer.wire.schema.outputs import Result
from tests.engine.tiny_model import VOCAB_SIZE, save_tiny_llama
from tests.worker.harness import QueueClient, WorkerProcess, eventually, process_settings

JOBS, TOKENS = 24, 700
PROMPTS = [[5 + (number * 7 + place * 3) % (VOCAB_SIZE - 5) for place in range(4)] for number in range(JOBS)]
FIELDS = {"model": "m", "temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
Revisions = dict[str, Path]
Outputs = dict[str, list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def revisions(tmp_path_factory: pytest.TempPathFactory) -> Revisions:
    """Two checkpoints with the same shape and different weights."""
    found = {}
    for number, name in enumerate(("r1", "r2")):
        found[name] = tmp_path_factory.mktemp(name)
        model = save_tiny_llama(found[name], max_position_embeddings=1024)
        torch.manual_seed(100 + number)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.6)
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def whole(revisions: Revisions) -> Outputs:
    """The uninterrupted output of each revision for every prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    said: Outputs = {}
    for name, directory in revisions.items():
        llm = LLM(model=str(directory), batch_invariant=True)
        said[name] = [tuple(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params)]
        llm.close()
    assert not set(said["r1"]) & set(said["r2"])
    return said


Start = Callable[[str], WorkerProcess]


@pytest.fixture
def start(client: QueueClient, revisions: Revisions, tmp_path: Path) -> Iterator[Start]:
    started: list[WorkerProcess] = []

    def start(revision: str) -> WorkerProcess:
        settings: dict[str, Any] = process_settings(
            client.url, client.queue, model=str(revisions[revision]), served_model_name="m",
            revision_name=revision, skip_tokenizer_init=True, batch_invariant=True, max_num_seqs=12,
            checkpoint_s=0.02, checkpoint_tokens=8,
        )  # fmt: skip
        started.append(WorkerProcess(settings, tmp_path / f"{revision}.log"))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


def ready(client: QueueClient, *revisions: str) -> bool:
    return {one.revision for one in client.workers() if one.state == "ready"} >= set(revisions)


def half_done(client: QueueClient, ids: list[str]) -> list[str]:
    """Unfinished jobs with some generated tokens."""
    return [name for name in ids if not client.status(name).done and client.generated(name) >= 8]


def submitted(client: QueueClient) -> list[str]:
    return client.submit(*({"prompt_token_ids": prompt} | FIELDS for prompt in PROMPTS))


def results(client: QueueClient, ids: list[str]) -> list[Result]:
    found = [outcome.result for outcome in client.wait(ids)]
    assert all(found)
    return [one for one in found if one is not None]


def sides(found: list[Result], whole: Outputs) -> list[str]:
    """The revision whose complete output each result is."""
    told = []
    for number, result in enumerate(found):
        by = [name for name in whole if result.outputs[0].token_ids == whole[name][number]]
        assert len(by) == 1, f"job {number} is of no revision as a whole"
        told += by
    prints = {
        side: {one.fingerprint for one, own in zip(found, told, strict=True) if own == side} for side in whole
    }
    assert not prints["r1"] & prints["r2"]
    return told


@pytest.mark.slow
def test_what_a_dead_revision_left_begins_again_on_the_other(
    client: QueueClient, start: Start, whole: Outputs
) -> None:
    old = start("r1")
    eventually(lambda: ready(client, "r1"), "the old worker")
    ids = submitted(client)
    eventually(lambda: len(half_done(client, ids)) >= 8, "jobs under way")
    old.kill()
    left = half_done(client, ids)
    assert len(left) >= 4
    start("r2")
    found = results(client, ids)
    told = sides(found, whole)
    again = [number for number, name in enumerate(ids) if name in left]
    assert {told[number] for number in again} == {"r2"}
    assert {found[number].resumed_tokens for number in again} == {0}


@pytest.mark.slow
def test_what_a_killed_canary_left_is_finished_by_another_of_its_revision(
    client: QueueClient, start: Start, whole: Outputs
) -> None:
    workers = [start(revision) for revision in ("r1", "r2", "r2")]
    eventually(lambda: sum(one.state == "ready" for one in client.workers()) == len(workers), "all workers")
    assert client.run(rollouts.start(client.queue, "m", Rollout("r2", 0.7))) == "ok"
    ids = submitted(client)
    left: list[str] = []

    def under_way() -> int | None:
        for place in (1, 2):
            process = workers[place].process
            process.send_signal(signal.SIGSTOP)  # its jobs would finish during this check
            left[:] = [
                name
                for name in half_done(client, ids)
                if f"-{process.pid}-" in (client.status(name).worker or "")
            ]
            if len(left) >= 2:
                return place
            process.send_signal(signal.SIGCONT)
        return None

    place = eventually(under_way, "jobs of a canary under way")
    workers[place].kill()
    ended = results(client, ids)
    told = sides(ended, whole)
    assert set(told) == {"r1", "r2"}
    for number, name in enumerate(ids):
        if name in left:
            assert told[number] == "r2"
            assert ended[number].resumed_tokens >= 8


@pytest.mark.slow
def test_a_rolled_back_canary_hands_nothing_half_done_on(
    client: QueueClient, start: Start, whole: Outputs
) -> None:
    canary = start("r2")
    eventually(lambda: ready(client, "r2"), "the canary")
    assert client.run(rollouts.start(client.queue, "m", Rollout("r2", 1.0))) == "ok"
    ids = submitted(client)
    eventually(lambda: len(half_done(client, ids)) >= 8, "jobs under way")
    assert client.run(rollouts.roll_back(client.queue, "m")) == "ok"
    canary.kill()
    left = half_done(client, ids)
    start("r2")
    start("r1")
    told = sides(results(client, ids), whole)
    assert left
    assert {told[number] for number, name in enumerate(ids) if name in left} == {"r1"}
