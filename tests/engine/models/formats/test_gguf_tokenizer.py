"""The tokenizer's fields of a GGUF file: each is used, has no effect, or is rejected with its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.formats.gguf_tokenizer import (
    check_tokenizer_field,
    correct_tokenizer,
    end_token_ids,
)


@dataclass
class Field:
    value: Any

    def contents(self) -> Any:
        return self.value


@dataclass
class Reader:
    values: dict[str, Any] = field(default_factory=dict)

    def get_field(self, key: str) -> Field | None:
        return Field(self.values[key]) if key in self.values else None


def reader(**values: Any) -> Reader:
    return Reader({f"tokenizer.ggml.{name}": value for name, value in values.items()})


TOKENS = ["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"token_type": [1, 3, 3, 3, 1, 1, 1]}, [1, 2, 3]),
        ({"token_type": [1, 3, 3, 3, 1, 1, 1], "eot_token_id": 2}, [1, 2]),
        ({"token_type": [1, 3, 3, 3, 1, 1, 1], "eos_token_ids": [1, 0]}, [1, 0]),
        ({"token_type": [1, 3, 1, 1, 1, 1, 1]}, [1]),
        ({"token_type": [1, 3, 1, 1, 3, 1, 1]}, [1, 4]),
        ({"token_type": [1, 3, 1, 1, 3, 3, 3]}, [1, 5, 6]),
    ],
)
def test_end_tokens_without_fields_are_found_by_name(values: dict[str, Any], expected: list[int]) -> None:
    assert end_token_ids(reader(tokens=TOKENS, eos_token_id=1, **values)) == expected
    assert end_token_ids(reader()) == []


def test_what_transformers_misreads_is_as_the_file_says() -> None:
    backend = Tokenizer(BPE({"<s>": 0, "</s>": 1, "Ġa": 2}, [], unk_token="<s>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<s>", clean_up_tokenization_spaces=True
    )
    fields = {"bos_token_id": 0, "eos_token_id": 1, "padding_token_id": 1, "unknown_token_id": 3}
    correct_tokenizer(tokenizer, reader(model="gpt2", tokens=["<s>", "</s>", "Ġa"], **fields))
    assert [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token] == ["<s>", "</s>", "</s>"]
    assert tokenizer.unk_token is None
    assert not tokenizer.clean_up_tokenization_spaces
    assert tokenizer.decode([2]) == " a"
    assert not tokenizer.backend_tokenizer.model.byte_fallback


@pytest.mark.parametrize("name", ["pre", "add_eos_token", "add_sep_token", "normalizer.lowercase"])
def test_a_field_that_is_not_used_is_refused_by_name(name: str) -> None:
    values = reader(model="gpt2", **{name: "deepseek-llm" if name == "pre" else True})
    with pytest.raises(ModelLoadError, match=f"m.gguf: tokenizer.ggml.{name} = "):
        check_tokenizer_field(f"tokenizer.ggml.{name}", values, "m.gguf")


@pytest.mark.parametrize(
    ("name", "value"),
    [("pre", "llama-bpe"), ("pre", "smollm"), ("pre", "tekken"), ("pre", "gpt-2"), ("add_eos_token", False),
     ("add_bos_token", True), ("fim_pre_token_id", 3), ("seperator_token_id", 3), ("tokens", ["a"])],
)  # fmt: skip
def test_other_fields_are_accepted(name: str, value: Any) -> None:
    check_tokenizer_field(f"tokenizer.ggml.{name}", reader(model="gpt2", **{name: value}), "m.gguf")


@pytest.mark.parametrize(
    "key", ["tokenizer.chat_template", "tokenizer.chat_template.rag", "tokenizer.huggingface.json"]
)
def test_templates_are_accepted(key: str) -> None:
    check_tokenizer_field(key, Reader({key: "x"}), "m.gguf")
