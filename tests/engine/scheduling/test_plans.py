"""The shortcuts for plain sequences create the same plans as the general path, step by step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.engine.plan import RowWork, StepPlan
from pagemill.engine.scheduling.request import Request, Sequence
from pagemill.engine.scheduling.scheduler import Scheduler
from pagemill.engine.scheduling.step_builder import StepBuilder
from tests.engine.scheduling.harness import Harness, make_config, make_request
from tests.engine.scheduling.test_fuzz import make_workload, run_workload


@contextmanager
def without_shortcuts() -> Iterator[None]:
    """No request counts as plain, so every sequence takes the path of beams and grammars."""
    with mock.patch.object(Request, "classify", return_value=None):
        yield


def comparable(plan: StepPlan) -> StepPlan:
    """Without tokens to append, one path has an empty list and the other an empty tuple."""
    return replace(plan, work=[comparable_work(work) for work in plan.work])


def comparable_work(work: RowWork) -> RowWork:
    return replace(
        work,
        new_block_ids=list(work.new_block_ids),
        replaced_blocks=list(work.replaced_blocks),
        forced_token_ids=list(work.forced_token_ids),
    )


def history(harness: Harness) -> tuple[object, ...]:
    """All plans of a run, and its outcome."""
    scheduler = harness.scheduler
    return (
        [comparable(plan) for plan in harness.plans],
        {name: [s.output_token_ids for s in r.sequences] for name, r in harness.requests.items()},
        harness.errors,
        scheduler.stats(),
        scheduler.kv_cache.stats(),
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.booleans())
def test_shortcuts_change_no_plan(seed: int, with_failures: bool) -> None:
    def run() -> Harness:
        workload = make_workload(random.Random(seed), with_failures=with_failures)
        workload.config = replace(workload.config, num_speculative_tokens=0)  # only plain sequences draft
        return run_workload(workload)

    short = run()
    with without_shortcuts():
        long = run()
    assert history(short) == history(long)


def test_a_decoding_row_takes_the_shortcut_until_its_block_is_full() -> None:
    """Otherwise the test above would compare the general path with itself."""
    harness = Harness(make_config(block_size=4))
    harness.add(make_request("a", [1, 2, 3], max_tokens=6, ignore_eos=True))
    taken: list[bool] = []
    batch = harness.scheduler._batch
    shortcut = batch._schedule_newest

    def noted(step: StepBuilder, sequence: Sequence) -> bool:
        taken.append(shortcut(step, sequence))
        return taken[-1]

    with mock.patch.object(batch, "_schedule_newest", noted):
        harness.run()
    assert taken == [True, False, True, True, True], "position 4 begins the second block"


def test_what_is_not_plain_is_known_as_such() -> None:
    class Anything:
        def __getattr__(self, name: str) -> None:
            raise AssertionError("asked before there is a step")

    scheduler = Scheduler(make_config())
    requests = {
        "plain": make_request("plain", [1, 2]),
        "samples": make_request("samples", [1, 2], n=2, temperature=1.0),
        "search": make_request("search", [1, 2], beam_width=2),
        "grammar": make_request("grammar", [1, 2], grammar=lambda _: Anything()),  # type: ignore[arg-type,return-value]
        "scored": make_request("scored", [1, 2], prompt_logprobs=0),
    }
    requests["scored"].prompt_logprobs = [None, None]
    for request in requests.values():
        scheduler.add_request(request)
    assert [name for name, request in requests.items() if request.is_plain] == ["plain"]
