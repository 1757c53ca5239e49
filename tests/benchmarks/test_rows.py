from __future__ import annotations

from rich.console import Console

from benchmarks.decoding.rows import PROMPT_IN, Rows, measure
from benchmarks.engines.contenders import SUBJECT, Contender

MODULE = "tests.benchmarks.counting_engine"


def test_workloads_have_as_many_rows_and_tokens_as_they_are_called() -> None:
    one, eight, prompt = Rows([1, 8], given=4, made=6, vocab_size=1000).workloads(0)
    assert [len(one.prompts), len(eight.prompts)] == [1, 8]
    assert {len(tokens) for tokens in eight.prompts} == {4}
    assert eight.max_tokens == [6] * 8
    assert {len(tokens) for tokens in prompt.prompts} == {PROMPT_IN}
    assert set(prompt.max_tokens) == {1}


def test_every_contender_passes_over_every_workload_once_a_round() -> None:
    contenders = [Contender(name, MODULE, "counts") for name in (SUBJECT, "other")]
    console = Console(record=True, width=120, quiet=True)
    report = measure(Rows([2], given=3, made=2, vocab_size=1000), "none", contenders, 2, console)
    passes = [(item["round"], item["workload"], item["engine"]) for item in report["passes"]]
    assert sorted(passes) == sorted(
        (number, workload, name)
        for number in (1, 2)
        for workload in ("rows-2", "prompt")
        for name in (SUBJECT, "other")
    )
    assert report["failures"] == {}
