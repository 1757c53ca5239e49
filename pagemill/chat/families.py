"""The syntaxes of tool calls, by family of models. A family is one entry here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

ToolParser = Literal[
    "deepseek_v3",
    "deepseek_v31",
    "mistral_args",
    "mistral",
    "hermes",
    "phi4",
    "granite",
    "llama3_json",
    "json",
    "none",
]
"""The names of TOOLS; `none` refuses tools."""

_NAME: Final = r'(?P<name>[^"\\\s<>{}\[\]]{1,128})'
_TYPE: Final = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
_OBJECT: Final = re.compile(
    rf'\{{\s*{_TYPE}"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
"""An object's beginning, up to the arguments. Any other order of members is read once the object has ended."""
HEADER_LIMIT: Final = 512
"""Most characters before the arguments of a call."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text of a call that the grammar forces; the arguments, JSON, stand between `before` and `after`."""

    before: str
    """With `NAME` for the function's name as it is, or `"NAME"` for it as JSON."""
    after: str
    begin: str = ""
    """Before the first of the calls."""
    separator: str = "\n"
    end: str = ""
    """After the last."""
    trigger: str = ""
    """What a call begins with where the model may also answer in words: `begin` + `before`, or a part of it that
    nothing else begins with."""

    def head(self, name: str) -> str:
        return self.before.replace('"NAME"', json.dumps(name)).replace("NAME", name)


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """A family's syntax."""

    form: CallForm
    words: tuple[str, ...]
    """What the family's chat templates contain, all of them."""
    opens: tuple[str, ...] = ()
    """What calls begin with, anywhere in the text; without any, a call is how the text begins."""
    header: re.Pattern[str] = _OBJECT
    """What stands between that and the arguments."""
    is_wrapped: bool = True
    """True if name and arguments are members of an object."""
    skipped: tuple[str, ...] = ()
    """What may stand around calls, beside white space, and is not content."""


def _array(marker: str, close: str = "") -> CallForm:
    return CallForm('{"name": "NAME", "arguments": ', "}", f"{marker}[", ", ", f"]{close}", f"{marker}[")


_SECTIONS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001  # as the tokens are spelled
_DEEPSEEK_OPEN, _DEEPSEEK_SEP, _DEEPSEEK_END = (
    "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "<｜tool▁sep｜>",  # noqa: RUF001
    "<｜tool▁call▁end｜>",  # noqa: RUF001
)

TOOLS: Final[Mapping[str, ToolSyntax]] = {
    "deepseek_v3": ToolSyntax(
        CallForm(
            f"{_DEEPSEEK_OPEN}function{_DEEPSEEK_SEP}NAME\n```json\n",
            f"\n```{_DEEPSEEK_END}",
            *(_SECTIONS[0], "\n", _SECTIONS[1]),
            trigger=_SECTIONS[0],
        ),
        words=(_DEEPSEEK_OPEN, "```json"),
        opens=(_SECTIONS[0] + _DEEPSEEK_OPEN, _DEEPSEEK_OPEN),
        header=re.compile(rf"function{_DEEPSEEK_SEP}{_NAME}\s*```json\s*(?=\{{)"),
        is_wrapped=False,
        skipped=(f"```{_DEEPSEEK_END}", _DEEPSEEK_END, _SECTIONS[1]),
    ),
    "deepseek_v31": ToolSyntax(
        CallForm(
            f"{_DEEPSEEK_OPEN}NAME{_DEEPSEEK_SEP}",
            _DEEPSEEK_END,
            *(_SECTIONS[0], "", _SECTIONS[1]),
            trigger=_SECTIONS[0],
        ),
        words=(_DEEPSEEK_OPEN,),
        opens=(_SECTIONS[0] + _DEEPSEEK_OPEN, _DEEPSEEK_OPEN),
        header=re.compile(rf"{_NAME}{_DEEPSEEK_SEP}\s*(?=\{{)"),
        is_wrapped=False,
        skipped=(_DEEPSEEK_END, _SECTIONS[1]),
    ),
    "mistral_args": ToolSyntax(
        CallForm("[TOOL_CALLS]NAME[ARGS]", "", separator="", trigger="[TOOL_CALLS]"),
        words=("[TOOL_CALLS]", "[ARGS]"),
        opens=("[TOOL_CALLS]",),
        header=re.compile(rf"{_NAME}(?:\[CALL_ID\]\w{{1,64}})?\[ARGS\]\s*(?=\{{)"),
        is_wrapped=False,
    ),
    "mistral": ToolSyntax(
        _array("[TOOL_CALLS]"), words=("[TOOL_CALLS]",), opens=("[TOOL_CALLS]",), skipped=("[", "]", ",")
    ),
    "hermes": ToolSyntax(
        CallForm('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", trigger="<tool_call>"),
        words=("<tool_call>",),
        opens=("<tool_call>",),
        skipped=("</tool_call>",),
    ),
    "phi4": ToolSyntax(
        _array("<|tool_call|>", "<|/tool_call|>"),
        words=("<|tool_call|>", "<|/tool_call|>"),
        opens=("<|tool_call|>", "functools["),
        skipped=("[", "]", ",", "<|/tool_call|>"),
    ),
    "granite": ToolSyntax(
        _array("<|tool_call|>"), words=("<|tool_call|>",), opens=("<|tool_call|>",), skipped=("[", "]", ",")
    ),
    "llama3_json": ToolSyntax(
        CallForm('{"name": "NAME", "parameters": ', "}", separator="; ", trigger='{"name": "'),
        words=('"parameters": ', "<|eot_id|>", "tools"),
        skipped=("<|python_tag|>", ";", "```json", "```"),
    ),
    "json": ToolSyntax(
        CallForm('{"name": "NAME", "arguments": ', "}", trigger='{"name": "'),
        words=(),
        skipped=("[", "]", ",", "```json", "```"),
    ),
}
"""By name, those with more specific templates first. For a model that knows no tools, with `json` the prompt explains
them."""

UNSUPPORTED: Final[Mapping[str, str]] = {
    "<|channel|>": "gpt-oss (harmony)",
    "<function=": "Qwen3-Coder's XML",
    "<|python_start|>": "Llama 4's Python calls",
}
"""Families whose calls are not parsed, by what their templates contain."""


def detect_tools(template: str) -> str | None:
    """Return the name of the syntax that a chat template writes; None if it is one that is not supported."""
    if unsupported_family(template) is not None:
        return None
    if "tools" not in template:
        return "json"
    return next(name for name, family in TOOLS.items() if all(word in template for word in family.words))


def unsupported_family(template: str) -> str | None:
    return next((family for word, family in UNSUPPORTED.items() if word in template), None)
