"""A syntax of tool calls: `<call>NAME {"argument": ...}</call>`."""

from __future__ import annotations

import re

from pagemill.common.chat.families import CallForm, ToolSyntax

SYNTAX = ToolSyntax(
    CallForm("<call>NAME ", "</call>", trigger="<call>"),
    words=("<call>",),
    opens=("<call>",),
    header=re.compile(r"(?P<name>[\w.-]{1,64}) (?=\{)"),
    is_wrapped=False,
    skipped=("</call>",),
)
