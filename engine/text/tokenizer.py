"""Text to token ids and back. Optional: without a tokenizer the engine serves token ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pagemill.engine.errors import EngineError, InvalidRequest, ModelLoadError
from pagemill.engine.text.byte_level import byte_characters
from pagemill.engine.text.chat_template import CONTINUE, ChatTemplate, check_continued
from pagemill.engine.text.known_cost import is_decoder_bounded, unbounded_part
from pagemill.engine.text.text_process import TextProcess, is_panic
from pagemill.engine.text.tokenizer_files import has_tokenizer, read_tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that renders conversations; None if there is none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def piece(self, token_id: int) -> str | None:
        """Return the token in the vocabulary's spelling; None if that is unknown or the token does not exist."""
        ...

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Return the conversation's prompt with the assistant's turn opened. The template adds the special tokens.

        Raises:
            UnsupportedFeature: there is no chat template.
            InvalidRequest: invalid messages, or the template rejects them.
        """
        ...

    def to_json(self) -> str | None:
        """Return the content of a Hugging Face tokenizer.json; None if it can't be expressed as one."""
        ...


class ByteTokenizer:
    """The echo model's tokenizer: UTF-8 bytes as tokens, and 256 as EOS."""

    vocab_size = 257
    eos_token_id: int | None = 256
    chat_template: str | None = "{{ messages, tools, enable_thinking }}"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")

    def piece(self, token_id: int) -> str | None:
        return "<end>" if token_id == self.eos_token_id else byte_characters()[token_id]

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        text = "".join(f"{_text_of(m)}\n" for m in messages)
        if not variables.get(CONTINUE):
            return text
        check_continued(messages[-1])
        return text.removesuffix("\n")

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

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        """Raises `ConfigError` if a file is missing or broken, or the template does not exist (see `ChatTemplate`)."""
        try:
            is_known = _is_cost_known(directory)
            self._tokenizer = read_tokenizer(directory)
        except ModelLoadError:
            raise
        except BaseException as error:  # a broken file can make transformers raise anything
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            message = (str(error) or type(error).__name__).strip().splitlines()[0][:300]
            raise ModelLoadError(
                f"can't load the tokenizer in {directory}: {message}; download its files again, or serve token ids "
                "(skip_tokenizer_init)"
            ) from error
        # Use the Rust object directly: the Python wrapper costs several times as much as the decoding itself.
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self._read_from = directory, chat_template
        self.vocab_size: int = len(self._tokenizer)
        self.is_limited = not is_known
        """Texts are encoded in a process with limits."""
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self._process = None if is_known else TextProcess(self.to_json())
        self._template = ChatTemplate(self._tokenizer, directory, chat_template)
        self.chat_template = self._template.source
        self.gives_types: bool = "token_type_ids" in self._tokenizer.model_input_names
        """The model marks a pair's second text by a token type."""

    def __reduce__(self) -> tuple[type[HuggingFaceTokenizer], tuple[Path, str | None]]:
        """Pickle the folder's name, so that another process reads the files again."""
        return HuggingFaceTokenizer, self._read_from

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._process is not None:
            return self._process.encode(text, add_special_tokens=add_special_tokens)
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if is_panic(error):
                raise InvalidRequest(f"the tokenizer rejects the text: {str(error)[:200]}") from None
            if isinstance(error, TypeError):
                text.encode()  # raises UnicodeError for lone surrogates, which the tokenizer rejects as no string
            raise
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        decoder = self._tokenizer if self._backend is None else self._backend
        try:
            text: str = decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if is_panic(error):
                raise EngineError(f"the tokenizer can't decode a token: {str(error)[:200]}") from None
            raise
        return text

    def piece(self, token_id: int) -> str | None:
        piece: str | None = None if self._backend is None else self._backend.id_to_token(token_id)
        return piece

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        for message in messages:
            _check_message(message)
        return self._template.render(list(messages), [dict(tool) for tool in tools], variables)

    def to_json(self) -> str | None:
        if self._backend is None:
            return None
        text: str = self._backend.to_str()
        if self._backend.padding is None and self._backend.truncation is None:
            return text
        # Neither affects which bytes a token represents, and both would change the encoding of a text.
        return json.dumps(json.loads(text) | {"padding": None, "truncation": None})


def load_tokenizer(directory: Path, chat_template: str | None = None) -> Tokenizer | None:
    """Load the directory's tokenizer; return None if it does not have tokenizer files (token ids only).

    Args:
        chat_template: a file, or the name of one of the model's templates; None: the model's own.

    Raises:
        ConfigError: a file is missing or broken, or there is no such template.
    """
    if not has_tokenizer(directory):
        return None
    return HuggingFaceTokenizer(directory, chat_template)


def _is_cost_known(directory: Path) -> bool:
    """Return whether any text can be encoded in a thread. Other tokenizers are tried in a process with limits.

    Raises:
        ModelLoadError: time or memory of loading or decoding is unbounded.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return True  # its code is Pagemill's or transformers'
    text = file.read_text(encoding="utf-8")
    content = json.loads(text)
    if not isinstance(content, dict):
        return True  # it is rejected when it is read
    if not is_decoder_bounded(content):
        raise ModelLoadError(
            f"can't load the tokenizer in {directory}: its decoder can make a text of any length of a token; serve "
            "token ids (skip_tokenizer_init)"
        )
    part = unbounded_part(content)
    if part is None:
        return True
    logger.info("texts are encoded in a process with limits: tokenizer.json has an unusual %s", part)
    trial = TextProcess(text)
    try:
        trial.try_loading()
    finally:
        trial.close()
    return False


def generation_eos_token_ids(directory: Path) -> list[int]:
    """Return the EOS ids of generation_config.json; otherwise those of config.json or its `text_config`."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if file.is_file():
            content = json.loads(file.read_text())
            value = content.get("eos_token_id")
            if value is None and isinstance(text := content.get("text_config"), dict):
                value = text.get("eos_token_id")
            if value is not None:
                return [value] if isinstance(value, int) else [int(v) for v in value]
    return []


def _check_message(message: Message) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("every message needs a role and a content")
    if not isinstance(message.get("content"), str | list):
        raise InvalidRequest("message content must be a string or a list of parts")


def _text_of(message: Message) -> str:
    _check_message(message)
    content: str | list[Mapping[str, Any]] = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
