"""Placeholders in a prompt for the outputs of parent jobs: `{name.field}`.

Only text is inserted: no expressions, no code, and inserted text is not expanded again. Other braces are
unchanged. Doubled braces, `{{name.field}}`, stand for the placeholder itself without one pair;
`escape_places` doubles those in a text by another author.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from pagemill.common.json_values import parse_output
from pagemill.producer.wire.schema.errors import InvalidJob

NAME: Final = r"[A-Za-z_][A-Za-z0-9_]{0,31}"
_PLACE: Final = re.compile(
    rf"(?<!\{{)(\{{+)({NAME})\.(text|label|label_prob|parsed(?:\.[A-Za-z0-9_-]{{1,64}}){{0,8}})(\}}+)"
)


class ParentOutput(BaseModel):
    """The output that a job passes to the jobs waiting for it, as the queue stores it."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    id: str
    state: str
    sealed: str | None = None
    """The stored result, if it is encrypted."""
    computed_by: str = ""
    text: str = ""
    """Text of the first output. Empty if the job did not succeed."""
    label: str | None = None
    prob: float | None = None

    @cached_property
    def parsed(self) -> Any:
        """The text as JSON; None if it is not JSON."""
        return parse_output(self.text)

    def field(self, path: str) -> str:
        """Return a field as text. Raises InvalidJob if the output does not have it."""
        if self.state != "succeeded":
            return ""
        name, *members = path.split(".")
        value: Any = {
            "text": self.text,
            "label": self.text if self.label is None else self.label,
            "label_prob": self.prob,
        }.get(name)
        if name == "parsed":
            value = self.parsed
            for member in members:
                value = value.get(member) if isinstance(value, dict) else None
        if value is None:
            raise InvalidJob(f"the output of job {self.id} has no {path}", param="after")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def places(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and field of each placeholder."""
    for match in _PLACE.finditer(text):
        if _pairs(match) == 1:
            yield match[2], match[3]


def first_place(text: str) -> int:
    """Return the start of the first placeholder; the length of a text without any."""
    return next((match.start() for match in _PLACE.finditer(text)), len(text))


def escape_places(text: str) -> str:
    """Escape a text so that nothing in it is a placeholder.

    Args:
        text: the text, for instance of a user.

    Returns:
        The escaped text.
    """
    return _PLACE.sub(lambda match: f"{{{match[0]}}}", text)


def render(text: str, outputs: Mapping[str, ParentOutput], limit: int) -> str:
    """Insert outputs, by name, into their placeholders.

    Raises:
        InvalidJob: an output does not have a field, or the text would have more than `limit` bytes.
    """
    parts: list[str] = []
    end, size = 0, 0
    for match in _PLACE.finditer(text):
        parts += [text[end : match.start()], _rendered(match, outputs)]
        size += len(parts[-2].encode()) + len(parts[-1].encode())
        if size > limit:
            break
        end = match.end()
    parts.append(text[end:])
    if size + len(parts[-1].encode()) > limit:
        raise InvalidJob(
            f"with the outputs put in, the prompt has more than {limit} bytes", "payload_too_large"
        )
    return "".join(parts)


def _pairs(match: re.Match[str]) -> int:
    return min(len(match[1]), len(match[4]))


def _rendered(match: re.Match[str], outputs: Mapping[str, ParentOutput]) -> str:
    opening, name, path, closing = match.groups()
    inner = outputs[name].field(path) if _pairs(match) == 1 else f"{name}.{path}"
    return f"{opening[1:]}{inner}{closing[1:]}"
