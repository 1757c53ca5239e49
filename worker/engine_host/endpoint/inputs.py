"""A job's input for an endpoint: token ids if the worker has the model's tokenizer, otherwise text or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from pagemill.common.chat.syntax import ChatSyntax
from pagemill.engine.errors import InvalidRequest, LacksAbility
from pagemill.engine.outputs import UNKNOWN_TOKEN
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import Generate, Score
from pagemill.engine.text.chat import ChatOptions
from pagemill.engine.text.input_processor import InputLimits, InputProcessor
from pagemill.engine.text.pictures import image_parts
from pagemill.engine.text.tokenizer import Message, Tokenizer
from pagemill.producer.wire.schema.text.token_estimates import text_tokens, turn_tokens
from pagemill.worker.engine_host.endpoint.dialect import Dialect, unsupported

NEVER = frozenset({"score", "pool", "labels", "ranked", "logprobs", "outlined", "images"})
"""Abilities that no endpoint supports here."""


class TextPrompt(list[int]):
    """A prompt whose tokens only the endpoint knows: unknown ids, of estimated or known number."""

    def __init__(
        self, size: int, text: str | None, messages: Sequence[Message] | None, is_limited: bool
    ) -> None:
        super().__init__([UNKNOWN_TOKEN] * size)
        self.text = text
        self.messages = messages
        self.is_limited = is_limited
        """The job limits its output; otherwise the endpoint's default applies."""

    def resize(self, size: int) -> None:
        """Set the number of tokens to the endpoint's count."""
        self[:] = [UNKNOWN_TOKEN] * size


class EndpointInputs(InputProcessor):
    """Like the engine's inputs, but a job that the endpoint cannot run raises `LacksAbility`."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: InputLimits,
        dialect: Dialect,
        lacks: frozenset[str],
        **parsers: Any,
    ) -> None:
        super().__init__(tokenizer, limits, **parsers)
        self._dialect = dialect
        self._lacks = lacks

    def can_resume(self, token_ids: list[int]) -> bool:
        """Return whether an output that `process` gave this prompt can be continued."""
        is_chat = isinstance(token_ids, TextPrompt) and token_ids.messages is not None
        return not is_chat or self._dialect.continues_chat is not None

    def read_images(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Leave jobs with images to other workers. Raises `LacksAbility`."""
        if any(image_parts(messages)):
            raise LacksAbility(["images"])
        return messages

    def process(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        params: SamplingParams,
    ) -> tuple[list[int], SamplingParams]:
        """Process as `InputProcessor.process` does. Raises `LacksAbility` too."""
        if self._tokenizer is not None or prompt_token_ids is not None:
            self._require("tokens", params)
            return super().process(
                prompt=prompt, messages=messages, prompt_token_ids=prompt_token_ids, params=params
            )
        self._require("prompt" if messages is None else "chat", params)
        if params.num_sequences > self._limits.max_num_seqs:
            raise InvalidRequest(f"n is {params.num_sequences}; this worker runs {self._limits.max_num_seqs}")
        size = text_tokens((prompt or "").encode("utf-8", "replace"))
        for message in messages or ():
            size += turn_tokens(_text(message).encode("utf-8", "replace"))
        made = TextPrompt(size, prompt, messages, params.max_tokens is not None)
        left = self._limits.max_model_len - size
        return made, replace(params, max_tokens=params.max_tokens or max(1, params.min_tokens, left))

    def process_chat(
        self, messages: Sequence[Message], options: ChatOptions, params: SamplingParams
    ) -> tuple[list[int], SamplingParams, Generate, ChatSyntax]:
        """Process as `InputProcessor.process_chat` does. Raises `LacksAbility` too."""
        self._require("tools" if self._tokenizer is None else "tokens", params)
        token_ids, params, task, syntax = super().process_chat(messages, options, params)
        if task.outline is not None:
            raise LacksAbility(["outlined"])
        self._require("tokens", params)
        return token_ids, params, task, syntax

    def process_score(self, *_: Any, **__: Any) -> tuple[list[int], SamplingParams, Score]:
        """Leave the job to other workers. Raises `LacksAbility`."""
        raise LacksAbility(["score"])

    def process_pool(self, _: object) -> NoReturn:
        """Leave the job to other workers. Raises `LacksAbility`."""
        raise LacksAbility(["pool"])

    def _require(self, way: str, params: SamplingParams) -> None:
        shape = params.structured_outputs
        wanted = {
            "labels": params.label_probs is not None,
            "json": shape is not None and shape.json is not None,
            "structure": shape is not None and shape.json is None and params.label_probs is None,
            "ranked": params.is_ranked,
            "logprobs": params.logprobs is not None or params.prompt_logprobs is not None,
            "outlined": params.thinking_token_budget is not None,
            "tokens": params.truncate_prompt_tokens is not None,
            "sampling": unsupported(params, self._dialect),
        }
        wanted[way] = True
        missing = [word for word, is_wanted in wanted.items() if is_wanted and word in self._lacks]
        if missing:
            raise LacksAbility(missing)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
