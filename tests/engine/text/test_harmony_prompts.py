"""Chats with gpt-oss: the template's input, the start of a structure, and rejected requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagemill.engine.errors import UnsupportedFeature
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.structured_output.outlined import OutlinedGrammar, TagVocabulary
from pagemill.engine.text.chat import ChatFormat, ChatOptions
from pagemill.engine.text.harmony_turns import harmony_turns
from pagemill.engine.text.tokenizer import HuggingFaceTokenizer

SPECIAL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TEMPLATE = """{%- if tools %}{{ tools | length }} tools, {% endif -%}
reasoning {{ reasoning_effort or 'medium' }}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif -%}
<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}<|start|>assistant"""
TURNS: list[Any] = [{"role": "user", "content": "Where?"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ANALYSIS = "<|start|>assistant<|channel|>analysis<|message|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """Bytes and gpt-oss' special tokens, with a template that takes its messages' fields."""
    directory: Path = tmp_path_factory.mktemp("harmony")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    raw.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text('{"model_type": "gpt_oss"}')
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return HuggingFaceTokenizer(directory)


def called(*names: str) -> list[dict[str, Any]]:
    return [
        {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}
        for name in names
    ]


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id-{name}", "content": f"of {name}"}


def test_every_chat_is_read_by_its_channels(tokenizer: HuggingFaceTokenizer) -> None:
    chats = ChatFormat(tokenizer)
    assert chats.parses_every_chat
    chat = chats.prepare(TURNS, ChatOptions(), SamplingParams())
    assert str(chat.syntax) == "harmony/"
    assert chat.prompt == "reasoning medium<|start|>user<|message|>Where?<|end|><|start|>assistant"
    assert not chat.params.skip_special_tokens
    stops = {tokenizer.decode([token], skip_special_tokens=False) for token in chat.params.stop_token_ids}
    assert stops == {"<|return|>", "<|call|>"}
    assert chat.task.outline is None
    assert not ChatFormat(tokenizer, thinking="none").parses_every_chat


def test_effort_and_tools_reach_the_template(tokenizer: HuggingFaceTokenizer) -> None:
    options = ChatOptions(tools=[TOOL], reasoning_effort="high")
    chat = ChatFormat(tokenizer).prepare(TURNS, options, SamplingParams())
    assert chat.prompt.startswith("1 tools, reasoning high<|start|>")
    assert str(chat.syntax) == "harmony/harmony"
    for effort in ("none", "minimal", "xhigh"):
        with pytest.raises(UnsupportedFeature, match=f"knows low, medium, high, not {effort}"):
            ChatFormat(tokenizer).prepare(TURNS, ChatOptions(reasoning_effort=effort), SamplingParams())


def test_every_call_has_a_message_and_its_result(tokenizer: HuggingFaceTokenizer) -> None:
    turns = [
        *TURNS,
        {"role": "assistant", "content": None, "reasoning": "Two.", "tool_calls": called("f", "g")},
        result("g"),
        result("f"),
    ]
    prompt = ChatFormat(tokenizer).prepare(turns, ChatOptions(tools=[TOOL]), SamplingParams()).prompt
    arguments = '<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    answer = "<|start|>functions to=assistant<|channel|>commentary<|message|>of {}<|end|>"
    assert prompt.endswith(
        f"Where?<|end|>{ANALYSIS}Two.<|end|>"
        f"<|start|>assistant to=functions.f{arguments}{answer.format('f')}"
        f"<|start|>assistant to=functions.g{arguments}{answer.format('g')}<|start|>assistant"
    )


def test_a_text_before_a_call_is_a_preamble(tokenizer: HuggingFaceTokenizer) -> None:
    turn = {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": called("f")}
    prompt = ChatFormat(tokenizer).prepare([*TURNS, turn], ChatOptions(), SamplingParams()).prompt
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    assert f"{ANALYSIS}Hm.<|end|>{preamble}<|start|>assistant to=functions.f" in prompt


def test_results_without_a_call_stay(tokenizer: HuggingFaceTokenizer) -> None:
    turns = [
        {"role": "assistant", "content": "", "tool_calls": called("f")},
        result("g"),
        *TURNS,
        result("f"),
    ]
    assert harmony_turns(turns) == turns


CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}
FORCED = ChatOptions(tools=[TOOL], choice="required", is_parallel=True)


@pytest.mark.parametrize(
    ("options", "params", "header"),
    [
        (ChatOptions(), CHOICE, "<|start|>assistant<|channel|>final<|message|>"),
        (
            ChatOptions(),
            CHOICE | {"thinking_token_budget": 3},
            "<|start|>assistant<|channel|>final<|message|>",
        ),
        (ChatOptions(), {"thinking_token_budget": 3}, ""),
        (FORCED, {}, "<|start|>assistant"),
        (
            ChatOptions(tools=[TOOL]),
            {"structured_outputs": {"json": {"type": "object"}}},
            "<|start|>assistant",
        ),
        (ChatOptions(tools=[TOOL], is_parallel=False), {}, ""),
    ],
    ids=["choice", "budget", "budget alone", "forced", "either", "triggered"],
)
def test_a_structure_begins_after_reasoning_that_the_prompt_opens(
    tokenizer: HuggingFaceTokenizer, options: ChatOptions, params: dict[str, Any], header: str
) -> None:
    chat = ChatFormat(tokenizer).prepare(TURNS, options, SamplingParams(**params))
    assert chat.prompt.endswith(ANALYSIS)
    assert chat.syntax.is_open
    outline = chat.task.outline
    assert outline is not None
    assert outline.thinking is not None
    assert outline.thinking.closing == f"<|end|>{header}"
    assert outline.thinking.decided_by == ("<|end|>" if header else "")
    assert tokenizer.decode(outline.thinking.closing_ids, skip_special_tokens=False) == f"<|end|>{header}"
    if options is FORCED:
        grammar = chat.params.structured_outputs.grammar  # type: ignore[union-attr]
        assert "{0," not in str(grammar)  # one call, since the format ends with it


def test_the_end_of_the_reasoning_forces_the_header(tokenizer: HuggingFaceTokenizer) -> None:
    chat = ChatFormat(tokenizer).prepare(TURNS, ChatOptions(), SamplingParams(**CHOICE))
    outline = chat.task.outline
    assert outline is not None
    assert outline.thinking is not None

    def text_of(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    vocabulary = TagVocabulary(text_of, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    started = []

    class Structure:
        is_ready = True
        failure = None
        is_complete = False

        def allowed_token_ids(self) -> list[int]:
            return [1]

    def start() -> Any:
        started.append(1)
        return Structure()

    thoughts, closing = tokenizer.encode("Hm", add_special_tokens=False), list(outline.thinking.closing_ids)
    for cut in range(len(closing) + 1):
        grammar = OutlinedGrammar(outline, vocabulary, start)
        grammar.replay([*thoughts, *closing[:cut]])
        for number in range(cut, len(closing)):
            assert grammar.allowed_token_ids() == (closing[number : number + 1] if number else None)
            assert grammar.advance(closing[number]) == []
        assert grammar.allowed_token_ids() == [1]
    mask = OutlinedGrammar(outline, vocabulary, start).token_mask()
    end = tokenizer.eos_token_id or 0
    assert mask is not None
    assert not mask[end >> 3] >> (end & 7) & 1


def test_a_label_follows_the_header_of_an_answer(tokenizer: HuggingFaceTokenizer) -> None:
    params = SamplingParams(**CHOICE, label_probs="product")
    chat = ChatFormat(tokenizer).prepare(TURNS, ChatOptions(), params)
    assert chat.prompt.endswith("<|start|>assistant<|channel|>final<|message|>")
    assert chat.task.outline is None
    assert str(chat.syntax) == "/"
