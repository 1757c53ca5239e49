"""The tasks of jobs. Each has its own fields, and an envelope version pulled only by workers that know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagemill.producer.wire.schema.text.chat import CHAT_FIELDS, CHAT_VERSION
from pagemill.sampling_fields import SAMPLING_FIELDS

TaskName = Literal["generate", "score", "embed", "classify", "rerank"]


@dataclass(frozen=True, slots=True)
class Task:
    version: int
    """The envelope version."""
    fields: frozenset[str]
    """The fields it accepts among those that not every task accepts."""
    is_certain: bool
    """True if equal jobs have equal results regardless of the seed."""


TASKS: Final[dict[TaskName, Task]] = {
    "generate": Task(1, frozenset(SAMPLING_FIELDS) | CHAT_FIELDS | {"adapter"}, is_certain=False),
    "score": Task(
        2, frozenset({"continuations", "logprobs", "truncate_prompt_tokens", "adapter"}), is_certain=True
    ),
    "embed": Task(
        3, frozenset({"inputs", "dimensions", "prompt_name", "rows_dtype", "truncate"}), is_certain=True
    ),
    "classify": Task(3, frozenset({"inputs", "documents", "rows_dtype", "truncate"}), is_certain=True),
    "rerank": Task(3, frozenset({"documents", "rows_dtype", "truncate"}), is_certain=True),
}
POOLED_TASKS: Final = frozenset[TaskName]({"embed", "classify", "rerank"})
"""Those that return rows of numbers and no tokens. Three are enough: a reward is the one label of `classify`, a
cross-encoder's score of two texts is `rerank` with one document."""
REFUSED_FIELDS: Final = {
    name: frozenset[str]().union(*(other.fields for other in TASKS.values())) - task.fields
    for name, task in TASKS.items()
}
"""Per task, the fields that only other tasks accept."""
ADAPTER_VERSION: Final = 5
"""The envelope version of every job with an adapter, whatever its task."""
LABEL_VERSION: Final = 6
"""The envelope version of a choice that returns its labels' probabilities: other workers would return none."""
AFTER_VERSION: Final = 7
"""The envelope version of every job that waits for others: its prompt may have places for their outputs."""
STORED_VERSION: Final = 8
"""The envelope version of a stub: the job itself is in a store. Only workers that have the store pull it."""
PINNED_VERSION: Final = 9
"""The envelope version of every job that names a revision, whatever else it is."""
VERSIONS: Final = tuple(
    sorted(
        {CHAT_VERSION, ADAPTER_VERSION, LABEL_VERSION, AFTER_VERSION, PINNED_VERSION}
        | {task.version for task in TASKS.values()}
    )
)
