"""Token counts of prompts in the producer: exact if the model's own input processing is available."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pagemill.producer.wire.schema.images import IMAGE_TOKENS_GUESS
from pagemill.producer.wire.schema.job import Job


class TokenCount(NamedTuple):
    """The tokens of a prompt."""

    size: int
    is_exact: bool

    @property
    def about(self) -> str:
        return "" if self.is_exact else "about "


class TokenCounter:
    """Counts prompts' tokens."""

    def __init__(self, exact: Mapping[str, Callable[[Job], int]]) -> None:
        """`exact` counts like a worker, by the served name of the model; other models are estimated."""
        self._exact = exact

    def count(self, job: Job, *, is_complete: bool = True) -> TokenCount:
        """Return the tokens of the job's prompt, after its own truncation.

        Args:
            is_complete: the prompt includes all outputs of other jobs.

        Raises:
            pagemill.engine.errors.InvalidRequest: a worker would reject the job.
        """
        exact = self._exact.get(job.model)
        if job.prompt_token_ids is not None:
            size = len(job.prompt_token_ids)
        elif exact is None or job.images or job.task not in ("generate", "score"):
            size, is_complete = _estimate(job), False
        else:
            size = exact(job)
        if job.truncate_prompt_tokens is not None:
            size = min(size, job.truncate_prompt_tokens)
        return TokenCount(size, is_complete)


def _estimate(job: Job) -> int:
    texts = [job.prompt] if job.prompt is not None else [message.text for message in job.messages or ()]
    size = sum(len(text.encode()) // 4 + 1 for text in texts if text)
    return size + IMAGE_TOKENS_GUESS * len(job.images)
