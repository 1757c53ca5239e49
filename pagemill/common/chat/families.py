"""The syntaxes of tool calls, by family of models. A family is one entry here."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from pagemill.common.chat.thinking import HARMONY, THINKING
from pagemill.common.plugins import PluginError, Plugins

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

logger = logging.getLogger(__name__)

_NAME: Final = r'(?P<name>[^"\\\s<>{}\[\]]{1,128})'
_TYPE: Final = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
_OBJECT: Final = re.compile(
    rf'\{{\s*{_TYPE}"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
"""An object's start, up to the arguments. Any other order of members is read once the object has ended."""
_KEY: Final = r"\s*(?P<key>[^<>\"]{1,128}?)\s*"
HEADER_LIMIT: Final = 512
"""Maximum number of characters before the arguments of a call."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text of a call that the grammar forces; the arguments, JSON, are between `before` and `after`."""

    before: str
    """With `NAME` for the function's name as it is, or `"NAME"` for it as JSON."""
    after: str
    begin: str = ""
    """Text before the first call."""
    separator: str = "\n"
    end: str = ""
    """Text after the last call."""
    trigger: str = ""
    """The start of a call if the model may also answer with text: `begin` + `before`, or a part of it that
    is unique to calls."""
    answer: str = ""
    """Text before an output without a call."""
    is_single: bool = False
    """True if the model makes one call per output, regardless of the job's limit."""

    def head(self, name: str) -> str:
        return self.before.replace('"NAME"', json.dumps(name)).replace("NAME", name)


@dataclass(frozen=True, slots=True)
class Elements:
    """Arguments as elements, one per parameter: texts as they are, any other value as JSON."""

    before: str
    """Text before a value, with `KEY` for the parameter's name."""
    after: str
    header: re.Pattern[str]
    """Matches the text before a value, with the parameter's name as `key`; a group `is_text` that is `true` or
    `false` determines whether the value is a text, otherwise the tool's schema does."""
    end: str
    """The text that ends a value."""
    call_end: str
    trims_lines: bool = False
    """True if a line break at each end of a value is not part of it."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """A family's syntax."""

    form: CallForm
    words: tuple[str, ...]
    """Strings that all of the family's chat templates contain."""
    opens: tuple[str, ...] = ()
    """Strings that start calls, anywhere in the text; if empty, a call starts the text."""
    header: re.Pattern[str] = _OBJECT
    """Text between that and the arguments."""
    is_wrapped: bool = True
    """True if name and arguments are members of an object."""
    skipped: tuple[str, ...] = ()
    """Text around calls, in addition to white space, that is not content."""
    elements: Elements | None = None
    """The format of arguments that are not JSON. `header` then matches from a call's opening mark on."""
    quote: str = ""
    """Quotes of texts in arguments like JSON with bare names; `header` is as with `elements`. Empty: JSON."""


def _array(marker: str, close: str = "") -> CallForm:
    return CallForm('{"name": "NAME", "arguments": ', "}", f"{marker}[", ", ", f"]{close}", f"{marker}[")


_DSML: Final = "｜DSML｜"  # noqa: RUF001  # as the token is spelled
_SECTIONS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001  # as the tokens are spelled
_DEEPSEEK_OPEN, _DEEPSEEK_SEP, _DEEPSEEK_END = (
    "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "<｜tool▁sep｜>",  # noqa: RUF001
    "<｜tool▁call▁end｜>",  # noqa: RUF001
)

TOOLS: Final[Mapping[str, ToolSyntax]] = {
    HARMONY: ToolSyntax(
        CallForm(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
            "",
            separator="<|call|><|start|>assistant",
            trigger="<|channel|>commentary to=functions.",
            answer=THINKING[HARMONY].answer,
            is_single=True,
        ),
        words=("<|channel|>",),
    ),
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
    "deepseek_v32": ToolSyntax(
        CallForm(
            f'<{_DSML}invoke name="NAME">\n',
            f"</{_DSML}invoke>",
            f"<{_DSML}function_calls>\n",
            "\n",
            f"\n</{_DSML}function_calls>",
            f"<{_DSML}function_calls>",
        ),
        words=(_DSML,),
        opens=(f"<{_DSML}function_calls>", f"<{_DSML}invoke"),
        header=re.compile(rf'(?:<{_DSML}function_calls>)?\s*<{_DSML}invoke name="{_NAME}">'),
        skipped=(f"</{_DSML}function_calls>",),
        elements=Elements(
            f'<{_DSML}parameter name="KEY" string="TEXT">',
            f"</{_DSML}parameter>\n",
            re.compile(rf'<{_DSML}parameter name="{_KEY}"(?: string="(?P<is_text>true|false)")?>'),
            f"</{_DSML}parameter>",
            f"</{_DSML}invoke>",
        ),
    ),
    "kimi_k2": ToolSyntax(
        CallForm(
            "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "",
            "<|tool_calls_section_end|>",
            "<|tool_calls_section_begin|>",
        ),
        words=("<|tool_call_begin|>",),
        opens=("<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_begin|>"),
        header=re.compile(
            rf"\s*(?:functions\.)?{_NAME}:\d{{1,6}}\s*<\|tool_call_argument_begin\|>\s*(?=\{{)"
        ),
        is_wrapped=False,
        skipped=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    "gemma4": ToolSyntax(
        CallForm("<|tool_call>call:NAME", "<tool_call|>", separator="", trigger="<|tool_call>"),
        words=("<|tool_call>", "<tool_call|>"),
        opens=("<|tool_call>",),
        header=re.compile(rf"<\|tool_call>\s*call:\s*{_NAME}\s*(?=\{{)"),
        skipped=("<tool_call|>",),
        quote='<|"|>',
    ),
    "minimax_m2": ToolSyntax(
        CallForm(
            '<invoke name="NAME">\n',
            "</invoke>",
            "<minimax:tool_call>\n",
            "\n",
            "\n</minimax:tool_call>",
            "<minimax:tool_call>",
        ),
        words=("<minimax:tool_call>", "<invoke name="),
        opens=("<minimax:tool_call>", "<invoke name="),
        header=re.compile(rf'(?:<minimax:tool_call>)?\s*<invoke name="{_NAME}">'),
        skipped=("</minimax:tool_call>",),
        elements=Elements(
            '<parameter name="KEY">',
            "</parameter>\n",
            re.compile(rf'<parameter name="{_KEY}">'),
            "</parameter>",
            "</invoke>",
        ),
    ),
    "seed_oss": ToolSyntax(
        CallForm(
            "<seed:tool_call>\n<function=NAME>\n",
            "</function>\n</seed:tool_call>",
            trigger="<seed:tool_call>",
        ),
        words=("<seed:tool_call>", "<function="),
        opens=("<seed:tool_call>", "<function="),
        header=re.compile(rf"(?:<seed:tool_call>)?\s*<function={_NAME}>"),
        skipped=("</seed:tool_call>",),
        elements=Elements(
            "<parameter=KEY>",
            "</parameter>\n",
            re.compile(rf"<parameter={_KEY}>"),
            "</parameter>",
            "</function>",
        ),
    ),
    "qwen3_coder": ToolSyntax(
        CallForm("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", trigger="<tool_call>"),
        words=("<tool_call>", "<function="),
        opens=("<tool_call>", "<function="),
        header=re.compile(rf"(?:<tool_call>)?\s*<function={_NAME}>"),
        skipped=("</tool_call>",),
        elements=Elements(
            "<parameter=KEY>\n",
            "\n</parameter>\n",
            re.compile(rf"<parameter={_KEY}>"),
            "</parameter>",
            "</function>",
            trims_lines=True,
        ),
    ),
    "glm45": ToolSyntax(
        CallForm("<tool_call>NAME\n", "</tool_call>", trigger="<tool_call>"),
        words=("<tool_call>", "<arg_key>"),
        opens=("<tool_call>",),
        header=re.compile(rf"<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>)"),
        elements=Elements(
            "<arg_key>KEY</arg_key>\n<arg_value>",
            "</arg_value>\n",
            re.compile(rf"<arg_key>{_KEY}</arg_key>\s*<arg_value>"),
            "</arg_value>",
            "</tool_call>",
        ),
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

PLUGINS: Final[Plugins[ToolSyntax]] = Plugins(
    "pagemill.tool_parsers", "a ToolSyntax", lambda one: isinstance(one, ToolSyntax), (*TOOLS, "none")
)
"""The syntaxes of other packages. A template does not select them; a worker's setting does."""


def find_tools(name: str | None) -> ToolSyntax | None:
    """Return a syntax by its name, built in or of another package; None if it is unknown."""
    if name is None or name in TOOLS:
        return None if name is None else TOOLS[name]
    try:
        return PLUGINS.find(name)
    except PluginError as error:
        # A worker checks the name at startup: this is a reader with a different installation.
        logger.warning("calls are not separated from the text: %s", error)
        return None


class _ParserName:
    """Metadata of the type of a setting: it names a syntax, or is `none`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(_check_name, handler(source))


def _check_name(name: str) -> str:
    known = (*TOOLS, "none", *PLUGINS.names)
    if name not in known:
        raise ValueError(f"should be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
    try:
        PLUGINS.find(name)
    except PluginError as error:
        raise ValueError(str(error)) from error
    return name


ToolParser = Annotated[str, _ParserName()]
"""A name in TOOLS or of another package's syntax; `none` rejects tools."""

UNSUPPORTED: Final[Mapping[str, str]] = {
    "<|python_start|>": "Llama 4's Python calls",
    "<|START_ACTION|>": "Command R7B",
    "Action: ```json": "Command R",
    "<|action_start|>": "InternLM",
    "<|tool_call_start|>": "LFM2",
    "<TOOLCALL>": "Nemotron",
    "<|tools_prefix|>": "Apertus",
    "<longcat_tool_call>": "LongCat",
}
"""Families whose calls are not parsed, by what their templates contain."""


def detect_tools(template: str) -> str | None:
    """Return the name of a chat template's syntax; None if it is not supported."""
    if unsupported_family(template) is not None:
        return None
    if "tools" not in template:
        return "json"
    return next(name for name, family in TOOLS.items() if all(word in template for word in family.words))


def writes_call(family: ToolSyntax, text: str, name: str, key: str) -> bool:
    """Return whether a family reads a call of function `name` with parameter `key` in an assistant's turn.

    Args:
        text: the turn, from where it differs from one without calls.
    """
    if family.elements is not None or not family.is_wrapped or family.quote:
        heads = any(found["name"] == name for found in family.header.finditer(text))
        if family.elements is None:
            return heads and all(mark in text for mark in family.opens[-1:])
        return heads and any(found["key"] == key for found in family.elements.header.finditer(text))
    is_object = re.search(rf'"name"\s*:\s*"{name}"', text) and re.search(
        r'"(?:arguments|parameters)"\s*:\s*\{', text
    )
    if not is_object:
        return False
    if family.opens:
        return any(mark in text for mark in family.opens)
    rest = text.lstrip()
    for mark in sorted(family.skipped, key=len, reverse=True):
        rest = rest.removeprefix(mark).lstrip()
    return rest.startswith("{")


def unsupported_family(template: str) -> str | None:
    return next((family for word, family in UNSUPPORTED.items() if word in template), None)
