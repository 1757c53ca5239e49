"""Which deliveries start: a receiver that hangs or fails delays only its own."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.producer.wire.calls.outbox import Due
from pagemill.producer.wire.webhooks import receivers
from pagemill.producer.wire.webhooks.receivers import Receiver, Receivers

TIMEOUT_S = 10.0
WINDOW = 1000
"""Deliveries that one query returns."""

Behavior = Callable[[str], tuple[float, bool]]
"""Duration of a delivery to a URL in seconds, and whether it succeeds."""


def simulate(
    urls: list[str], behavior: Behavior, seconds: float, step_s: float = 0.02
) -> dict[str, list[float]]:
    """Run a worker's loop on a simulated clock; returns the times at which each URL's deliveries succeeded."""
    now = 1000.0
    chosen = Receivers(5.0, clock=lambda: now)
    due = {f"j{number:06}": now for number in range(len(urls))}
    url_of = dict(zip(due, urls, strict=True))
    running: list[tuple[float, str, bool]] = []
    delivered: dict[str, list[float]] = defaultdict(list)
    while now < 1000.0 + seconds:
        while running and running[0][0] <= now:
            _, job_id, is_success = heapq.heappop(running)
            chosen.ended(job_id, is_success)
            if is_success:
                delivered[url_of[job_id]].append(now - 1000.0)
            else:
                due[job_id] = now + 5.0
        while True:
            first = sorted((at, job_id) for job_id, at in due.items() if at <= now)[:WINDOW]
            choice = chosen.choose(Due(job_id, url_of[job_id]) for _, job_id in first)
            for each in choice.start:
                del due[each.job_id]
                takes_s, is_success = behavior(each.receiver)
                heapq.heappush(running, (now + takes_s, each.job_id, is_success))
            for job_id, ms in choice.later_ms.items():
                due[job_id] = now + ms / 1000
            if len(first) < WINDOW or not choice.later_ms:
                break
        now += step_s
    return delivered


def hangs_at(*hosts: str) -> Behavior:
    return lambda url: (TIMEOUT_S, False) if url.startswith(hosts) else (0.02, True)


@pytest.mark.parametrize(
    "hanging",
    [
        ["https://slow.example/hook"] * 500,
        [f"https://slow.example/jobs/{number}" for number in range(2000)],
        [f"https://slow{number}.example/hook" for number in range(20)],
        ["https://good.example/hang"] * 16,
    ],
    ids=["one receiver", "a path per job", "many hosts", "another path of the host"],
)
def test_a_healthy_receiver_is_served_within_two_seconds(hanging: list[str]) -> None:
    urls = hanging + ["https://good.example/ok"] * 112
    random.Random(1).shuffle(urls)
    delivered = simulate(urls, hangs_at("https://slow", "https://good.example/hang"), 2.5)
    assert len(delivered["https://good.example/ok"]) == 112
    assert max(delivered["https://good.example/ok"]) <= 2.0


def test_a_backlog_for_one_receiver_does_not_hide_later_deliveries() -> None:
    """More than one query returns, for a receiver that hangs and for one that is merely slow."""
    urls = ["https://slow.example/"] * 2000 + ["https://busy.example/"] * 2000 + ["https://good.example/"]
    behavior = {"https://slow.example/": (TIMEOUT_S, False), "https://busy.example/": (0.5, True)}
    delivered = simulate(urls, lambda url: behavior.get(url, (0.02, True)), 10.0, 0.05)
    assert delivered["https://good.example/"][0] <= 2.0
    assert len(delivered["https://busy.example/"]) > 120, "8 at once for 10 s are 160"


def test_a_receiver_that_fails_is_paused_and_tried_with_one_delivery() -> None:
    now = 0.0
    chosen = Receivers(5.0, clock=lambda: now)
    due = [Due(f"j{number}", "https://one.example/hook") for number in range(20)]

    def started() -> list[str]:
        return [each.job_id for each in chosen.choose(due).start]

    for _ in range(receivers.PATH_FAILURES):
        (job_id,) = started()
        chosen.ended(job_id, False)
    choice = chosen.choose(due)
    assert (choice.start, chosen.paused) == ([], 1)
    assert set(choice.later_ms) == {each.job_id for each in due}
    assert all(4900 < ms <= 5001 for ms in choice.later_ms.values())
    pauses = []
    for _ in range(10):
        now = max(record.paused_until for record in chosen._records.values())
        (job_id,) = started()
        chosen.ended(job_id, False)
        pauses.append(max(record.paused_until for record in chosen._records.values()) - now)
    assert pauses[:3] == [10.0, 20.0, 40.0]
    assert pauses[-1] == receivers.LAST_PAUSE_S
    now += receivers.LAST_PAUSE_S
    counts = []
    for _ in range(10):
        jobs = started()
        counts.append(len(jobs))
        for job_id in jobs:
            chosen.ended(job_id, True)
    assert counts[0] == 1
    assert counts[-1] == receivers.RECEIVER_AT_ONCE
    assert chosen.paused == 0


def test_a_receiver_that_asks_for_a_pause_gets_it() -> None:
    chosen = Receivers(5.0, clock=lambda: 0.0)
    due = [Due("a", "https://one.example/x"), Due("b", "https://one.example/y")]
    assert [each.job_id for each in chosen.choose(due).start] == ["a", "b"]
    chosen.ended("a", False, pause_s=30.0)
    chosen.ended("b", None)
    choice = chosen.choose(due)
    assert [each.job_id for each in choice.start] == ["b"]
    assert 30_000 <= choice.later_ms["a"] <= 30_001


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 3), st.sampled_from((True, False, None))), max_size=400
    )
)
def test_limits_hold_whatever_happens(steps: list[tuple[int, int, bool | None]]) -> None:
    now = 0.0
    chosen = Receivers(0.5, clock=lambda: now)
    running: dict[str, Due] = {}
    for number, (host, path, is_success) in enumerate(steps):
        now += 0.25
        due = [Due(f"{number}-{i}", f"https://h{host}.example/{path}") for i in range(12)]
        choice = chosen.choose(due)
        running |= {each.job_id: each for each in choice.start}
        hosts = Counter(Receiver.of_url(each.receiver).host for each in running.values())
        assert max(hosts.values(), default=0) <= receivers.RECEIVER_AT_ONCE
        assert len(running) == chosen.in_flight <= receivers.AT_ONCE
        assert not set(choice.later_ms) & set(running)
        if running and number % 2:
            job_id = random.Random(number).choice(sorted(running))
            del running[job_id]
            chosen.ended(job_id, is_success)
    assert chosen.in_flight == len(running)


def test_results_of_old_receivers_are_forgotten() -> None:
    chosen = Receivers(5.0, clock=lambda: 0.0)
    for number in range(3 * receivers.MAX_TRACKED):
        chosen.choose([Due("j", f"https://h{number}.example/")])
        chosen.ended("j", True)
    chosen.choose([Due(f"j{number}", f"https://new{number}.example/") for number in range(1000)])
    assert len(chosen._records) <= receivers.MAX_TRACKED


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://Hooks.example.com/a?token=1", Receiver("hooks.example.com:443", "/a")),
        ("https://hooks.example.com:8443", Receiver("hooks.example.com:8443", "/")),
        ("https://[2001:db8::1]/x", Receiver("2001:db8::1:443", "/x")),
        ("http://hooks.example.com/", Receiver("")),
    ],
)
def test_a_receiver_is_a_host_with_its_port_and_a_path(url: str, expected: Receiver) -> None:
    assert Receiver.of_url(url) == expected
