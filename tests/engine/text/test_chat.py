"""Chats: the model's own template, and the counted tokens."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.llm import LLM
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.tokenizer import HuggingFaceTokenizer

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "user", "content": "A  b\n\n  c "},
        {"role": "assistant", "content": "Yes <|im_end|> no"},
        {"role": "user", "content": "caf\u00e9 \U0001f389"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(packaged_model_directory())


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
def test_messages_become_what_the_template_makes_of_them(
    tokenizer: HuggingFaceTokenizer, messages: list[dict[str, str]]
) -> None:
    reference: Any = AutoTokenizer.from_pretrained(packaged_model_directory(), local_files_only=True)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(tokenizer.render_chat(messages, (), {}), add_special_tokens=False) == expected
    assert tokenizer.decode(expected, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 7}], ["x"], [{}]],
    ids=repr,
)
def test_what_is_no_message_is_refused(tokenizer: HuggingFaceTokenizer, messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        tokenizer.render_chat(messages, (), {})


def test_parts_of_a_text_are_one_text() -> None:
    llm = LLM("echo", num_kv_blocks=64)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chats = [[{"role": "user", "content": content}] for content in (parts, "one two")]
    first, second = (llm.chat([chat], SamplingParams(max_tokens=5), use_tqdm=False)[0] for chat in chats)
    assert first.prompt_token_ids == second.prompt_token_ids


def test_every_result_counts_its_tokens() -> None:
    llm = LLM("echo", num_kv_blocks=64, block_size=4)
    chat = [{"role": "user", "content": "x" * 20}]
    params = SamplingParams(max_tokens=5, n=2)
    first, again = [llm.chat([chat], params, use_tqdm=False)[0] for _ in range(2)]
    assert first.prompt_token_ids == list(b"x" * 20 + b"\n")
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.cached_tokens) == (
        21,
        10,
        0,
    )
    assert (again.usage.prompt_tokens, again.usage.completion_tokens, again.usage.cached_tokens) == (
        21,
        10,
        20,
    )
    (longer,) = llm.chat([[*chat, {"role": "user", "content": "y"}]], params, use_tqdm=False)
    assert (longer.usage.prompt_tokens, longer.usage.cached_tokens) == (23, 20)
    (cut,) = llm.chat([chat], SamplingParams(max_tokens=3, truncate_prompt_tokens=4), use_tqdm=False)
    assert (cut.usage.prompt_tokens, cut.usage.completion_tokens) == (4, 3)
