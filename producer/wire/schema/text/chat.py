"""Messages, tools and reasoning: the fields of a chat job beyond its texts, and those of its results.

Forms and names are OpenAI's; `chat_template_kwargs` and `thinking_token_budget` are vLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from pagemill.common.bounds import InvalidParameter
from pagemill.common.json_values import check_json
from pagemill.common.structured_outputs import MAX_SCHEMA, MAX_SCHEMA_DEPTH
from pagemill.producer.wire.schema.images import (
    MAX_TEXT,
    Content,
    TextPart,
    describe_image,
    image_digest,
    images_of,
    texts_of,
)

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 128
"""Maximum tool calls in one message of the history."""
MAX_TEMPLATE_BYTES: Final = 4096
"""Maximum size of `chat_template_kwargs`, as JSON."""
_MAX_TEMPLATE_DEPTH: Final = 8
_RESERVED: Final = frozenset(
    {
        "chat_template", "conversation", "documents", "max_length",
        "messages", "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict", "return_tensors",
        "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
"""Arguments of the function that renders templates."""

_Strict = StringConstraints(strict=True, max_length=MAX_TEXT)
FunctionName = Annotated[str, StringConstraints(strict=True, pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
_CallId = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


class FunctionCall(ChatModel):
    name: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128)]
    arguments: Annotated[str, _Strict] = "{}"
    """JSON as the model wrote it. Only a forced or strict call is guaranteed to match the function's schema."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return "{}" if value is None else value


class ToolCall(ChatModel):
    """A call that a model makes, in a result or in the history."""

    id: _CallId
    type: Literal["function"] = "function"
    function: FunctionCall

    def message_dict(self) -> dict[str, Any]:
        """Return a dict with all members, as OpenAI's clients and chat templates expect."""
        return self.model_dump(mode="json")


class ToolCallDelta(ChatModel):
    """A part of a call in a stream: the first has id and name, and all have a part of the arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Function(ChatModel):
    name: FunctionName
    description: Annotated[str, _Strict] | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; None if there are no parameters."""
    strict: Annotated[bool, Field(strict=True)] | None = None
    """True: the arguments of every call are constrained to the schema, even if the model may choose to call."""

    @field_validator("parameters")
    @classmethod
    def _plain(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            check_json(value, MAX_SCHEMA_DEPTH)
            if len(json.dumps(value)) > MAX_SCHEMA:
                raise InvalidParameter(
                    f"parameters: has more than {MAX_SCHEMA} characters", "schema_too_complex"
                )
        return value


class Tool(ChatModel):
    type: Literal["function"] = "function"
    function: Function


class _NamedFunction(ChatModel):
    name: FunctionName


class NamedToolChoice(ChatModel):
    type: Literal["function"] = "function"
    function: _NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class Message(ChatModel):
    """One turn of a chat. An assistant's may contain its calls; a tool's contains the id of the call it answers."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content | None = None
    """A text. A user's may also be a list of texts and images; a list of texts becomes one text."""
    tool_calls: Annotated[tuple[ToolCall, ...], Field(min_length=1, max_length=MAX_CALLS)] | None = None
    name: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128)] | None = None
    """The author's name, for templates that show it."""
    tool_call_id: _CallId | None = None
    reasoning: Annotated[str, _Strict] | None = None
    """The reasoning of an earlier answer, for templates that show it to the model again."""

    @model_validator(mode="after")
    def _agrees(self) -> Message:
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is missing")
        if self.role != "assistant" and (self.tool_calls is not None or self.reasoning is not None):
            raise ValueError("tool_calls and reasoning belong to an assistant's message")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id belongs to a tool's message")
        if self.role != "user" and self.images:
            raise InvalidParameter("images belong to a user's message", "unsupported_feature")
        return self

    @property
    def is_plain(self) -> bool:
        """True if it has only a role, a text and possibly an author's name."""
        others = (self.tool_calls, self.tool_call_id, self.reasoning)
        return self.content is not None and all(value is None for value in others)

    @property
    def text(self) -> str:
        """Its texts, without its images."""
        return "".join(texts_of(self.content))

    @property
    def images(self) -> tuple[str, ...]:
        """The URLs of its images."""
        return images_of(self.content)

    def description(self) -> str:
        """Return its text for display, with a description in place of each image."""
        return self.text_with(describe_image)

    def beginning(self) -> str:
        """Return its text with hashes in place of images, each as long as the prefix that affinities use."""
        return self.text_with(lambda url: image_digest(url) * 4)

    def work(self) -> bytes:
        """Return role, content and the rest in an unambiguous form, with hashes in place of images."""
        if not self.images:
            content = self.text.encode()
            return b"%b:%d:%b%b" % (self.role.encode(), len(content), content, self.more().encode())
        assert not isinstance(self.content, str | None)
        parts = [
            [part.text] if isinstance(part, TextPart) else {"image": image_digest(part.image_url.url)}
            for part in self.content
        ]
        return b"%b+%b%b" % (self.role.encode(), json.dumps(parts).encode(), self.more().encode())

    def text_with(self, name: Callable[[str], str]) -> str:
        """Return its text, with `name(url)` in place of each image."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(
            part.text if isinstance(part, TextPart) else name(part.image_url.url) for part in self.content
        )

    def more(self) -> str:
        """Return the members other than role and content as JSON; empty if there are none."""
        if self.is_plain and self.name is None:
            return ""
        return self.model_dump_json(exclude={"role", "content"}, exclude_defaults=True)


CHAT_FIELDS: Final = frozenset(
    {
        "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort",
        "thinking_token_budget", "separate_reasoning",
    }
)  # fmt: skip
"""The fields of a job that separate reasoning and tool calls from the text of its results."""


class ChatFields(BaseModel):
    """Fields of a chat job in addition to its messages. With any of them, results separate reasoning and calls."""

    tools: Annotated[tuple[Tool, ...], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    """None: auto. `required`, or a function by its name, forces calls that match the functions' schemas."""
    parallel_tool_calls: Annotated[bool, Field(strict=True)] | None = None
    """False: at most one call. None: several calls are allowed for `auto`, one for `required`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, such as `enable_thinking`."""
    reasoning_effort: ReasoningEffort | None = None
    """For templates that support it, or whose reasoning can be disabled, which `none` does."""
    separate_reasoning: Annotated[bool, Field(strict=True)] | None = None
    """True: results have the reasoning in `reasoning`, not in `text`. Any other of these fields implies it."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _small_and_plain(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        check_json(value, _MAX_TEMPLATE_DEPTH)
        if len(json.dumps(value, ensure_ascii=False).encode()) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"has more than {MAX_TEMPLATE_BYTES} bytes of JSON")
        if taken := sorted(_RESERVED & value.keys()):
            raise ValueError(f"{taken[0]} is not a template's variable to set")
        return value

    def check_tools(self) -> None:
        """Check the fields against each other. Raises InvalidParameter."""
        names = [tool.function.name for tool in self.tools or ()]
        if len(names) != len(set(names)):
            raise InvalidParameter("tools: two functions have one name")
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not names:
            raise InvalidParameter("tool_choice needs tools")
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise InvalidParameter("tool_choice names a function that tools lack")


def call_id(job_id: str, index: int, number: int) -> str:
    """Return the id of a sample's tool call, which is the same in its stream and in its result."""
    return f"call_{blake2b(f'{job_id}/{index}/{number}'.encode(), digest_size=12).hexdigest()}"


def history_tokens_text(messages: Sequence[Message]) -> str:
    """Return the members of messages other than their contents, to estimate their size."""
    return "".join(message.more() for message in messages)
