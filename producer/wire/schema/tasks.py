"""The tasks of jobs, each with its own fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagemill.common.sampling_fields import SAMPLING_FIELDS
from pagemill.producer.wire.schema.text.chat import CHAT_FIELDS

TaskName = Literal["generate", "score", "embed", "classify", "rerank"]


@dataclass(frozen=True, slots=True)
class Task:
    fields: frozenset[str]
    """The fields that it accepts among those that not every task accepts."""
    is_certain: bool
    """True if equal jobs have equal results regardless of the seed."""


TASKS: Final[dict[TaskName, Task]] = {
    "generate": Task(frozenset(SAMPLING_FIELDS) | CHAT_FIELDS | {"adapter"}, is_certain=False),
    "score": Task(
        frozenset({"continuations", "logprobs", "truncate_prompt_tokens", "adapter"}), is_certain=True
    ),
    "embed": Task(
        frozenset({"inputs", "dimensions", "prompt_name", "rows_dtype", "truncate"}), is_certain=True
    ),
    "classify": Task(frozenset({"inputs", "documents", "rows_dtype", "truncate"}), is_certain=True),
    "rerank": Task(frozenset({"documents", "rows_dtype", "truncate"}), is_certain=True),
}
POOLED_TASKS: Final = frozenset[TaskName]({"embed", "classify", "rerank"})
"""Tasks that return rows of numbers and no tokens. Three suffice: a reward is the only label of `classify`, a
cross-encoder's score of two texts is `rerank` with one document."""
REFUSED_FIELDS: Final = {
    name: frozenset[str]().union(*(other.fields for other in TASKS.values())) - task.fields
    for name, task in TASKS.items()
}
"""Per task, the fields that only other tasks accept."""
