"""Invariants after every fault: all jobs finished once, all counts add up, no data is left over."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from pagemill.producer.wire.calls.metering import usage
from pagemill.producer.wire.calls.reads import Outcome
from pagemill.producer.wire.schema import keys
from tests.worker.harness import QueueClient, eventually

STAYS = re.compile(
    r"(meta|counts|synced|workers|dead|bexpiry|suspects|reserved|overtaken|usage|large|rollouts|served|accused"
    r"|(job|out|md|in|ckpt|history|batch|bjobs|bfeed|backed|bowner|about|worker|puller|serves"
    r"|turns|bell|idem|usage|spent|rollout|ran|sampled|started|spells|alive|over|audit|did|agreed):.*)"
)
"""Records of finished jobs, of batches and of workers; every name of active jobs (wait, lanes, leases,
delayed, deadlines, outbox, followers, twins) must have been removed."""


def check(client: QueueClient, ids: Sequence[str], *, patience_s: float = 300.0) -> list[Outcome]:
    """Wait until all jobs, which were submitted as batch `all`, have finished; returns their outcomes, in order."""
    outcomes = client.wait(ids, patience_s)
    states = Counter(outcome.state for outcome in outcomes)
    assert set(states) <= {"succeeded", "failed", "cancelled", "expired", "dead"}
    counts = client.counts("all")
    assert counts.total == counts.ended == len(ids)
    for state, number in states.items():
        assert getattr(counts, state) == number
    assert client.redis.llen(f"{keys.prefix(client.queue)}bfeed:all") == len(ids), "an end was told twice"
    _check_sums(client, states, len(ids))
    _check_ledger(client, outcomes)
    _check_leftovers(client, outcomes)
    return outcomes


def check_echoes(outcomes: Sequence[Outcome], texts: Sequence[str]) -> None:
    """Every job succeeded with exactly its own prompt: no output is lost, repeated or mixed up by a takeover."""
    for outcome, text in zip(outcomes, texts, strict=True):
        result = outcome.value()
        assert result is not None
        assert (result.text, result.token_ids) == (text, tuple(text.encode()))
        assert result.usage.completion_tokens == len(text)


def _check_sums(client: QueueClient, states: Counter[str | None], total: int) -> None:
    stats = client.stats()
    for state in ("queued", "delayed", "running"):
        assert stats.counts.get(state, 0) == 0, f"{state} jobs are left in the counts"
    ended = {state: number for state, number in stats.counts.items() if number}
    assert ended == dict(states), "an end that was committed twice is counted twice"
    assert sum(ended.values()) == total
    assert (stats.leases, stats.waiting) == (0, {})


def _check_ledger(client: QueueClient, outcomes: Sequence[Outcome]) -> None:
    """Every job is in it once, with the values of its result. (Only this has the tokens of jobs without a result.)"""
    rows = [
        row
        for day in client.run(usage.days(client.queue))
        for row in client.run(usage.rows(client.queue, day))
    ]
    assert sum(row.jobs for row in rows) == len(outcomes)
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    if len(results) < len(outcomes):
        return
    ran = [result for result in results if result.copied_from is None]
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert sum(getattr(row, name) for row in rows) == sum(getattr(result.usage, name) for result in ran)
    if any(result.tier != "continues" for result in ran):  # an endpoint does not report its device's time
        assert sum(row.device_s for row in rows) > 0.0


def leftovers(client: QueueClient) -> list[str]:
    """Keys of active jobs and workers, without the queue's prefix."""
    prefix = keys.prefix(client.queue)
    names = [name.decode().removeprefix(prefix) for name in client.redis.scan_iter(f"{prefix}*", 1000)]
    return [name for name in names if not STAYS.fullmatch(name)]


def _check_leftovers(client: QueueClient, outcomes: Sequence[Outcome]) -> None:
    prefix = keys.prefix(client.queue)
    eventually(lambda: not leftovers(client), f"keys to go away: {leftovers(client)[:10]}")
    for outcome in outcomes:
        if outcome.state == "succeeded":
            gone = client.redis.exists(f"{prefix}in:{outcome.job_id}", f"{prefix}ckpt:{outcome.job_id}")
            assert not gone, "a succeeded job keeps neither payload nor checkpoint"
    assert client.redis.hlen(f"{prefix}suspects") == 0
