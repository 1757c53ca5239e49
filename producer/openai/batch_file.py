"""Batch files of OpenAI's Batch API: input files run unchanged, and the output has the same format.

lines.py handles lines and responses; this module handles the file on disk, with a journal next to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.journal import Failure, Journal
from pagemill.producer.dataset.tables.compressed import data_suffix
from pagemill.producer.dataset.tables.writers import check_output, replacing
from pagemill.producer.dataset.watch import Notify
from pagemill.producer.dataset.work import WINDOW, Tally, Work, WorkLoop, warn
from pagemill.producer.openai.lines import BatchAnswers, BatchRequests, BatchSummary, RefusedFile
from pagemill.producer.wire.schema.job import Job


@dataclass
class BatchFile:
    """One batch file. `model`: replaces the lines' models, for files written for a model not served here."""

    path: Path
    out: Path
    model: str | None = None
    window: int = WINDOW
    deadline: float | None = None
    """Unix seconds; requests that have not ended by then expire, the others are delivered."""

    @property
    def errors_path(self) -> Path:
        return self.out.with_name(f"{self.out.stem}.errors.jsonl")

    @property
    def journal_path(self) -> Path:
        return self.out.with_name(self.out.name + ".partial")

    def check(self) -> int:
        """Like BatchRequests.check; also, the output must not exist. Raises DatasetError."""
        check_output(self.out, str(self.out))
        if data_suffix(self.out) not in (".jsonl", ".ndjson", ".json"):
            raise DatasetError(
                f"{self.out}: the responses are JSON lines; choose a name that ends with .jsonl"
            )
        for target in (self.out, self.errors_path):
            if target.exists() and self.path.exists() and target.samefile(self.path):
                raise DatasetError(
                    f"{target} is the request file, and would be replaced; choose another --out"
                )
        if self.path.exists() and not self.path.is_file():
            raise DatasetError(f"{self.path} is not a regular file; a batch file is read several times")
        try:
            return self._requests().check()
        except RefusedFile as error:
            place = f"{self.path}" if error.line is None else f"{self.path}, request {error.line}"
            raise DatasetError(f"{place}: {error.reason}") from None

    def models(self) -> set[str]:
        """Return the models that the lines name."""
        return self._requests().models()

    def execute(
        self,
        producer: Producer,
        on_news: Callable[[Tally], None] = lambda tally: None,
        on_notice: Notify = warn,
    ) -> BatchSummary:
        """Run to the end and write both files. Call again after any interruption. `on_notice`: as for a DatasetRun."""
        self.check()
        with Journal(self.journal_path) as journal:
            journal.forget_retryable()
            loop = WorkLoop(producer, journal, window=self.window, on_news=on_news, on_notice=on_notice)
            loop.run(self._works)
            return self._finish(journal)

    def cancel(self, producer: Producer) -> int:
        """Cancel the unfinished jobs of an earlier run; `deliver` then writes the finished ones."""
        with Journal(self.journal_path) as journal:
            return WorkLoop(producer, journal).cancel()

    def deliver(self, producer: Producer) -> BatchSummary:
        """Collect the jobs that have ended and write both files, without submitting anything."""
        self.check()
        with Journal(self.journal_path) as journal:
            WorkLoop(producer, journal).run(lambda: iter(()))
            return self._finish(journal)

    def _requests(self) -> BatchRequests:
        return BatchRequests(self.path, self.model, self.deadline)

    def _works(self) -> Iterator[Work]:
        for request in self._requests():
            if isinstance(request.job, Job):
                yield Work(request.work_key(), request.job)

    def _finish(self, journal: Journal) -> BatchSummary:
        with replacing(self.errors_path) as errors, replacing(self.out) as output:
            answers = BatchAnswers(output, errors)
            for request in self._requests():
                if isinstance(request.job, Failure):
                    answers.add(request, "", request.job)
                    continue
                key = request.work_key()
                missing = journal.failure(key) or Failure("worker_lost", "the request has not finished", True)
                answers.add(request, key, journal.output(key) or missing)
        journal.remove()
        return answers.summary
