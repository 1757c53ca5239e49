"""Counting a prompt's tokens in the producer: exact with the model's tokenizer file, else estimated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagemill.producer.wire.schema.job import Job


class TokenCounter:
    """`model`: a directory with a tokenizer.json for exact counts of the text (a chat template adds a few)."""

    def __init__(self, model: str | None) -> None:
        self._tokenizer: Any = None
        path = Path(model or "") / "tokenizer.json"
        if model is not None and path.is_file():
            try:
                from tokenizers import Tokenizer
            except ModuleNotFoundError:
                return
            self._tokenizer = Tokenizer.from_file(str(path))

    @property
    def is_exact(self) -> bool:
        return self._tokenizer is not None

    @property
    def about(self) -> str:
        return "" if self.is_exact else "about "

    def count(self, job: Job) -> int:
        """Return the tokens of the job's prompt, after its own truncation."""
        size = self._count(job)
        return size if job.truncate_prompt_tokens is None else min(size, job.truncate_prompt_tokens)

    def _count(self, job: Job) -> int:
        if job.prompt_token_ids is not None:
            return len(job.prompt_token_ids)
        texts = [job.prompt] if job.prompt is not None else [message.text for message in job.messages or ()]
        if self._tokenizer is None:
            return sum(len(text.encode()) // 4 + 1 for text in texts if text)
        return sum(len(self._tokenizer.encode(text).ids) for text in texts if text)
