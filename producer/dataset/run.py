"""A dataset run: it can be killed and restarted, ends with the same file, and computes nothing twice.

Work is identified by its content: the hash of prompt, model and sampling (and, where equal jobs give
different outputs, the number of earlier equal ones), never by a row's number. During the run OUT.partial
holds its state (journal.py). At the end the rows are read once more and written with their outputs, in order,
to a temporary file that is renamed to OUT. A later run takes OUT as work done, and does only what is new.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.journal import Journal
from pagemill.producer.dataset.recipe import Recipe, raw_text
from pagemill.producer.dataset.rows import (
    DatasetError,
    DiskFailed,
    MemorySource,
    Row,
    RowError,
    Source,
    open_source,
)
from pagemill.producer.dataset.summary import Summary
from pagemill.producer.dataset.work import WINDOW, Tally, Work, WorkLoop
from pagemill.producer.dataset.writers import META, OUTPUT, TEXT_CELLS, Writer, check_output, replacing
from pagemill.producer.wire.schema.job import Job

SPOOL_ROWS = 1_000


@dataclass
class DatasetRun:
    """One run. `limit`: at most this many rows, for a trial. `gold`: the column to compare outputs with."""

    source: Source
    out: Path
    recipe: Recipe
    limit: int | None = None
    gold: str | None = None
    max_errors: int | None = None
    window: int = WINDOW
    overwrite: bool = False
    price_per_hour: float | None = None
    output_column: str = OUTPUT
    on_news: Callable[[Tally], None] = field(default=lambda tally: None)
    on_row: Callable[[Mapping[str, Any]], None] = field(default=lambda line: None)
    """Called with every output line, in order, as the output is written."""

    @property
    def journal_path(self) -> Path:
        return self.out.with_name(self.out.name + ".partial")

    @property
    def errors_path(self) -> Path:
        return self.out.with_name(self.out.name + ".errors.jsonl")

    def execute(self, producer: Producer) -> Summary:
        """Run to the end. Raises DatasetError, TooManyErrors and the producer's errors; see `resume_hint`."""
        with self._opened() as journal:
            with _Stopwatch(journal):
                loop = WorkLoop(
                    producer,
                    journal,
                    window=self.window,
                    max_errors=self.max_errors,
                    on_news=self.on_news,
                )
                loop.run(lambda: self._works(journal))
            return self._finish(journal)

    def detach(self, producer: Producer) -> Tally:
        """Submit everything without collecting: `execute` collects later, possibly in another process."""
        with self._opened() as journal:
            loop = WorkLoop(producer, journal, on_news=self.on_news)
            loop.run(lambda: self._works(journal), collect=False)
            return loop.tally

    def cancel(self, producer: Producer) -> int:
        """Cancel the jobs that an earlier start has under way; returns their number. Its outputs are kept."""
        with Journal(self.journal_path) as journal:
            return WorkLoop(producer, journal).cancel()

    def previews(self, count: int) -> Iterator[tuple[Row, Job | RowError]]:
        """Yield the first rows and their jobs, without a server."""
        self._check(self._first_row())
        for row in islice(self.source.rows(), count):
            yield row, self.recipe.job(row)

    def _opened(self) -> Journal:
        check_output(self.out)
        journal = Journal(self.journal_path)
        try:
            if journal.fact("began") is None:
                self._begin(journal)
            if isinstance(self.source, MemorySource) and not self.source.is_repeatable:
                self.source = _spooled(self.source, journal)
            self._check(self._first_row())
            journal.forget_retryable()
        except BaseException:
            journal.close()
            if journal.is_new:
                self.journal_path.unlink(missing_ok=True)
            raise
        return journal

    def _check(self, first: Row | None) -> None:
        self.recipe.check(first)
        columns = (first.fields if first else None) or {}
        if self.output_column in columns:
            raise DatasetError(
                f"the input has a column {self.output_column!r} already; "
                "name the new one with --output-column"
            )
        if self.gold is not None and columns and self.gold not in columns:
            raise DatasetError(f"there is no column {self.gold!r}; the columns are: {', '.join(columns)}")

    def _first_row(self) -> Row | None:
        return next((row for row in self.source.rows() if row.fields is not None), None)

    def _rows(self) -> Iterator[Row]:
        return islice(self.source.rows(), self.limit)

    def _works(self, journal: Journal) -> Iterator[Work | None]:
        for _, job, name in self._jobs(journal):
            yield Work(_work_key(job, name), job) if isinstance(job, Job) else None

    def _jobs(self, journal: Journal) -> Iterator[tuple[Row, Job | RowError, str]]:
        """Yield every row, its job, and the name for the row's output line."""
        journal.start_reading()
        for row in self._rows():
            job = self.recipe.job(row)
            if isinstance(job, RowError):
                yield row, job, ""
            else:
                digest = job.digest()
                yield row, job, f"{digest}-{journal.occurrence(digest)}"

    def _finish(self, journal: Journal) -> Summary:
        summary = Summary(
            gold=self.gold,
            price_per_hour=self.price_per_hour,
            seconds=float(journal.fact("seconds") or 0.0),
            wants_schema=_wants_schema(self.recipe),
        )
        samples = (row.fields for row in self._rows() if row.fields is not None)
        with (
            replacing(self.errors_path) as errors,
            replacing(self.out, samples, self.output_column) as output,
        ):
            for row, job, name in self._jobs(journal):
                self._write_row(journal, summary, output, errors, row, job, name)
        if not summary.failed:
            self.errors_path.unlink(missing_ok=True)
        if summary.unfinished == 0:
            journal.remove()
        return summary

    def _write_row(
        self,
        journal: Journal,
        summary: Summary,
        output: Writer,
        errors: Writer,
        row: Row,
        job: Job | RowError,
        name: str,
    ) -> None:
        error: RowError | None
        if isinstance(job, RowError):
            error = job
        else:
            key = _work_key(job, name)
            if (kept := journal.output(key)) is not None:
                line = self._line(row, name, kept)
                output.write(line)
                self.on_row(line)
                gold = None if self.gold is None else (row.fields or {}).get(self.gold)
                is_merged = job.is_repeatable and not name.endswith("-1")
                summary.add_success(kept, line[self.output_column], gold, is_merged=is_merged)
                return
            failure = journal.failure(key)
            if failure is None:
                summary.add_unfinished()
                return
            error = RowError(failure.code, failure.message, raw_text(row.fields or {}))
        summary.add_failure(row.number, error.code, error.message)
        errors.write({"row": row.number, "raw": error.raw, "code": error.code, "message": error.message})

    def _line(self, row: Row, name: str, kept: dict[str, Any]) -> dict[str, Any]:
        """Return the input's columns, the output and its origin. An earlier run's `_pagemill` is replaced."""
        samples = kept["outputs"]
        meta = {
            "key": name,
            "row": row.number,
            "finish_reason": samples[0].get("finish_reason"),
            "usage": kept.get("usage"),
        }
        if samples[0].get("reasoning") is not None:
            meta["reasoning"] = samples[0]["reasoning"]
        columns = {name: value for name, value in (row.fields or {}).items() if name != META}
        return {**columns, self.output_column: self._output_value(samples), META: meta}

    def _output_value(self, samples: list[dict[str, Any]]) -> Any:
        """Return the value of the row's `output`.

        A text; the parsed value if a shape was asked for; text and calls if tools were called; a list for n > 1. For
        scores a log-probability, or one per continuation.
        """
        if self.recipe.is_scored:
            scores = [sample["logprob"] for sample in samples]
            names = self.recipe.fields.get("continuations")
            return scores[0] if names is None else dict(zip(map(_name, names), scores, strict=True))
        values = [_value(sample) for sample in samples]
        return values[0] if len(values) == 1 else values

    def _begin(self, journal: Journal) -> None:
        """Record the work in an existing output, and that it has been read, atomically."""
        with journal.transaction():
            if self.out.exists() and not self.overwrite:
                self._adopt(journal)
            journal.set_facts(began=str(int(time.time())))

    def _adopt(self, journal: Journal) -> None:
        """Record the rows of an existing output as work done."""
        for row in open_source(self.out).rows():
            meta = (row.fields or {}).get(META)
            if isinstance(meta, str):
                meta = _loaded(meta)
            if not isinstance(meta, dict) or not isinstance(meta.get("key"), str):
                raise DatasetError(
                    f"{self.out} is there already and was not written by a run (row {row.number}); "
                    "choose another --out, or replace it with --overwrite"
                )
            assert row.fields is not None
            kept = self._kept(row.fields.get(self.output_column), meta)
            digest, _, occurrence = meta["key"].partition("-")
            journal.record(meta["key"], kept, None)
            if occurrence == "1":
                journal.record(digest, kept, None)

    def _kept(self, output: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Reconstruct the journal's result from an output line, as far as possible."""
        wants_json, samples = _wants_schema(self.recipe), int(self.recipe.fields.get("n") or 1)
        is_encoded = wants_json or samples > 1 or self.recipe.is_scored or "tools" in self.recipe.fields
        if isinstance(output, str) and self.out.suffix.lower() in TEXT_CELLS and is_encoded:
            loaded = _loaded(output)
            output = output if loaded is None else loaded
        finish_reason = meta.get("finish_reason")
        if self.recipe.is_scored:
            scores = output.values() if isinstance(output, dict) else [output]
            scored = [{"logprob": score, "finish_reason": finish_reason} for score in scores]
            return {"outputs": scored, "usage": meta.get("usage") or {}}
        outputs = []
        for index, value in enumerate(output if samples > 1 and isinstance(output, list) else [output]):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            is_parsed = not isinstance(value, str) or (wants_json and finish_reason == "stop")
            parsed = value if is_parsed else None
            outputs.append({"index": index, "text": text, "parsed": parsed, "finish_reason": finish_reason})
        if meta.get("reasoning") is not None:
            outputs[0]["reasoning"] = meta["reasoning"]
        return {"outputs": outputs, "usage": meta.get("usage") or {}}


def _value(sample: Mapping[str, Any]) -> Any:
    if sample.get("tool_calls"):
        return {"content": sample["text"], "tool_calls": sample["tool_calls"]}
    return sample["parsed"] if sample.get("parsed") is not None else sample["text"]


class _Stopwatch:
    """Adds the block's duration to the journal's `seconds`, even if the block raises."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(DiskFailed):  # a full disk is already being reported, or will be
            before = float(self._journal.fact("seconds") or 0.0)
            self._journal.set_facts(seconds=repr(before + time.monotonic() - self._started))


def _work_key(job: Job, name: str) -> str:
    """Return the key of a job's work; equal deterministic jobs share one."""
    return name.partition("-")[0] if job.is_repeatable else name


def _name(continuation: Any) -> str:
    """Return a continuation's name in an output: its text, or its token ids."""
    return continuation if isinstance(continuation, str) else " ".join(map(str, continuation))


def _wants_schema(recipe: Recipe) -> bool:
    shape = recipe.fields.get("structured_outputs") or {}
    return "json" in shape or recipe.fields.get("response_format") is not None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


class _SpooledSource:
    def __init__(self, name: str, journal: Journal) -> None:
        self.name = name
        self._journal = journal

    def rows(self) -> Iterator[Row]:
        return self._journal.spooled()

    def count(self) -> int | None:
        return self._journal.spool_size()


def _spooled(source: MemorySource, journal: Journal) -> Source:
    """Store the rows of an iterator on disk, so that they can be read again to write the output."""
    rows = source.rows()
    journal.clear_spool()
    while chunk := list(islice(rows, SPOOL_ROWS)):
        journal.spool(chunk)
    return _SpooledSource(source.name, journal)
