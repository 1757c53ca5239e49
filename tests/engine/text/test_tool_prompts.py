"""Chats with tools on real templates and a real vocabulary: prompts, and forced calls that are always valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from pagemill.common.chat.families import TOOLS
from pagemill.common.chat.thinking import THINKING, ReasoningParser
from pagemill.common.schema_rewriting import Rewritten, rewritten
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError, InvalidRequest, UnsupportedFeature
from pagemill.engine.llm import LLM
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.structured_output.matcher import compile_schema
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary
from pagemill.engine.text import call_grammar
from pagemill.engine.text.call_grammar import is_text_schema
from pagemill.engine.text.chat import ChatFormat, ChatOptions
from pagemill.engine.text.numbered_calls import number_calls
from pagemill.engine.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from pagemill.producer.wire.chat.parser import parse_whole

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TURNS: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
TEMPLATE = """{%- if tools %}TOOLS{{ tools | tojson }}{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}{% endfor %}{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% elif begins %}<think>
{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(packaged_model_directory())


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """The same vocabulary with a template like Qwen3's."""
    directory: Path = tmp_path_factory.mktemp("templated")
    for file in packaged_model_directory().glob("*token*"):
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return HuggingFaceTokenizer(directory)


def test_the_names_are_those_of_the_tables() -> None:
    for name in (*TOOLS, "none"):
        assert EngineConfig(model="echo", tool_call_parser=name).tool_call_parser == name
    assert get_args(ReasoningParser) == (*THINKING, "none")
    with pytest.raises(ConfigError, match="'hermes'"):
        EngineConfig(model="echo", tool_call_parser="klingon")


def test_a_template_without_tools_gets_them_explained(tokenizer: HuggingFaceTokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        *TURNS,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "c"},
    ]
    chat = ChatFormat(tokenizer).prepare(history, ChatOptions(tools=[TOOL]), SamplingParams())
    assert chat.syntax.tools == "json"
    assert "You can call these functions" in chat.prompt
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in chat.prompt
    assert "The function returned: sun" in chat.prompt
    assert "You can call" not in ChatFormat(tokenizer).prepare(TURNS, ChatOptions(), SamplingParams()).prompt


def test_a_template_with_tools_gets_them_as_they_are(templated: HuggingFaceTokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [*TURNS, {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat = ChatFormat(templated).prepare(turns, ChatOptions(tools=[TOOL]), SamplingParams())
    assert (chat.syntax.tools, chat.syntax.thinking, chat.syntax.is_open) == ("hermes", "think", False)
    assert '"name": "weather"' in chat.prompt
    assert "<tool_call>Rome" in chat.prompt


def test_the_prompt_says_whether_the_thinking_has_begun(templated: HuggingFaceTokenizer) -> None:
    chats = ChatFormat(templated)

    def syntax(**options: Any) -> str:
        return str(chats.prepare(TURNS, ChatOptions(**options), SamplingParams()).syntax)

    assert syntax() == "think/"
    assert syntax(template_kwargs={"begins": True}) == "think+/"
    assert syntax(template_kwargs={"enable_thinking": False}) == "/"
    assert syntax(reasoning_effort="none") == "/"
    assert syntax(reasoning_effort="high") == "think/"


def test_an_effort_that_the_template_does_not_know_is_refused(tokenizer: HuggingFaceTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="use thinking_token_budget"):
        ChatFormat(tokenizer).prepare(TURNS, ChatOptions(reasoning_effort="low"), SamplingParams())


def test_no_reasoning_is_accepted_from_a_model_that_has_none(tokenizer: HuggingFaceTokenizer) -> None:
    params, off = SamplingParams(), ChatOptions(reasoning_effort="none")
    plain = ChatFormat(tokenizer).prepare(TURNS, ChatOptions(), params)
    assert ChatFormat(tokenizer).prepare(TURNS, off, params) == plain
    with pytest.raises(InvalidRequest, match="no such variable"):
        ChatFormat(tokenizer, thinking="think").prepare(TURNS, off, params)


@pytest.mark.parametrize("more", [{}, {"strict": True}], ids=["forced", "strict"])
def test_parameters_are_closed_unless_the_schema_says_otherwise(
    tokenizer: HuggingFaceTokenizer, more: dict[str, Any]
) -> None:
    """A model would invent arguments, which JSON Schema allows by default."""
    place = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

    def grammar(parameters: dict[str, Any]) -> str:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}
        options = ChatOptions(tools=[tool], choice="required")
        shape = ChatFormat(tokenizer, "hermes").prepare(TURNS, options, SamplingParams()).params
        assert shape.structured_outputs is not None
        return str(shape.structured_outputs.grammar)

    nested = {"type": "object", "properties": {"place": place}}
    assert grammar(nested).count('"additionalProperties": false') == 2
    assert grammar(place | {"additionalProperties": True}).count('"additionalProperties": false') == 0


def test_numbers_of_parameters_are_enforced(tokenizer: HuggingFaceTokenizer) -> None:
    def grammar(parameter: dict[str, Any]) -> str:
        parameters = {"type": "object", "properties": {"p": parameter}}
        options = ChatOptions(
            tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}],
            choice="required",
        )
        shape = ChatFormat(tokenizer, "hermes").prepare(TURNS, options, SamplingParams()).params
        assert shape.structured_outputs is not None
        return str(shape.structured_outputs.grammar)

    assert '"minimum": 1e-14' in grammar({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5})
    with pytest.raises(UnsupportedFeature, match="tools: the integer 1152921504606846977"):
        grammar({"enum": [2**60 + 1]})


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
            '{"b": 1}',
            '{"c": 1}',
        ),
        ({"items": {"type": "string", "format": "uuid4"}, "type": "array"}, '["x"]', "[1]"),
        ({"type": "integer", "not": {"minimum": 9}}, "8", "9"),
        ({"type": "array", "minItems": 1, "contains": {}}, None, None),
    ],
)
def test_parameters_have_the_keywords_of_schemas_that_grammars_enforce(
    tokenizer: HuggingFaceTokenizer, family: str, schema: Any, good: str | None, bad: str | None
) -> None:
    parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    options = ChatOptions(tools=[tool], choice="required")
    chat = ChatFormat(tokenizer, family).prepare(TURNS, options, SamplingParams())
    assert chat.params.structured_outputs is not None
    vocabulary = GrammarVocabulary.from_tokenizer(ByteTokenizer(), 264, (256,))
    assert vocabulary is not None
    tokens = vocabulary.build()
    grammar = str(chat.params.structured_outputs.grammar)
    if good is None or bad is None:
        with pytest.raises(UnsupportedFeature, match="contains"):
            compile_schema(tokens, "grammar", grammar)
        return
    call = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"p": VALUE}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=p>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    }[family]
    matcher = compile_schema(tokens, "grammar", grammar).matcher
    for value, is_allowed in ((good, True), (bad, False)):
        written = list(call.replace("VALUE", value).encode())
        assert (matcher.deep_copy().validate_tokens(written) == len(written)) == is_allowed


def test_tools_beyond_the_limit_of_grammars_are_refused_soon(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def read_and_rewritten(text: str, *, is_loose: bool) -> Rewritten:
        read.append(text)
        return rewritten(text, is_loose=is_loose)

    monkeypatch.setattr(call_grammar, "rewritten", read_and_rewritten)
    parameters = {"type": "object", "properties": {"p": {"description": "x" * 30_000}}}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(9)]
    with pytest.raises(InvalidRequest, match="more than 65536 characters") as refused:
        ChatFormat(tokenizer, "hermes").prepare(
            TURNS, ChatOptions(tools=tools, choice="required"), SamplingParams()
        )
    assert (refused.value.code, len(read)) == ("schema_too_complex", 3)


@pytest.mark.parametrize(("is_parallel", "calls"), [(None, 1), (False, 1), (True, 16)])
def test_one_call_is_forced_unless_several_are_allowed(
    tokenizer: HuggingFaceTokenizer, is_parallel: bool | None, calls: int
) -> None:
    options = ChatOptions(tools=[TOOL], choice="required", is_parallel=is_parallel)
    shape = (
        ChatFormat(tokenizer, "hermes").prepare(TURNS, options, SamplingParams()).params.structured_outputs
    )
    assert shape is not None
    assert (f"{{0,{calls - 1}}}" in str(shape.grammar)) == (calls > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [None, "hermes", "mistral_args", "llama3_json", "deepseek_v31", "kimi_k2", "qwen3_coder", "glm45", "seed_oss",
     "minimax_m2", "deepseek_v32"],
)  # fmt: skip
def test_a_real_model_s_forced_calls_are_valid(name: str | None, llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    options = ChatOptions(tools=[TOOL], choice="required")
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=7)
    chat = ChatFormat(tokenizer, name).prepare(TURNS, options, params)
    (output,) = llm.generate([chat.prompt], chat.params)
    answer = parse_whole(chat.syntax, output.outputs[0].text)
    (call,) = answer.calls
    assert (answer.content, call.name) == ("", "weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")


def test_calls_of_kimi_are_numbered(templated: HuggingFaceTokenizer) -> None:
    def called(*names: str) -> dict[str, Any]:
        calls = [{"id": f"id-{name}", "function": {"name": name, "arguments": "{}"}} for name in names]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    turns = [
        called("f", "g"),
        {"role": "tool", "tool_call_id": "id-g"},
        called("f"),
        {"role": "tool", "tool_call_id": "id-f"},
    ]
    number_calls(turns)
    assert [call["id"] for turn in turns for call in turn.get("tool_calls", ())] == [
        "functions.f:0",
        "functions.g:1",
        "functions.f:2",
    ]
    assert [turn["tool_call_id"] for turn in turns if turn["role"] == "tool"] == [
        "functions.g:1",
        "functions.f:2",
    ]


@pytest.mark.parametrize(
    ("schema", "is_text"),
    [
        ({"type": "string"}, True), ({"type": ["string", "null"]}, True), ({"type": "integer"}, False),
        ({"enum": ["a", "b"]}, True), ({"enum": ["a", 1]}, False), ({"const": "a"}, True),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, True),
        ({"anyOf": [{"type": "null"}, {"type": "array"}]}, False), ({"$ref": "#/$defs/name"}, True),
        ({"$ref": "#/$defs/loop"}, False), ({"$ref": "#/$defs/none"}, False),
        ({"$ref": "https://example.com/x"}, False), ({}, False), (True, False),
    ],
)  # fmt: skip
def test_texts_are_known_by_their_schema(schema: Any, is_text: bool) -> None:
    root = {"$defs": {"name": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert is_text_schema(schema, root) == is_text


ELEMENTS = ["qwen3_coder", "glm45", "minimax_m2", "seed_oss", "deepseek_v32"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("family", ["hermes", *ELEMENTS])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": []},
        {"type": "object", "properties": None, "required": None},
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": False}, "required": None},
        [],
        {},
    ],
)
def test_empty_parameters_may_be_those_of_php_and_go(
    templated: HuggingFaceTokenizer, parameters: Any, family: str, choice: Any
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    options = ChatOptions(tools=[tool], choice=choice)
    chat = ChatFormat(templated, family).prepare(TURNS, options, SamplingParams())
    assert '"properties": []' not in chat.prompt
    if chat.params.structured_outputs is not None:
        vocabulary = GrammarVocabulary.from_tokenizer(templated, 49152, (0,))
        assert vocabulary is not None
        compile_schema(vocabulary.build(), "grammar", str(chat.params.structured_outputs.grammar))


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize(
    "parameters",
    [
        True,
        [{}],
        "x",
        {"properties": "x"},
        {"properties": {"a": None}},
        {"properties": {"a": "string"}},
        {"properties": {"a": {}}, "required": True},
    ],
)
def test_parameters_that_are_no_schema_are_refused(
    templated: HuggingFaceTokenizer, parameters: Any, family: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(InvalidRequest, match="tools: the parameters of f are not a JSON schema"):
        ChatFormat(templated, family).prepare(TURNS, ChatOptions(tools=[tool]), SamplingParams())


def test_too_many_names_of_parameters_are_refused(templated: HuggingFaceTokenizer) -> None:
    properties = {f"{number:0>1000}": {"type": "integer"} for number in range(17)}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": properties}},
    }
    with pytest.raises(InvalidRequest, match="more than 16384 characters"):
        ChatFormat(templated, "qwen3_coder").prepare(TURNS, ChatOptions(tools=[tool]), SamplingParams())


@pytest.mark.slow
def test_a_model_in_this_process_takes_tools_and_variables(llm: LLM) -> None:
    """Like a job: the same prompt, and a forced call that the schema allows."""
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=7)
    assert llm.engine.tokenizer is not None
    chat = ChatFormat(llm.engine.tokenizer).prepare(
        TURNS, ChatOptions(tools=[TOOL], choice="required"), params
    )
    for choice in ("required", "weather"):
        (output,) = llm.chat(TURNS, params, tools=[TOOL], tool_choice=choice, use_tqdm=False)
        assert output.prompt_token_ids == llm.engine.tokenizer.encode(chat.prompt, add_special_tokens=False)
        (call,) = parse_whole(chat.syntax, output.outputs[0].text).calls
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    (output,) = llm.chat(TURNS, SamplingParams(max_tokens=1), chat_template_kwargs={"a": 1}, use_tqdm=False)
    assert output.error is None
    with pytest.raises(InvalidRequest):
        llm.chat(TURNS, params, tools=[TOOL], tool_choice="no_such", use_tqdm=False)
    with pytest.raises(
        InvalidRequest, match="reasoning_effort: the model's chat template has no such variable"
    ):
        llm.chat(TURNS, params, reasoning_effort="low", use_tqdm=False)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", num_kv_blocks=128, num_threads=1)


def with_template(directory: Path, template: str) -> HuggingFaceTokenizer:
    for file in packaged_model_directory().glob("*token*"):
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "chat_template.jinja").write_text(template)
    return HuggingFaceTokenizer(directory)


CALLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
CALLS += "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}{{ tools }}"
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
JSON_CALL = '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}"
BY_KEY = "{% for key, value in c.function.arguments.items() %}"
WRITTEN = [
    ("hermes", f"<tool_call>\n{JSON_CALL}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"arguments": ' + ARGUMENTS + ', "name": "' + NAME + '"}\n</tool_call>'),
    (
        "glm45",
        "{{ '<tool_' }}{{ 'call>' }}" + f"{NAME}\n{BY_KEY}<arg_key>" + "{{ key }}</arg_key>\n"
        "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>",
    ),
    ("glm45", f"<tool_call>{NAME}\n{BY_KEY}<arg_" + "{{ 'key>' }}{{ key }}</arg_key>\n"
     "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>"),
    ("minimax_m2", f'<minimax:tool_call>\n<invoke name="{NAME}">\n{BY_KEY}<parameter name="' + '{{ key }}">'
     "{{ value }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>"),
    ("qwen3_coder", f"<tool_call>\n<function={NAME}>\n{BY_KEY}<parameter=" + "{{ key }}>\n{{ value }}\n</parameter>\n"
     "{% endfor %}</function>\n</tool_call>"),
    ("mistral_args", f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}"),
    ("mistral", f"[TOOL_CALLS][{JSON_CALL}]"),
    ("json", JSON_CALL),
    (None, '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "' + NAME + '", "parameters": ' + ARGUMENTS
     + "}]<|END_ACTION|>"),
    (None, f"<tool_call>{NAME}({ARGUMENTS})</tool_call>"),
    (None, f"<call>{JSON_CALL}</call>"),
    (None, f"<tool_call><name>{NAME}</name><args>{ARGUMENTS}</args></tool_call>"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "call"), WRITTEN, ids=range(len(WRITTEN)))
def test_the_family_reads_what_the_template_writes(family: str | None, call: str, tmp_path: Path) -> None:
    chats = ChatFormat(with_template(tmp_path, CALLS.replace("CALL", call)))
    options = ChatOptions(tools=[TOOL])
    if family is None:
        with pytest.raises(UnsupportedFeature, match=r"tools: the calls of .* are not supported"):
            chats.prepare(TURNS, options, SamplingParams())
        return
    assert chats.prepare(TURNS, options, SamplingParams()).syntax.tools == family


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize("arguments", ["", " ", "\n", "null", "{}", None])
def test_empty_arguments_are_an_empty_object(arguments: str | None, has_tools: bool, tmp_path: Path) -> None:
    template = CALLS.replace("CALL", f"[{ARGUMENTS}]{BY_KEY}" + "{{ key }}{% endfor %}")
    tokenizer = with_template(tmp_path, template if has_tools else template.replace("{{ tools }}", ""))
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [*TURNS, {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = ChatFormat(tokenizer).prepare(turns, ChatOptions(), SamplingParams()).prompt
    assert ("[{}]" if has_tools else '"arguments": {}') in prompt


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "{", "[1]", "3", '"x"', "x"])
def test_arguments_that_are_no_object_name_the_message(
    arguments: str, tokenizer: HuggingFaceTokenizer
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [*TURNS, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(InvalidRequest, match=r"^messages\.1\.tool_calls\.0\.function\.arguments: "):
        ChatFormat(tokenizer).prepare(turns, ChatOptions(), SamplingParams())


def test_explained_tools_and_calls_keep_their_letters(tokenizer: HuggingFaceTokenizer) -> None:
    tool = {"type": "function", "function": TOOL["function"] | {"description": "获取天气"}}
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "罗马"}'}}
    turns = [*TURNS, {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = ChatFormat(tokenizer).prepare(turns, ChatOptions(tools=[tool]), SamplingParams()).prompt
    assert "获取天气" in prompt
    assert "罗马" in prompt
    assert "\\u" not in prompt
