"""The curve over margins, compared with a cascade for each margin; and a cascade's path through a journal."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.producer.dataset.journal import Failure, Journal
from pagemill.producer.dataset.labels.cascade import chain_of
from pagemill.producer.dataset.labels.curve import Curve, Step
from pagemill.producer.dataset.labels.stages import StageFigures
from pagemill.producer.dataset.recipe import Recipe
from pagemill.producer.dataset.row_lines import RowLines
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.walk import Walk
from pagemill.producer.dataset.tables.rows import Row
from pagemill.producer.dataset.work import Work, stage_key
from pagemill.producer.wire.schema.job import Job

MODELS = ("small", "middle", "big")
LABELS = {"structured_outputs": {"choice": ["a", "b"]}, "label_probs": "product", "temperature": 0.0}
PROBS = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5 + 1e-12, 0.75, 0.8, 0.9, 1.0])


@st.composite
def a_row(draw: st.DrawFn) -> list[Step | None]:
    """Every stage's output, None for a stage that fails."""
    has_gold = draw(st.booleans())
    return [
        None
        if stage and draw(st.integers(0, 5)) == 0
        else Step(
            draw(PROBS),
            draw(st.booleans()) if has_gold else None,
            draw(st.integers(0, 50)),
            draw(st.sampled_from([None, 0.5, 2.0])),
        )
        for stage in range(3)
    ]


def way(row: Sequence[Step | None], below: float) -> list[Step]:
    """The outputs that a row gets at a margin; a failure ends it."""
    taken: list[Step] = []
    for step in row:
        if step is None:
            break
        taken.append(step)
        if step.prob >= below:
            break
    return taken


@given(st.lists(a_row(), min_size=1, max_size=30), st.sampled_from([0.005, 0.25, 0.5, 0.8, 0.803, 1.0]))
@settings(max_examples=100)
def test_each_point_is_what_that_margin_would_give(rows: list[list[Step | None]], used: float) -> None:
    curve = Curve(used)
    for row in rows:
        taken = way(row, used)
        failed = len(taken) < 3 and row[len(taken)] is None and taken[-1].prob < used
        curve.add(taken, is_last=failed or len(taken) == 3)
    for point in curve.points():
        below = point["below"]
        # A row that ended at `used` with an output below this margin would continue, possibly to a failure.
        known = [
            taken
            for row in rows
            if (taken := way(row, below)) == way(row, used)[: len(taken)]
            and not (taken == way(row, used) and used <= taken[-1].prob < below and len(taken) < 3)
        ]
        assert point["share"] == pytest.approx(sum(row[0].prob < below for row in rows if row[0]) / len(rows))
        assert point["covered"] == pytest.approx(len(known) / len(rows))
        if below <= used:
            assert point["covered"] == 1.0
        graded = [taken[-1].is_right for taken in known if taken[-1].is_right is not None]
        assert point["accuracy"] == (pytest.approx(sum(graded) / len(graded)) if graded else None)
        costs = [sum(step.tokens for step in taken) for taken in known]
        assert point["tokens"] == (pytest.approx(sum(costs) / len(costs)) if costs else None)
        times = [[step.seconds for step in taken] for taken in known]
        timed = [sum(time) for time in times if None not in time]  # type: ignore[arg-type]
        assert point["seconds"] == (pytest.approx(sum(timed) / len(timed)) if timed else None)


def result(prob: float, label: str) -> dict[str, Any]:
    other = "b" if label == "a" else "a"
    output = {"index": 0, "text": label, "label": label, "label_probs": {label: prob, other: 1 - prob}}
    return {
        "outputs": [output],
        "usage": {"prompt_tokens": 10, "completion_tokens": 1},
        "timing": {"queue_s": 1.0, "e2e_s": 1.5},
    }


@dataclass
class DatasetOptions:
    """The options of a run that define a cascade."""

    label_temperature: tuple[float, ...]
    escalate_below: float | None
    output_column: str = ""
    gold: str | None = None
    to: Any = MODELS[1:]


@pytest.mark.slow
@given(st.integers(0, 10**9), st.sampled_from([0.6, 0.8, 1.0]), st.sampled_from([1.0, 0.5, 2.0]))
@settings(max_examples=15)
def test_followers_yield_what_the_answers_ask_for_in_whatever_order_they_come(
    seed: int, below: float, temperature: float
) -> None:
    """Also over a restart in the middle, and at another margin afterwards."""
    chance = random.Random(seed)
    recipe = Recipe("small", "{{ text }}", chat=False, fields=LABELS)
    chain, lower = (
        chain_of(recipe, DatasetOptions((temperature, 1.0, temperature), margin))
        for margin in (below, below - 0.1)
    )
    rows = [Row(i, {"text": f"{i % 12}"}) for i in range(15)]
    jobs = [recipe.job(row) for row in rows]
    keys = [job.digest() for job in jobs if isinstance(job, Job)]
    says = {
        stage_key(key, model) if model != "small" else key: None
        if chance.random() < 0.15
        else result(chance.uniform(0.5, 1.0), chance.choice("ab"))
        for key in keys
        for model in MODELS
    }
    done: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with Journal(Path(folder) / "j") as journal:
                pending = [key for key in dict.fromkeys(keys) if key not in done]
                followers = [follower() for follower in Walk(chain, journal).followers(lambda: rows)]
                for _ in range(chance.randrange(5, 30)):
                    submit(pending, followers, done)
                    finish(pending, says, done, journal, chance)
        with Journal(Path(folder) / "j") as journal:
            pending = [key for key in dict.fromkeys(keys) if key not in done]
            followers = [follower() for follower in Walk(chain, journal).followers(lambda: rows)]
            submit(pending, followers, done)
            while pending:
                finish(pending, says, done, journal, chance)
                submit(pending, followers, done)
            assert all(next(follower, "end") == "end" for follower in followers)
            wanted = {key for job_key in keys for key, _ in walk(says, job_key, chain)}
            assert done == wanted
            check(journal, says, rows, keys, chain)
            check(journal, says, rows, keys, lower)


def submit(pending: list[str], followers: list[Any], done: set[str]) -> None:
    for follower in followers:
        for work in follower:
            if work is None:
                break
            assert isinstance(work, Work)
            assert work.job.model == work.key.partition("@")[2]
            if work.key not in pending and work.key not in done:
                pending.append(work.key)


def finish(pending: list[str], says: Any, done: set[str], journal: Journal, chance: random.Random) -> None:
    if not pending:
        return
    key = pending.pop(chance.randrange(len(pending)))
    assert key not in done, "paid for twice"
    done.add(key)
    with journal.transaction():
        journal.record(key, says[key], Failure("no", "no good") if says[key] is None else None)


def walk(says: dict[str, Any], key: str, chain: Chain) -> list[tuple[str, Any]]:
    """The calls for a row, by the definition."""
    asked = []
    below = chain.steps[-1].below
    for model, step in zip(MODELS, chain.steps, strict=True):
        assert below is not None
        assert step.labels is not None
        name = key if model == "small" else stage_key(key, model)
        asked.append((name, says[name]))
        if says[name] is None:
            break
        probs = says[name]["outputs"][0]["label_probs"]
        powers = {label: prob ** (1 / step.labels.temperature) for label, prob in probs.items()}
        if powers[says[name]["outputs"][0]["label"]] / sum(powers.values()) >= below:
            break
    return asked


def check(journal: Journal, says: dict[str, Any], rows: list[Row], keys: list[str], chain: Chain) -> None:
    figures = StageFigures(chain)
    right = count = tokens = 0
    seen: set[str] = set()
    for row, key in zip(rows, keys, strict=True):
        asked = walk(says, key, chain)
        answered = [end for _, end in asked if end is not None]
        states = list(Walk(chain, journal).states(row))
        assert not any(state.is_open for state in states)
        if not answered:
            assert all(state.kept is None for state in states)
            continue
        kept = RowLines(chain, Path()).result(states)
        assert kept["outputs"] == answered[-1]["outputs"]
        assert kept["answers"].stage == len(answered) - 1
        assert kept["usage"]["prompt_tokens"] == 10 * len(answered)
        figures.add(kept["answers"], "a", is_merged=key in seen)
        tokens += 0 if key in seen else 11 * len(answered)
        seen.add(key)
        count += 1
        right += answered[-1]["outputs"][0]["label"] == "a"
    if not count:
        return
    facts = figures.as_json()
    used = next(point for point in facts["curve"] if point["below"] == chain.steps[-1].below)
    assert used["covered"] == 1.0
    assert used["accuracy"] == pytest.approx(right / count)
    assert used["tokens"] * count == pytest.approx(tokens)
    assert sum(stage["final"] for stage in facts["stages"]) == count == facts["stages"][0]["rows"]
    assert sum(stage["prompt_tokens"] + stage["completion_tokens"] for stage in facts["stages"]) == tokens
    assert used["share"] * count == pytest.approx(facts["stages"][1]["rows"])
