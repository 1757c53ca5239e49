"""Sampling and structured outputs from the wire to the result: a real server, a real worker, the real model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from pagemill.common.json_values import parse_output
from pagemill.producer.wire.schema.errors import JobFailed
from pagemill.producer.wire.schema.outputs import Result
from pagemill.worker.worker import Worker
from tests.worker.harness import QueueClient, running_worker, worker_config

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "capital"],
    "additionalProperties": False,
}
SCORES = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 9},
    "minItems": 2,
    "maxItems": 3,
}
EITHER = {
    "anyOf": [{"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}, {"type": "null"}]
}


@pytest.fixture(scope="module")
def model_client(valkey_url: str) -> Iterator[QueueClient]:
    with (
        QueueClient(valkey_url, "structured") as client,
        running_worker(worker_config(valkey_url, client.queue, model="smollm2", num_kv_blocks=256)),
    ):
        yield client


@pytest.fixture
def echo(valkey_url: str, queue_name: str) -> Iterator[tuple[Worker, QueueClient]]:
    with (
        QueueClient(valkey_url, queue_name) as client,
        running_worker(worker_config(valkey_url, queue_name)) as worker,
    ):
        yield worker, client


def results(client: QueueClient, *jobs: dict[str, Any]) -> list[Result]:
    return client.results(client.submit(*jobs), patience_s=180)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 60} | fields


@pytest.mark.slow
def test_json_results_are_what_their_schemas_say(model_client: QueueClient) -> None:
    question = "Name a city and its country as JSON."
    jobs = [
        chat(question, temperature=0.0, structured_outputs={"json": CITY}),
        chat(question, n=2, seed=5, structured_outputs={"json": json.dumps(CITY)}),
        chat(
            "Two scores:", seed=6, response_format={"type": "json_schema", "json_schema": {"schema": SCORES}}
        ),
        chat("All well?", temperature=0.0, structured_outputs={"json": EITHER}),
    ]
    schemas: list[dict[str, Any]] = [CITY, CITY, SCORES, EITHER]
    for result, schema in zip(results(model_client, *jobs), schemas, strict=True):
        for output in result.outputs:
            assert output.finish_reason == "stop"
            jsonschema.validate(json.loads(output.text), schema)
            assert output.parsed == json.loads(output.text)
        assert result.usage.prompt_tokens > 0
        assert result.usage.completion_tokens == sum(len(output.token_ids) for output in result.outputs)


@pytest.mark.slow
def test_regex_and_grammar_results_match(model_client: QueueClient) -> None:
    pattern = r"(Mon|Tues|Wednes)day, [0-3]\d/(0\d|1[0-2])"
    by_regex, by_grammar = results(
        model_client,
        chat("When?", seed=3, structured_outputs={"regex": pattern}),
        chat("Add:", seed=4, structured_outputs={"grammar": 'root ::= num " + " num\nnum ::= [1-9] [0-9]?'}),
    )
    assert re.fullmatch(pattern, by_regex.text)
    assert re.fullmatch(r"[1-9][0-9]? \+ [1-9][0-9]?", by_grammar.text)
    assert by_regex.outputs[0].parsed is None, "only JSON stands for another value than its text"


@pytest.mark.slow
def test_one_bad_schema_fails_its_own_job_alone(model_client: QueueClient) -> None:
    shapes = {
        "(": "schema_invalid", '{"type": "nonsense"}': "schema_invalid",
        "(?=a)a": "unsupported_feature", "(a?){5000}a{5000}": "schema_too_complex",
    }  # fmt: skip
    bad = model_client.submit(
        *(chat("x", structured_outputs={"json" if text[0] == "{" else "regex": text}) for text in shapes)
    )
    (good,) = results(model_client, chat("x", max_tokens=4))
    assert good.text
    for outcome, code in zip(model_client.wait(bad, patience_s=180), shapes.values(), strict=True):
        with pytest.raises(JobFailed) as failure:
            outcome.value()
        assert (failure.value.code, failure.value.retryable) == (code, False)


@pytest.mark.slow
def test_a_hostile_grammar_ends_alone_and_changes_nothing_for_others(model_client: QueueClient) -> None:
    """28 characters, each of which costs more per further token: a quarter of a second, and rising."""
    other = chat("Tell me a story.", temperature=0.0, max_tokens=24)
    shaped = chat("Name a city as JSON.", temperature=0.0, structured_outputs={"json": CITY})
    alone = results(model_client, other, shaped)
    hostile = chat("x", n=16, seed=1, max_tokens=190)
    hostile["structured_outputs"] = {"grammar": "start: s\ns: s s | /[a-z ]/"}
    (job_id,) = model_client.submit(hostile)
    beside = results(model_client, other, shaped)
    assert [one.outputs for one in beside] == [one.outputs for one in alone]
    (outcome,) = model_client.wait([job_id], patience_s=180)
    with pytest.raises(JobFailed, match=r"make it less ambiguous|Too many items") as failure:
        outcome.value()
    assert (failure.value.code, failure.value.retryable) == ("schema_too_complex", False)


def test_prompt_logprobs_and_bad_words_reach_the_result(model_client: QueueClient) -> None:
    prompt = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0.0, "max_tokens": 6}
    plain, other = results(
        model_client, prompt | {"prompt_logprobs": 2, "logprobs": 2}, prompt | {"bad_words": ["Paris"]}
    )
    assert "Paris" in plain.text
    assert "Paris" not in other.text
    entries = plain.prompt_logprobs
    assert entries is not None
    assert entries[0] is not None
    assert entries[0].chosen.logprob is None
    assert len(entries) == plain.usage.prompt_tokens
    for entry in entries[1:]:
        assert entry is not None
        assert len(entry.top) == 2
        assert entry.chosen.logprob is not None
        assert entry.top[0].logprob is not None
        assert entry.chosen.logprob <= entry.top[0].logprob <= 0.0
    assert other.prompt_logprobs is None
    logprobs = plain.outputs[0].logprobs
    assert logprobs is not None
    assert [entry.chosen.token_id for entry in logprobs] == list(plain.outputs[0].token_ids)
    assert [entry.top[0].token_id for entry in logprobs] == list(plain.outputs[0].token_ids), "greedy"


@pytest.mark.slow
def test_what_max_tokens_cuts_short_has_no_value(echo: tuple[Worker, QueueClient]) -> None:
    worker, client = echo
    job = {"prompt": '{"a": 12}', "structured_outputs": {"json": {"type": "object"}}}
    whole, cut = results(client, job | {"max_tokens": 40}, job | {"max_tokens": 7})
    assert (whole.outputs[0].parsed, whole.finish_reason) == ({"a": 12}, "stop")
    assert (cut.outputs[0].parsed, cut.text, cut.finish_reason) == (None, '{"a": "', "length")
    stats = worker.engine.stats
    assert stats is not None
    assert stats.requests.structured_outputs == {"valid": 1, "truncated": 1, "invalid": 0}


@pytest.mark.slow
def test_an_output_of_a_schema_that_is_verified(echo: tuple[Worker, QueueClient]) -> None:
    _, client = echo
    schema = {"type": "array", "items": {"type": "string", "format": "color"}, "uniqueItems": True}
    job = {"max_tokens": 40, "structured_outputs": {"json": schema}}
    right, wrong = client.submit(job | {"prompt": '["a", "b"]'}, job | {"prompt": '["a", "a"]'})
    verified, failed = client.wait([right, wrong], patience_s=180)
    result = verified.value()
    assert result is not None
    assert result.outputs[0].parsed == ["a", "b"]
    assert result.warnings == (
        "structured_outputs.json: uniqueItems did not constrain the output, which was verified at its end",
        "structured_outputs.json: the format 'color' is not supported and was not checked",
    )
    with pytest.raises(JobFailed) as failure:
        failed.value()
    assert (failure.value.code, failure.value.retryable) == ("schema_mismatch", False)
    (plain,) = results(client, {"prompt": "[1]", "structured_outputs": {"json": {"type": "array"}}})
    assert plain.warnings is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}), ("7", 7), ('"x"', "x"), ('{"a": ', None), ("", None),
        ("1e999", None), ("NaN", None), ('"\\ud800"', None), ("[" * 129 + "]" * 129, None), ("[" * 9999, None),
        ("[" * 128 + "]" * 128, json.loads("[" * 128 + "]" * 128)),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_only_what_can_be_sent_on_is_parsed(text: str, value: Any) -> None:
    assert parse_output(text) == value
