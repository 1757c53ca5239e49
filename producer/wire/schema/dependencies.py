"""Jobs that wait for others, and their conditions. docs/dependencies.md has the rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from pagemill.common.bounds import Exact, InvalidParameter, Length, Range
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.templates import NAME, places

MAX_PARENTS: Final = 16
MAX_WHEN_BYTES: Final = 8192
"""Maximum size of the conditions, as JSON."""
SPACE: Final = " \t\n\v\f\r"
"""The surrounding space that conditions ignore. The queue's scripts know no other space than that of ASCII."""
ITEM_PREFIX: Final = "key:"
"""Prefix of an item's key in place of an id: an item of the same batch."""

_Name = Annotated[str, StringConstraints(strict=True, pattern=f"^{NAME}$")]
_Parent = Annotated[
    str, StringConstraints(strict=True, pattern=rf"^({keys.ID_PATTERN.pattern}|{ITEM_PREFIX}.{{1,255}})$")
]
_Values = Annotated[
    tuple[Annotated[str, StringConstraints(strict=True, max_length=4096)], ...], Length(1, 256)
]
_Probability = Annotated[float, Exact(), Range(0.0, 1.0)]


class HasId(Protocol):
    """A handle to a job."""

    @property
    def id(self) -> str: ...


class Condition(BaseModel):
    """A condition on the first output of a job, for another to run after it. All fields that are set must hold."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)

    label: _Values | None = None
    """Its label is one of these; for a job without `label_probs`, its text is. Surrounding space is ignored."""
    text: _Values | None = None
    """Its text is one of these, ignoring surrounding space."""
    prob_at_least: _Probability | None = None
    """The minimum probability of its label."""
    prob_below: _Probability | None = None

    @field_validator("label", "text", mode="before")
    @classmethod
    def _coerce_to_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("label", "text")
    @classmethod
    def _stripped(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return value and tuple(text.strip(SPACE) for text in value)

    @model_validator(mode="after")
    def _asks_something(self) -> Condition:
        if not self.model_fields_set:
            raise ValueError("a condition needs label, text, prob_at_least or prob_below")
        return self


class DependencyFields(BaseModel):
    """Fields of a job that runs after others."""

    after: Annotated[dict[_Name, _Parent], Field(min_length=1, max_length=MAX_PARENTS)] | None = None
    """The jobs to wait for, by the names under which the prompt and `when` refer to them: ids, or in a batch `key:` and
    the key of another item. A list names them `parent`, or `parent1`, `parent2` and so on."""
    when: dict[_Name, Condition] | None = None
    """Run only if their outputs meet these conditions; otherwise the job is cancelled as `condition_false`."""
    on_parent_failure: Literal["cancel", "run"] = "cancel"
    """If one of them ends without a result: end as `parent_failed`, or run with empty text in place of its output."""

    @field_validator("after", mode="before")
    @classmethod
    def _name_parents(cls, value: Any) -> Any:
        return named_parents(value)

    def check_dependencies(self, texts: Iterable[str]) -> None:
        """Check the fields against each other and the prompt's texts. Raises InvalidParameter."""
        if self.after is None:
            if self.when is not None or self.on_parent_failure != "cancel":
                raise InvalidParameter("when and on_parent_failure go with after")
            return
        if len(set(self.after.values())) < len(self.after):
            raise InvalidParameter("after: one job has two names")
        if unknown := sorted((self.when or {}).keys() - self.after.keys()):
            raise InvalidParameter(f"when: after has no {unknown[0]}")
        if self.when is not None and len(self._when_json().encode()) > MAX_WHEN_BYTES:
            raise InvalidParameter(f"when: has more than {MAX_WHEN_BYTES} bytes of JSON")
        for text in texts:
            for name, field in places(text):
                if name not in self.after:
                    raise InvalidParameter(
                        f"the prompt has a place for {name}.{field}, and `after` lacks {name}; "
                        "double the braces of literal text"
                    )

    def dependency_options(self, texts: Iterable[str]) -> dict[str, str | int]:
        """Return the header's fields of a job that waits. Raises InvalidJob if a parent is named by its key."""
        assert self.after is not None, "it waits for others"
        for parent in self.after.values():
            if parent.startswith(ITEM_PREFIX):
                raise InvalidJob(f"after: {ITEM_PREFIX} is for items of a batch; give an id", param="after")
        options: dict[str, str | int] = {"after": " ".join(self.after.values())}
        if self.when is not None:
            options["when"] = self._when_json()
        if self.on_parent_failure == "run":
            options["otherwise"] = "run"
        if any(True for text in texts for _ in places(text)):
            options["reads"] = 1
        return options

    def _when_json(self) -> str:
        conditions = {
            (self.after or {})[name]: condition.model_dump(exclude_none=True)
            for name, condition in (self.when or {}).items()
        }
        return json.dumps(conditions, ensure_ascii=False)


def named_parents(value: Any) -> Any:
    """Return jobs to wait for as a mapping of names. Values are ids, or objects with an `id`, like handles."""
    if value is None or isinstance(value, Mapping):
        return None if value is None else {name: _id(parent) for name, parent in value.items()}
    if isinstance(value, list | tuple):
        if len(value) == 1:
            return {"parent": _id(value[0])}
        return {f"parent{number}": _id(parent) for number, parent in enumerate(value, 1)}
    return {"parent": _id(value)}


def _id(parent: Any) -> Any:
    return getattr(parent, "id", parent)
