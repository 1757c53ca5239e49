"""Text to token ids and back. Optional: without a tokenizer the engine serves token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pagemill.engine.errors import InvalidRequest, ModelLoadError

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def piece(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None if that is unknown or there is no such token."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the conversation with the assistant's turn opened. Raises `InvalidRequest`."""
        ...

    @property
    def chat_template(self) -> str:
        """The template's source; empty if there is none."""
        ...

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Like `encode_chat`, as text, with tools and the template's variables. Raises `InvalidRequest`."""
        ...

    def to_json(self) -> str | None:
        """Return the content of a Hugging Face tokenizer.json; None if it can't be expressed as one."""
        ...


class ByteTokenizer:
    """The echo model's tokenizer: UTF-8 bytes as tokens, and 256 as EOS."""

    vocab_size = 257
    eos_token_id: int | None = 256
    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")

    def piece(self, token_id: int) -> str | None:
        return "<end>" if token_id == self.eos_token_id else byte_characters()[token_id]

    chat_template = "{{ messages, tools, enable_thinking }}"

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode(self.render_chat(messages, (), {}))

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        return "".join(f"{_text_of(m)}\n" for m in messages)

    def to_json(self) -> str:
        end = {"id": 256, "content": "<end>", "special": True, "normalized": False,
               "single_word": False, "lstrip": False, "rstrip": False}  # fmt: skip
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        vocab = {character: byte for byte, character in enumerate(byte_characters())}
        return json.dumps(
            {
                "version": "1.0",
                "added_tokens": [end],
                "pre_tokenizer": byte_level,
                "decoder": byte_level,
                "model": {"type": "BPE", "vocab": vocab, "merges": []},
            }
        )


class HuggingFaceTokenizer:
    """A tokenizer from a model directory, through transformers. Thread-safe for encoding and decoding."""

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer = _read_tokenizer(directory)
        except ModelLoadError:
            raise
        except Exception as error:  # a broken file can make transformers raise anything
            raise ModelLoadError(f"can't load the tokenizer in {directory}: {error}") from error
        # The Rust object directly: the Python wrapper costs several times as much as the decoding itself.
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self.vocab_size: int = len(self._tokenizer)
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.has_chat_template = bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._backend is not None:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str | None:
        piece: str | None = None if self._backend is None else self._backend.id_to_token(token_id)
        return piece

    @property
    def chat_template(self) -> str:
        template = self._tokenizer.chat_template or ""
        # Some models have several, by name.
        return template if isinstance(template, str) else "\n".join(template.values())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        # The template adds the special tokens itself.
        return self.encode(self.render_chat(messages, (), {}), add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        if not self.has_chat_template:
            raise InvalidRequest("the model has no chat template; send a prompt instead of messages")
        for message in messages:
            _text_of(message)
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
        except Exception as error:  # the template is foreign code: any error is due to these messages
            raise InvalidRequest(
                f"the chat template refuses these messages: {type(error).__name__}"
            ) from error
        return text

    def to_json(self) -> str | None:
        if self._backend is None:
            return None
        text: str = self._backend.to_str()
        if self._backend.padding is None and self._backend.truncation is None:
            return text
        # Neither affects which bytes a token stands for, and both would change the encoding of a text.
        return json.dumps(json.loads(text) | {"padding": None, "truncation": None})


def _read_tokenizer(directory: Path) -> Any:
    """Load the directory's tokenizer with transformers. Code shipped with the model is never run."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception:
        if not _names_remote_code(directory):
            raise
    if (directory / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    raise ModelLoadError(
        f"can't load the tokenizer in {directory}: the tokenizer is code of the model's, which is never run; "
        "convert it to a tokenizer.json, or serve token ids (skip_tokenizer_init)"
    )


def _names_remote_code(directory: Path) -> bool:
    files = (directory / name for name in ("tokenizer_config.json", "config.json"))
    return any("auto_map" in json.loads(file.read_text()) for file in files if file.is_file())


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Load the directory's tokenizer; None if it holds no tokenizer files (token ids only)."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((directory / name).is_file() for name in names):
        return None
    return HuggingFaceTokenizer(directory)


def generation_eos_token_ids(directory: Path) -> list[int]:
    """Return the EOS ids of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if file.is_file():
            value = json.loads(file.read_text()).get("eos_token_id")
            if value is not None:
                return [value] if isinstance(value, int) else [int(v) for v in value]
    return []


@cache
def byte_characters() -> list[str]:
    """Return byte-level tokenizers' printable character for each byte (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _text_of(message: Message) -> str:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("every message needs a role and a content")
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidRequest("message content must be a string")
    return content
