"""Pydantic classes as schemas, results parsed into them, and a producer's model and defaults."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from pagemill import (
    AsyncProducer,
    InvalidJob,
    InvalidOutput,
    InvalidParameter,
    InvalidRequest,
    Job,
    Output,
    Producer,
    Result,
    SamplingParams,
    StructuredOutputs,
)
from pagemill.common.structured_outputs import closed_objects
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from tests.producer.driving import Queue


class Author(BaseModel):
    name: str


class Review(BaseModel):
    label: Literal["good", "bad"]
    written: date
    authors: list[Author] = []


SCHEMA = json.dumps(closed_objects(Review.model_json_schema()), ensure_ascii=False)
TEXT = '{"label": "good", "written": "2026-11-23", "authors": [{"name": "ü"}]}'


def serve(queue: Queue, *models: str) -> None:
    for model in models:
        queue.run(registry.heartbeat(queue.name, WorkerInfo(id=model, models=(model,)), ttl_ms=300_000))


WAYS: dict[str, Callable[[Any], Any]] = {
    "of a shape": lambda given: StructuredOutputs(json=given),
    "made a shape": StructuredOutputs.from_shape,
    "of a job": lambda given: (
        Job.parse({"prompt": "p", "model": "m", "structured_outputs": given}).structured_outputs
    ),
    "in a job's mapping": lambda given: (
        Job.parse({"prompt": "p", "model": "m", "structured_outputs": {"json": given}}).structured_outputs
    ),
    "as a response format": lambda given: (
        Job.parse({"prompt": "p", "model": "m", "response_format": given}).structured_outputs
    ),
    "of an engine": lambda given: SamplingParams(structured_outputs=given).structured_outputs,
    "in an engine's mapping": lambda given: (
        SamplingParams(structured_outputs={"json": given}).structured_outputs
    ),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("take", WAYS.values(), ids=WAYS)
def test_a_pydantic_class_is_its_schema(take: Callable[[Any], Any]) -> None:
    assert take(Review) == StructuredOutputs(json=SCHEMA)


@pytest.mark.parametrize(
    "fields", [{"json_schema": Review}, {"structured_outputs": Review}, {"response_format": Review}], ids=str
)
def test_a_pipeline_takes_one_too(fields: dict[str, Any]) -> None:
    recipe = Pipeline("{{ text }}", model="m", **fields).recipe
    assert recipe.fields["structured_outputs"] == {"json": SCHEMA}
    assert recipe.wants_json
    json.dumps(recipe.settings())


def test_a_class_is_the_same_work_as_its_schema() -> None:
    job = {"prompt": "p", "model": "m", "temperature": 0.0}
    digests = {
        Job.parse({**job, "structured_outputs": given}).digest()
        for given in (Review, {"json": Review}, {"json": json.loads(SCHEMA)}, {"json": SCHEMA})
    }
    assert len(digests) == 1


class Anything(BaseModel, extra="allow"):
    inner: Author
    tags: dict[str, Author] = {}


def test_objects_of_a_class_are_closed_unless_it_allows_more() -> None:
    schema = json.loads(StructuredOutputs(json=Anything).json or "")  # type: ignore[arg-type]
    assert schema["additionalProperties"] is True
    assert schema["$defs"]["Author"]["additionalProperties"] is False
    assert schema["properties"]["tags"]["additionalProperties"] == {"$ref": "#/$defs/Author"}
    # An object that is passed as a schema keeps its meaning.
    assert (
        json.loads(StructuredOutputs(json=Author.model_json_schema()).json or "")
        == Author.model_json_schema()
    )  # type: ignore[arg-type]


_OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [_OBJECT, {"type": "object", "properties": {"b": {}}}]},
        {**_OBJECT, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
        {"properties": {"b": {}}, "$ref": "#/$defs/a", "$defs": {"a": _OBJECT}},
        {"items": {"if": _OBJECT, "then": {"properties": {"c": {}}}}},
        {**_OBJECT, "required": ["a", "b"]},
        {"type": "object"},
        True,
    ],
    ids=str,
)
def test_composed_objects_stay_open(schema: Any) -> None:
    assert closed_objects(schema) == schema


def test_values_that_look_like_schemas_stay() -> None:
    schema = {"anyOf": [_OBJECT, {"const": _OBJECT}, {"enum": [_OBJECT], "default": _OBJECT}]}
    closed = {**_OBJECT, "additionalProperties": False}
    assert closed_objects(schema) == {"anyOf": [closed, *schema["anyOf"][1:]]}


class Odd(BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    thing: Callable[[], None]


def test_a_class_without_a_schema_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="Odd has no JSON schema"):
        StructuredOutputs(json=Odd)  # type: ignore[arg-type]
    with pytest.raises(InvalidJob, match="Odd has no JSON schema"):
        Job.parse({"prompt": "p", "model": "m", "structured_outputs": Odd})
    with pytest.raises(InvalidRequest, match="Odd has no JSON schema"):
        SamplingParams(structured_outputs=Odd)  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match="Odd has no JSON schema"):
        Pipeline(json_schema=Odd)
    with pytest.raises(InvalidParameter, match="or a pydantic class"):
        StructuredOutputs.from_shape(int)


def result(text: str, finish_reason: Any = "stop", parsed: Any = None) -> Result:
    return Result(
        id="a", model="m", outputs=(Output(index=0, text=text, finish_reason=finish_reason, parsed=parsed),)
    )


def test_a_result_parses_into_a_class() -> None:
    found = result(TEXT, parsed=json.loads(TEXT))
    assert found.parsed == json.loads(TEXT)
    review = found.parse(Review)
    assert (review.label, review.written, review.authors) == ("good", date(2026, 11, 23), [Author(name="ü")])
    assert found.outputs[0].parse(dict[str, Any])["label"] == "good"
    assert result("plain").parsed is None


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            result(TEXT[:20], "length"),
            "reached max_tokens before its JSON was complete; submit the job again",
        ),
        (
            result('{"label": "good", "rating": 5, "rating_count": 1, "ra', "length"),
            r"that Review does not declare \(rating, rating_count\): set extra='forbid'",
        ),
        (
            result('{"label": "so-so", "written": "2026-11-23"}'),
            "the output is not a valid Review: label: Input should be",
        ),
        (result("no JSON"), "the output is not a valid Review"),
    ],
)
def test_what_does_not_parse_says_why(found: Result, says: str) -> None:
    with pytest.raises(InvalidOutput, match=says) as error:
        found.parse(Review)
    assert isinstance(error.value, ValueError)


def test_a_producer_has_a_model_and_defaults(queue: Queue) -> None:
    defaults = {"max_tokens": 7, "temperature": 0.0, "priority": "high"}
    with Producer(queue.url, queue=queue.name, model="m", defaults=defaults) as producer:
        producer.submit(prompt="a")
        producer.submit({"prompt": "b", "max_tokens": 9}, priority="high")
        producer.submit_many(
            [{"prompt": "c"}, {"prompt": "d"}, {"prompt": "e", "model": "m", "max_tokens": 3}]
        )
        producer.submit(Job(prompt="f", model="m", priority="high"))
    jobs = [Job.from_payload(pulled.payload) for pulled in queue.pull(10)]
    found = {job.prompt: (job.model, job.max_tokens, job.temperature, job.priority) for job in jobs}
    assert found == {
        "a": ("m", 7, 0.0, "high"),
        "b": ("m", 9, 0.0, "high"),
        "c": ("m", 7, 0.0, "high"),
        "d": ("m", 7, 0.0, "high"),
        "e": ("m", 3, 0.0, "high"),
        "f": ("m", None, 1.0, "high"),
    }


@pytest.mark.parametrize(
    "options", [{"model": "no model"}, {"defaults": {"max_token": 3}}, {"defaults": {"n": 0}}]
)
def test_defaults_are_checked_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob):
        Producer("redis://127.0.0.1:1", **options)


def test_the_model_may_be_left_out_where_one_is_served(queue: Queue, producer: Producer) -> None:
    with pytest.raises(InvalidJob, match=f"the job needs a model: no worker of queue {queue.name} is ready"):
        producer.submit(prompt="a")
    serve(queue, "m")
    assert producer.submit(prompt="a").status().model == "m"
    assert producer.submit({"prompt": "a", "model": "other"}).status().model == "other"
    batch = producer.submit_many({"prompt": text} for text in "bc")
    assert batch.counts().queued == 2
    assert producer.submit_many([]).counts().total == 0
    serve(queue, "n")
    with pytest.raises(InvalidJob, match="the job needs a model: the live workers serve m, n") as refused:
        producer.submit_many([{"prompt": "a"}])
    assert refused.value.param == "model"


async def test_so_it_may_on_asyncio(queue: Queue, aio: AsyncProducer) -> None:
    serve(queue, "m")
    handle = await aio.submit(prompt="a")
    assert (await handle.status()).model == "m"
    batch = await aio.submit_many([{"prompt": "a"}, {"prompt": "b", "model": "other"}])
    assert (await batch.counts()).queued == 2
    assert sorted(job.job_id for job in queue.pull(10))


def test_a_pipeline_runs_on_what_is_served(queue: Queue, producer: Producer, tmp_path: Any) -> None:
    with pytest.raises(InvalidJob, match="the job needs a model"):
        Pipeline("{{ text }}").run([{"text": "a"}], out=tmp_path / "out.jsonl", producer=producer)
    assert list(tmp_path.iterdir()) == []
