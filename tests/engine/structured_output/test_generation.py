"""Generation under a schema: failing requests, their errors, and an output shape from the schema alone."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.llm import LLM, GenerationOutput
from pagemill.engine.outputs import RequestOutput, SampleState
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.structured_output import grammars
from pagemill.engine.text.tokenizer import ByteTokenizer
from tests.engine.test_resume import Sample, check_every_cut, run

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "unit": {"enum": ["cm", "mm"]}},
    "required": ["x", "unit"],
    "additionalProperties": False,
}
TICKET = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["bug", "feature", "question"]}, "maxItems": 2},
        "priority": {"type": "integer", "minimum": 1, "maximum": 5},
        "assignee": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]},
    },
    "required": ["title", "tags", "priority"],
    "additionalProperties": False,
}
RUNS_OUT = "((a{1,1000}){1,1000}){1,1000}"
"""Compiles, and reaches the library's limits after about thirty tokens."""


def shaped(**shape: Any) -> StructuredOutputs:
    return StructuredOutputs(**shape)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 80, "temperature": 0.0} | options))


@pytest.fixture(scope="module", params=[False, True], ids=["depth 0", "depth 1"])
def llm(request: pytest.FixtureRequest) -> LLM:
    """One vocabulary and one probe for all tests at this depth."""
    return LLM("echo", async_scheduling=request.param, num_kv_blocks=200)


def generate(llm: LLM, prompts: list[str], *sampling: SamplingParams) -> list[GenerationOutput]:
    results = llm.generate(prompts, list(sampling), use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.engine.stats().kv.active_blocks == 0
    return results


@pytest.mark.slow
def test_one_bad_schema_fails_only_its_own_request(llm: LLM) -> None:
    before = dict(llm.engine.stats().requests.structured_outputs)
    prompts = ['{"x": 1, "unit": "mm"}', "aab", "plain", "x", "x", "a" * 60, "y"]
    results = generate(
        llm,
        prompts,
        params(structured_outputs=shaped(json=json.dumps(POINT))),
        params(structured_outputs=shaped(regex="a+b")),
        params(),
        params(structured_outputs=shaped(regex="(")),
        params(structured_outputs=shaped(regex="(?=a)a")),
        params(structured_outputs=shaped(regex=RUNS_OUT)),
        params(structured_outputs=shaped(choice=("yes", "no"))),
    )
    assert [result.error_code for result in results] == [
        None, None, None, "schema_invalid", "unsupported_feature", "schema_too_complex", None,
    ]  # fmt: skip
    assert [result.outputs[0].text for result in results[:3]] == prompts[:3]
    assert [result.outputs[0].finish_reason for result in results[3:6]] == ["error"] * 3
    assert 20 < len(results[5].outputs[0].text) < 60, "it ran until the limit"
    after = llm.engine.stats().requests.structured_outputs
    assert {kind: after[kind] - before[kind] for kind in after} == {"valid": 3, "truncated": 0, "invalid": 3}


def test_an_output_that_its_schema_does_not_allow_fails_its_request(llm: LLM) -> None:
    unique = params(structured_outputs=shaped(json='{"type": "array", "items": {}, "uniqueItems": true}'))
    overlapping = {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 7}]}
    either = params(structured_outputs=shaped(json=json.dumps(overlapping)))
    results = generate(llm, ["[1, 2]", "[1, 1]", "9", "5"], unique, unique, either, either)
    assert [result.error_code for result in results] == [None, "schema_mismatch", None, "schema_mismatch"]
    assert [result.outputs[0].finish_reason for result in results] == ["stop", "error", "stop", "error"]


def test_a_known_bad_schema_is_refused_at_once(llm: LLM) -> None:
    bad = params(structured_outputs=shaped(regex="known to be bad ("))
    assert generate(llm, ["x"], bad)[0].error_code == "schema_invalid"
    with pytest.raises(InvalidRequest) as refusal:
        llm.generate(["good", "x"], [params(), bad], use_tqdm=False)
    assert refusal.value.code == "schema_invalid"
    assert not llm.engine.has_unfinished()


def test_others_go_on_while_a_schema_is_compiled(llm: LLM) -> None:
    slow = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}})
    engine = llm.engine
    tokens, sampling = engine.input_processor.process(
        prompt="x", params=params(structured_outputs=shaped(json=slow))
    )
    engine.add_request("slow", tokens, sampling)
    with pytest.raises(InvalidRequest, match="already running"):
        engine.add_request("slow", tokens, sampling)
    engine.add_request("quick", *engine.input_processor.process(prompt="quick", params=params()))
    written: dict[str, str] = {}
    ended: list[str] = []
    while engine.has_unfinished():
        for output in engine.step():
            written[output.request_id] = written.get(output.request_id, "") + text_of(output)
            ended += [output.request_id] * output.finished
    assert ended == ["quick", "slow"]
    assert written["quick"] == "quick"


def test_many_labels_are_tokenised_beside_the_steps(llm: LLM) -> None:
    labels = tuple(f"label number {number:04}" for number in range(400))
    engine = llm.engine
    shape = shaped(choice=labels)
    prompt = "label number 0123"
    engine.add_request(
        "many", *engine.input_processor.process(prompt=prompt, params=params(structured_outputs=shape))
    )
    written = "".join(text_of(output) for _ in iter(engine.has_unfinished, False) for output in engine.step())
    assert written == prompt
    assert not engine.has_unfinished()


def text_of(output: RequestOutput) -> str:
    return "".join(delta.text for delta in output.deltas)


def test_a_request_can_be_aborted_while_its_schema_is_compiled(llm: LLM) -> None:
    engine = llm.engine
    shape = shaped(regex="[a-z]+ that nobody has asked for before")
    engine.add_request(
        "gone", *engine.input_processor.process(prompt="x", params=params(n=2, structured_outputs=shape))
    )
    (output,) = engine.abort("gone")
    assert output.finished
    assert [delta.finish_reason for delta in output.deltas] == ["abort"] * 2
    assert not engine.has_unfinished()
    assert engine.abort("gone") == []


def test_one_that_never_fits_fails_once_its_schema_is_there(llm: LLM) -> None:
    shape = shaped(regex="(never|fits)+")
    (result,) = generate(llm, ["x" * 3000], params(n=4, max_tokens=900, structured_outputs=shape))
    assert result.error_code == "never_fits"


def test_samples_of_one_request_each_have_their_own_place(llm: LLM) -> None:
    shape = shaped(json=json.dumps(POINT))
    (result,) = generate(llm, ['{"x": 7, "unit": "cm"}'], params(n=3, structured_outputs=shape))
    assert [output.text for output in result.outputs] == ['{"x": 7, "unit": "cm"}'] * 3
    assert result.usage.completion_tokens == 3 * 22


def test_forced_tokens_are_told_apart_in_the_logprobs(llm: LLM) -> None:
    shape = shaped(json=json.dumps(POINT))
    (result,) = generate(llm, ['{"x": 7, "unit": "cm"}'], params(logprobs=0, structured_outputs=shape))
    entries = result.outputs[0].logprobs
    assert entries is not None
    assert [entry.token_id for entry in entries] == ByteTokenizer().encode('{"x": 7, "unit": "cm"}')
    assert len(entries) == len(result.outputs[0].token_ids)


def test_stop_strings_and_limits_cut_a_structure_short(llm: LLM) -> None:
    before = dict(llm.engine.stats().requests.structured_outputs)
    shape = shaped(json=json.dumps(POINT))
    prompt = '{"x": 7, "unit": "cm"}'
    stopped, short, whole = generate(
        llm,
        [prompt] * 3,
        params(stop=("unit",), structured_outputs=shape),
        params(max_tokens=12, structured_outputs=shape),
        params(max_tokens=64, structured_outputs=shape),
    )
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ('{"x": 7, "', "unit")
    assert (short.outputs[0].text, short.outputs[0].finish_reason) == ('{"x": 67, "u', "length")
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason) == (prompt, "stop")
    after = llm.engine.stats().requests.structured_outputs
    assert {kind: after[kind] - before[kind] for kind in after} == {"valid": 1, "truncated": 2, "invalid": 0}


def test_min_tokens_and_ignored_eos_do_not_outlast_the_structure(llm: LLM) -> None:
    for options in ({"min_tokens": 40}, {"ignore_eos": True}):
        for shape in (shaped(regex="ab?"), shaped(choice=("a", "ab")), shaped(json=json.dumps(POINT))):
            (result,) = generate(llm, ["a"], params(structured_outputs=shape, **options))
            assert result.outputs[0].finish_reason == "stop"
            assert len(result.outputs[0].token_ids) < 40


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        (
            '{"x": 12, "unit": "mm"}',
            {"structured_outputs": shaped(json=json.dumps(POINT))},
            '{"x": 12, "unit": "mm"}',
        ),
        ("café-12!", {"structured_outputs": shaped(regex="[a-zé]+-[0-9]+!")}, "café-12!"),
        ("x,y,", {"n": 2, "structured_outputs": shaped(grammar='start: (/[a-z]/ ",")+')}, "x,y,"),
        ("abcabc", {"stop": ("ca",), "structured_outputs": shaped(regex="(abc)+")}, "ab"),
    ],
)
def test_it_continues_from_every_cut(llm: LLM, prompt: str, options: dict[str, Any], text: str) -> None:
    whole = check_every_cut(llm.engine, prompt, params(**options))
    assert {sample.text for sample in whole} == {text}


def test_a_checkpoint_that_is_not_of_this_schema_is_refused(llm: LLM) -> None:
    engine = llm.engine
    sampling = params(structured_outputs=shaped(regex="abc"))
    tokens, resolved = engine.input_processor.process(prompt="abc", params=sampling)
    run(engine, "abc", sampling, [Sample()])
    engine.add_request("r", tokens, resolved, resume=[SampleState(0, [ord("x")])])
    (end,) = [output for _ in iter(engine.has_unfinished, False) for output in engine.step()]
    assert end.error_code == "invalid_job"
    assert end.error is not None
    assert "not what structured_outputs allows" in end.error


def test_a_schema_is_compiled_once_for_all_requests(llm: LLM) -> None:
    before = llm.engine.stats()
    shape = shaped(regex="(once|for|all)+")
    generate(llm, ["once", "for"], *[params(structured_outputs=shape)] * 2)
    generate(llm, ["all"], params(structured_outputs=shape))
    after = llm.engine.stats()
    assert after.grammars.misses - before.grammars.misses == 1
    assert after.grammars.hits - before.grammars.hits == 2
    (seconds,) = after.histograms["grammar_compile_seconds"].values()
    assert sum(seconds.counts) == after.grammars.misses


@pytest.mark.slow
def test_they_survive_preemption() -> None:
    llm = LLM("echo", num_kv_blocks=26, block_size=4, max_num_seqs=8)
    prompts = [json.dumps({"x": number, "unit": "mm"}) for number in range(100_000, 100_006)]
    sampling = params(max_tokens=40, structured_outputs=shaped(json=json.dumps(POINT)))
    results = generate(llm, prompts, *[sampling] * 6)
    assert [result.outputs[0].text for result in results] == prompts
    assert llm.engine.stats().scheduler.preemptions > 0


def test_a_model_without_a_tokenizer_refuses() -> None:
    engine = Engine.from_config(EngineConfig(model="echo", skip_tokenizer_init=True))
    for shape in (shaped(regex="a"), shaped(choice=("a",))):
        with pytest.raises(InvalidRequest) as refusal:
            engine.input_processor.process(prompt_token_ids=[1], params=params(structured_outputs=shape))
        assert refusal.value.code == "unsupported_feature"


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    return LLM("smollm2", num_kv_blocks=256, num_threads=1)


@pytest.mark.slow
def test_a_real_model_writes_what_the_schemas_say(smollm2: LLM) -> None:
    """Sampled at the maximum randomness: only the mask maintains the shape."""
    schemas: list[dict[str, Any]] = [
        POINT,
        TICKET,
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
        {"type": "string", "format": "date"},
        {"$defs": {"node": {"type": "object", "properties": {"v": {"type": "boolean"},
         "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"],
         "additionalProperties": False}}, "$ref": "#/$defs/node"},
    ]  # fmt: skip
    patterns = [r"[A-Z]{3}-\d{2,4}", r"(red|green|blue)(, (red|green|blue)){1,3}", r"#[0-9a-f]{6}"]
    prompts, sampling = [], []
    for number, shape in enumerate(
        [shaped(json=json.dumps(one)) for one in schemas] + [shaped(regex=one) for one in patterns]
    ):
        for temperature in (0.0, 1.5):
            prompts.append("Describe it:")
            sampling.append(
                params(temperature=temperature, seed=number, max_tokens=60, structured_outputs=shape)
            )
    results = generate(smollm2, prompts, *sampling)
    complete = 0
    for number, result in enumerate(results):
        assert result.error is None
        for output in result.outputs:
            if output.finish_reason != "stop":
                continue
            complete += 1
            if number // 2 < len(schemas):
                value = json.loads(output.text)
                jsonschema.validate(value, schemas[number // 2], format_checker=jsonschema.FormatChecker())
                assert output.text == json.dumps(value, ensure_ascii=False) or number // 2 in (1, 2)
            else:
                assert re.fullmatch(patterns[number // 2 - len(schemas)], output.text)
    assert complete >= 12, "of 16; the others ran into max_tokens inside a number or a list without end"
    assert smollm2.engine.stats().requests.structured_outputs == {
        "valid": complete,
        "truncated": 16 - complete,
        "invalid": 0,
    }


class Review(BaseModel):
    label: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)


@pytest.mark.slow
def test_a_pydantic_class_ends_with_a_small_model(smollm2: LLM) -> None:
    """Objects are closed: the model cannot invent properties until it reaches max_tokens."""
    prompt = "Review: The food was terrible and cold. Answer in JSON."
    one = params(temperature=0.0, max_tokens=60, structured_outputs=StructuredOutputs.from_shape(Review))
    [output] = generate(smollm2, [prompt], one)[0].outputs
    assert output.finish_reason == "stop"
    assert 1 <= Review.model_validate_json(output.text).stars <= 5


@pytest.mark.slow
def test_whose_mask_is_not_there_sits_steps_out_and_writes_the_same(
    smollm2: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A malicious request of many samples costs the others at most a bounded time per step, and no token."""
    engine = smollm2.engine
    story = params(max_tokens=12, ignore_eos=True)
    pointed = params(temperature=1.0, seed=5, structured_outputs=shaped(json=json.dumps(POINT)))
    alone = [generate(smollm2, ["Tell me:"], one)[0].outputs[0].token_ids for one in (story, pointed)]
    monkeypatch.setattr(grammars, "MASK_WAIT_S", 0.0)
    hostile = params(
        n=12,
        temperature=1.0,
        seed=2,
        max_tokens=250,
        structured_outputs=shaped(grammar="start: s\ns: s s | /[a-z ]/"),
    )
    steps = engine.stats().steps.finished
    for name, prompt, one in (
        ("hostile", "x", hostile),
        ("story", "Tell me:", story),
        ("point", "Tell me:", pointed),
    ):
        engine.add_request(name, *engine.input_processor.process(prompt=prompt, params=one))
    written: dict[str, list[int]] = {"hostile": [], "story": [], "point": []}
    ended: dict[str, tuple[str | None, int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            for delta in output.deltas:
                written[output.request_id] += delta.token_ids
            if output.finished:
                ended[output.request_id] = output.error_code, engine.stats().steps.finished - steps
        engine.check_integrity()
    assert [written["story"], written["point"]] == alone
    assert ended["story"][0] is ended["point"][0] is None
    assert ended["story"][1] <= 12 + 2, "the others cost it no step"
    assert ended["hostile"][0] == "schema_too_complex"
    assert written["hostile"], "what it had written is kept"


@pytest.mark.slow
def test_forced_tokens_cost_no_step_and_change_no_text(smollm2: LLM) -> None:
    shape = shaped(json=json.dumps(POINT))
    before = smollm2.engine.stats().steps.finished
    (result,) = generate(smollm2, ["A point:"], params(logprobs=0, structured_outputs=shape))
    output = result.outputs[0]
    entries = output.logprobs
    assert entries is not None
    num_forced = sum(entry.logprob is None for entry in entries)
    assert num_forced >= 4
    assert smollm2.engine.stats().steps.finished - before <= len(output.token_ids) - num_forced
    tokenizer = smollm2.engine.tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(output.token_ids) == output.text


SHAPES = (
    shaped(json=json.dumps(TICKET)),
    shaped(regex="[a-c]{3}-[0-9]{2,5}"),
    shaped(choice=("bug report", "bug", "question", "feature request")),
    shaped(grammar='start: /[a-z]+/ (", " /[a-z]+/)*'),
)


@pytest.mark.slow
def test_overlapped_steps_write_the_same(smollm2: LLM) -> None:
    """Each forward pass starts before the masks of its samples are known."""
    sampling = [
        params(
            max_tokens=40, temperature=1.0, seed=seed, n=1 + seed % 2, logprobs=1, structured_outputs=shape
        )
        for seed, shape in enumerate(2 * SHAPES)
    ]
    sampling.append(params(max_tokens=20, ignore_eos=True))
    prompts = [f"Note {number}: it is broken." for number in range(len(sampling))]
    overlapped = LLM("smollm2", async_scheduling=True, stage_inputs=True, num_kv_blocks=200, num_threads=1)
    both = [generate(llm, prompts, *sampling) for llm in (smollm2, overlapped)]
    one, other = ([[sample.token_ids for sample in each.outputs] for each in results] for results in both)
    assert one == other


def test_constrained_rows_are_in_each_step() -> None:
    llm = LLM("echo", async_scheduling=True, num_kv_blocks=200)
    letters = params(max_tokens=30, structured_outputs=shaped(regex="[a-z]{30}"))
    generate(llm, ["compiles it"], letters)
    before = llm.engine.stats().steps.finished
    results = generate(llm, ["abc" * 10] * 2, letters, params(max_tokens=30, ignore_eos=True))
    assert [len(result.outputs[0].token_ids) for result in results] == [30, 30]
    assert llm.engine.stats().steps.finished - before <= 34


def test_a_real_model_continues_a_structure(smollm2: LLM) -> None:
    sampling = params(seed=3, temperature=1.0, structured_outputs=shaped(json=json.dumps(POINT)))
    (whole,) = run(smollm2.engine, "A point:", sampling, [Sample()])
    jsonschema.validate(json.loads(whole.text), POINT)
    samples = run(smollm2.engine, "A point:", sampling, [Sample()], 5)
    assert samples[0].finish_reason is None
    assert run(smollm2.engine, "A point:", sampling, samples) == [whole]
