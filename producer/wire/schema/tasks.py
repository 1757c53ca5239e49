"""What a job may be for. A task has its fields, and envelopes of a version that only workers which know it pull."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagemill.sampling_fields import SAMPLING_FIELDS

TaskName = Literal["generate", "score"]


@dataclass(frozen=True, slots=True)
class Task:
    version: int
    """Of the envelope."""
    fields: frozenset[str]
    """What it takes of the fields that not every task takes."""
    is_certain: bool
    """Equal jobs have equal results, whatever they are seeded with."""


TASKS: Final[dict[TaskName, Task]] = {
    "generate": Task(1, frozenset(SAMPLING_FIELDS), is_certain=False),
    "score": Task(2, frozenset({"continuations", "logprobs", "truncate_prompt_tokens"}), is_certain=True),
}
TASK_FIELDS: Final = frozenset[str]().union(*(task.fields for task in TASKS.values()))
VERSIONS: Final = tuple(sorted({task.version for task in TASKS.values()}))
