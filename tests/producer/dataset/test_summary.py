"""The counts of a run's report, which must stay correct beyond the sizes of its tables."""

from __future__ import annotations

from typing import Any

from pagemill.producer.dataset.record import Totals
from pagemill.producer.dataset.summary import MAX_CONFUSION, Summary


def kept(text: str) -> dict[str, Any]:
    return {"outputs": [{"text": text, "finish_reason": "stop"}], "usage": {}, "timing": {}}


def test_accuracy_counts_every_row_whatever_the_confusion_table_holds() -> None:
    summary = Summary(gold="label")
    count = 2 * MAX_CONFUSION
    for number in range(count):
        gold = f"name {number if number % 4 else -1}"
        summary.add_success(kept(f"name {number}"), f"name {number}", gold, is_merged=False)
    assert summary.accuracy == 0.75
    assert summary.confusion.total() == count
    assert len(summary.confusion) <= MAX_CONFUSION + 1


def test_the_first_failure_is_kept_in_words() -> None:
    summary = Summary()
    summary.add_failure(7, "template_error", "no such column")
    summary.add_failure(8, "invalid_json", "torn")
    assert summary.as_json()["first_failure"] == "row 7: template_error: no such column"
    assert (summary.failed, summary.error_codes.total()) == (2, 2)


def test_rows_whose_time_is_not_known_count_in_nothing_that_is_per_second() -> None:
    summary = Summary(totals=Totals(seconds=2.0, starts=1, untimed_rows=6, untimed_tokens=18))
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}
    earlier = {"outputs": [{"text": "a", "finish_reason": "stop"}], "usage": usage}
    for number in range(10):
        made = number < 4
        summary.add_success(earlier | ({"timing": {}} if made else {}), "a", None, is_merged=False)
    facts = summary.as_json()
    assert (facts["succeeded"], facts["adopted"], facts["completion_tokens"]) == (10, 6, 30)
    assert (facts["rows_per_second"], facts["completion_tokens_per_second"]) == (2.0, 6.0)
