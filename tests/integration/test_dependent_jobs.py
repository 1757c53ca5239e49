"""Jobs that wait for others, with real workers: label, and summarize only the positives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill import JobCancelled, JobFailed, Producer
from tests.worker.harness import (
    QueueClient,
    WorkerProcess,
    eventually,
    process_settings,
    running_worker,
    worker_config,
)

pytestmark = pytest.mark.slow

REVIEWS = [
    "I loved every minute of it, a wonderful film.",
    "It was terrible, boring and a waste of time.",
    "What a great and beautiful story!",
    "Awful. I hated the ending.",
]
LABELS = [" positive", " negative"]


def steps(number: int, review: str) -> Iterator[dict[str, Any]]:
    """A review's label, and if it is positive a summary, both after the same text."""
    begin = f"Review {number}: {review} {review}\n"
    yield {
        "key": f"{number}/label", "prompt": f"{begin}The label is:", "structured_outputs": {"choice": LABELS},
        "label_probs": "product",
    }  # fmt: skip
    yield {
        "key": f"{number}/summary",
        "prompt": f"{begin}The review is{{label.text}} (p={{label.label_prob}}), because",
        "after": {"label": f"key:{number}/label"},
        "when": {"label": {"label": " positive", "prob_at_least": 0.5}},
        "max_tokens": 8,
        "temperature": 0.0,
    }


def test_only_the_positives_are_summarised(client: QueueClient) -> None:
    config = worker_config(
        client.url, client.queue, model="smollm2", kv_cache_memory_bytes=128 << 20, num_threads=1
    )
    with (
        running_worker(config, load_patience_s=400),
        Producer(client.url, queue=client.queue, model="smollm2") as producer,
    ):
        rows = [row for number, review in enumerate(REVIEWS) for row in steps(number, review)]
        batch = producer.submit_many(rows)
        items = {item.key: item for item in batch.results(timeout=240)}
        labels = {}
        for number, review in enumerate(REVIEWS):
            label = items[f"{number}/label"].result
            assert label is not None
            assert label.label_probs is not None
            assert label.label is not None
            labels[number] = label.label
            summary = items[f"{number}/summary"]
            if label.label == " negative":
                assert summary.error is not None
                assert summary.error.code == "condition_false"
                continue
            prob = label.label_probs[label.label]
            prompt = f"Review {number}: {review} {review}\nThe review is positive (p={prob!r}), because"
            alone = producer.submit(prompt=prompt, max_tokens=8, temperature=0.0).result(timeout=120)
            assert summary.result is not None
            assert summary.result.token_ids == alone.token_ids
            assert summary.result.usage.cached_tokens > 0, "its label's blocks"
    assert set(labels.values()) == set(LABELS), "the test shows both ways"


def test_outputs_reach_chats_and_missing_fields_fail_alone(client: QueueClient) -> None:
    with (
        running_worker(worker_config(client.url, client.queue, model="echo")),
        Producer(client.url, queue=client.queue, model="echo") as producer,
    ):
        first = producer.submit(prompt='{"title": "Emma"}', max_tokens=40)
        turns = [{"role": "user", "content": "About {book.parsed.title}"}]
        chat = producer.submit(messages=turns, after={"book": first}, max_tokens=40)
        wrong = producer.submit(prompt="{book.parsed.author}", after={"book": first})
        assert "About Emma" in chat.result(timeout=60).text
        with pytest.raises(JobFailed, match=f"the output of job {first.id} has no parsed.author"):
            wrong.result(timeout=60)
        late = producer.submit(prompt="{parent.text}", after=[first], max_tokens=40)
        assert late.result(timeout=60).text == '{"title": "Emma"}'


def test_a_worker_is_killed_while_others_wait(client: QueueClient, tmp_path: Path) -> None:
    """Its job is taken over, and its waiting jobs are released once, by whichever worker commits."""
    with Producer(client.url, queue=client.queue, model="echo") as producer:
        first = WorkerProcess(process_settings(client.url, client.queue, model="echo:20"), tmp_path / "first")
        parent = producer.submit(prompt="0123456789" * 20, max_tokens=200)
        children = [
            producer.submit(prompt=f"{number} {{parent.text}}", after=[parent], max_tokens=5)
            for number in range(3)
        ]
        cancelled = producer.submit(prompt="x", after=[children[0]])
        eventually(lambda: client.generated(parent.id) >= 20, "a checkpoint")
        first.kill()
        assert cancelled.cancel()
        with WorkerProcess(process_settings(client.url, client.queue, model="echo"), tmp_path / "second"):
            texts = [child.result(timeout=60).text for child in children]
        assert texts == [f"{number} 012" for number in range(3)]
        assert parent.result(timeout=5).resumed_tokens >= 20
        with pytest.raises(JobCancelled):
            cancelled.result(timeout=5)
    counts = client.stats().counts
    assert {state: number for state, number in counts.items() if number} == {"succeeded": 4, "cancelled": 1}
