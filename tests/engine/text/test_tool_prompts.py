"""Chats with tools on real templates and a real vocabulary: prompts, and forced calls that are valid as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from pagemill.chat.families import TOOLS, ToolParser
from pagemill.chat.parser import parse_whole
from pagemill.chat.thinking import THINKING, ReasoningParser
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError, InvalidRequest
from pagemill.engine.llm import LLM
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.chat import ChatFormat, ChatOptions
from pagemill.engine.text.tokenizer import HuggingFaceTokenizer

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
    assert get_args(ToolParser) == (*TOOLS, "none")
    assert get_args(ReasoningParser) == (*THINKING, "none")
    with pytest.raises(ConfigError, match="'hermes'"):
        EngineConfig(model="echo", tool_call_parser="klingon")  # type: ignore[arg-type]


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


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "hermes", "mistral_args", "llama3_json", "deepseek_v31"])
def test_a_real_model_s_forced_calls_are_valid(name: str | None, llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    options = ChatOptions(tools=[TOOL], choice="required", is_parallel=False)
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=7)
    chat = ChatFormat(tokenizer, name).prepare(TURNS, options, params)
    (output,) = llm.generate([chat.prompt], chat.params)
    answer = parse_whole(chat.syntax, output.outputs[0].text)
    (call,) = answer.calls
    assert (answer.content, call.name) == ("", "weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", num_kv_blocks=128, num_threads=1)
