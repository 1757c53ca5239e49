"""A dataset run: it can be killed and restarted, ends with the same file, and computes nothing twice.

Work is identified by its content: the hash of prompt, model and sampling (and, where equal jobs give
different outputs, the number of earlier equal ones), never by a row's number. During the run OUT.partial
holds its state (journal.py). At the end the rows are read once more and written with their outputs, in order,
to a temporary file that is renamed to OUT. A later run takes OUT as work done, and does only what is new.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_args

from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.errors import DatasetError, EmptyFile
from pagemill.producer.dataset.journal import Failure, Journal
from pagemill.producer.dataset.labels.calibration import Calibration, GoldSample
from pagemill.producer.dataset.labels.cascade import cascade_of
from pagemill.producer.dataset.labels.columns import LABEL, LabelTemperature, as_label, by_label
from pagemill.producer.dataset.labels.stages import StageFigures
from pagemill.producer.dataset.lines import OutputLines
from pagemill.producer.dataset.recipe import OnCut, OnRow, Recipe, raw_text
from pagemill.producer.dataset.record import Mean, Record, Totals, differences
from pagemill.producer.dataset.schema_fields import schema_fields
from pagemill.producer.dataset.stopwatch import Stopwatch
from pagemill.producer.dataset.summary import Summary
from pagemill.producer.dataset.tables.places import place_of
from pagemill.producer.dataset.tables.rows import MemorySource, Row, RowError, Source, open_source
from pagemill.producer.dataset.tables.writers import OUTPUT, Writer, check_output, replacing
from pagemill.producer.dataset.template import Condition, TemplateFailed
from pagemill.producer.dataset.work import WINDOW, Tally, Work, WorkLoop
from pagemill.producer.wire.schema.job import Job

SPOOL_ROWS = 1_000


@dataclass
class DatasetRun:
    """One run. `limit`: at most this many rows, for a trial. `gold`: the column to compare outputs with."""

    source: Source
    out: str | Path
    """A path, or a URI that fsspec knows; then `path` is where it is made."""
    recipe: Recipe
    limit: int | None = None
    gold: str | None = None
    max_errors: int | None = None
    window: int = WINDOW
    overwrite: bool = False
    price_per_hour: float | None = None
    output_column: str = ""
    """The name of the output's column. Default: `label` with `label_probs`, else `output`."""
    schema_columns: bool = False
    """Also a column for each field of the JSON schema, named `output.FIELD`."""
    label_temperature: LabelTemperature = 1.0
    """Scales the probabilities of labels as they are written; `fit`: as fits the gold values best."""
    escalate_below: float | None = None
    """Rows whose label's probability is under this go on to the next model of `to`."""
    to: Sequence[str] | str = ()
    """The models of a cascade's later stages, in order."""
    where: str | None = None
    """The rows that are wanted, as an expression in Jinja2's syntax; `limit` counts these alone."""
    on_null: OnRow = "fail"
    on_empty: OnRow = "fail"
    on_cut: OnCut | None = None
    """An output that ended at max_tokens. Default: `fail` where a shape was asked for, else `label`."""
    on_news: Callable[[Tally], None] = field(default=lambda tally: None)
    kv: Callable[[], tuple[Mean, Mean]] = field(default=lambda: (Mean(), Mean()))
    """Asked for the KV utilisation and waste of this start so far."""
    on_row: Callable[[Mapping[str, Any]], None] = field(default=lambda line: None)
    """Called with every output line, in order, as the output is written."""
    on_end: Callable[[int, Mapping[str, Any]], None] = field(default=lambda number, columns: None)
    """Called with every row's number and output line, in order; the line is empty for a row without an output."""

    def __post_init__(self) -> None:
        self.place = place_of(self.out)
        self.path = self.place.path
        for name, known in (("on_null", OnRow), ("on_empty", OnRow), ("on_cut", OnCut)):
            if getattr(self, name) not in (*get_args(known), None):
                raise DatasetError(f"{name} is one of {', '.join(get_args(known))}")
        self.recipe = replace(self.recipe, on_null=self.on_null, on_empty=self.on_empty)
        schema = (self.recipe.fields.get("structured_outputs") or {}).get("json")
        self.fields = schema_fields(schema) if self.schema_columns else {}
        self.output_column = self.output_column or (LABEL if self.recipe.has_label_probs else OUTPUT)
        self._cascade, self._labels = cascade_of(self)
        self._condition = None if self.where is None else Condition(self.where)

    @property
    def more_columns(self) -> dict[str, str]:
        """The output's columns beside its own, and their types."""
        fields = {f"{self.output_column}.{name}": kind for name, kind in self.fields.items()}
        return fields if self._labels is None else self._labels.types

    @property
    def journal_path(self) -> Path:
        return self.path.with_name(self.path.name + ".partial")

    @property
    def record_path(self) -> Path:
        return self.path.with_name(self.path.name + ".run.json")

    @property
    def _lines(self) -> OutputLines:
        return OutputLines(self.recipe, self.output_column, self.fields, self._labels)

    @property
    def errors_path(self) -> Path:
        return self.path.with_name(self.path.name + ".errors.jsonl")

    @property
    def _written(self) -> tuple[Path, ...]:
        return self.errors_path, self.path, self.record_path

    def count(self) -> int | None:
        """Return the number of rows that are wanted, if it is cheap to determine; `limit` aside."""
        return self.source.count() if self._condition is None else None

    def execute(self, producer: Producer) -> Summary:
        """Run to the end. Raises DatasetError, TooManyErrors and the producer's errors."""
        with self._opened(producer) as journal:
            with Stopwatch(journal, self.kv) as stopwatch:

                def tell(tally: Tally) -> None:
                    stopwatch.tick()
                    self.on_news(tally)

                loop = WorkLoop(
                    producer, journal, window=self.window, max_errors=self.max_errors, on_news=tell
                )
                loop.complaint = self._complaint
                loop.tally.stages = {name: Tally() for name in self._stage_names()}
                loop.run(lambda: self._works(journal), self._cascade.followers(journal, self._plain_jobs))
            return self._finish(journal)

    def detach(self, producer: Producer) -> Tally:
        """Submit everything without collecting: `execute` collects later, possibly in another process."""
        with self._opened(producer) as journal:
            loop = WorkLoop(producer, journal, on_news=self.on_news)
            loop.run(lambda: self._works(journal), collect=False)
            return loop.tally

    def cancel(self, producer: Producer) -> int:
        """Cancel the jobs that an earlier start has under way; returns their number. Its outputs are kept."""
        self.place.prepare()
        with Journal(self.journal_path) as journal:
            return WorkLoop(producer, journal).cancel()

    def previews(self) -> Iterator[tuple[Row, str, Job | RowError]]:
        """Yield the rows and their jobs, with the name of a recipe's step, without a server."""
        self._check(self._first_row())
        for row in self._rows():
            yield row, "", self.recipe.job(row)

    @property
    def models(self) -> list[str]:
        """The models of all jobs; NO_MODEL for what `use_model` will name."""
        return [self.recipe.model, *self._cascade.models]

    def use_model(self, name: str) -> None:
        """Take this model for the rows."""
        self.recipe = replace(self.recipe, model=name)

    def _opened(self, producer: Producer) -> Journal:
        self.place.prepare()
        check_output(self.path, self.place.name)
        journal = Journal(self.journal_path)
        try:
            if isinstance(self.source, MemorySource) and not self.source.is_repeatable:
                self.source = _spooled(self.source, journal)
            self._check(self._first_row())
            self._check_jobs()
            if journal.fact("began") is None:
                self._begin(journal)
            else:
                self._continue(journal, producer)
            journal.forget_retryable()
            self.place.claim(journal.fact("run_id") or "", overwrite=self.overwrite)
        except BaseException:
            journal.close()
            if journal.is_new:
                self.journal_path.unlink(missing_ok=True)
                self.place.leave(self._written)
            raise
        return journal

    def _check(self, first: Row | None) -> None:
        self.recipe.check(first)
        self._cascade.check(self.recipe.model)
        if self._condition is not None and first is not None and first.fields:
            self._condition.check_columns(first.fields)
        columns = (first.fields if first else None) or {}
        for name in (self.output_column, *self.more_columns):
            if name in columns:
                raise DatasetError(
                    f"the input has a column {name!r} already; name the new one with --output-column"
                )
        if self.gold is not None and columns and self.gold not in columns:
            raise DatasetError(f"there is no column {self.gold!r}; the columns are: {', '.join(columns)}")

    def _check_jobs(self) -> None:
        """Raise DatasetError if there are rows, and none of them makes a job."""
        count, first = 0, None
        for row in self._rows():
            job = self.recipe.job(row)
            if isinstance(job, Job):
                return
            count += 1
            first = first or f"row {row.number}: {job.code}: {job.message}"
        if count:
            raise DatasetError(f"none of the {count:,} rows makes a job; {first}")

    def _first_row(self) -> Row | None:
        return next((row for row in self.source.rows() if row.fields is not None), None)

    def _rows(self) -> Iterator[Row]:
        rows = self.source.rows()
        return islice(rows if self._condition is None else _selected(rows, self._condition), self.limit)

    def _plain_jobs(self) -> Iterator[Job]:
        return (job for job in map(self.recipe.job, self._rows()) if isinstance(job, Job))

    def _stage_names(self) -> Sequence[str]:
        return self._cascade.models

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

    def _summary(self, journal: Journal, totals: Totals) -> Summary:
        summary = Summary(
            gold=self.gold,
            price_per_hour=self.price_per_hour,
            totals=totals,
            wants_schema=self.recipe.wants_json,
        )
        if self._cascade.models:
            summary.stages = StageFigures(self._cascade, self.recipe.model)
        elif self._labels is not None:
            self._calibrate(journal, summary)
        return summary

    def _more_meta(self) -> Sequence[str]:
        return ("logprobs",) if self.recipe.fields.get("logprobs") is not None else ()

    def _finish(self, journal: Journal) -> Summary:
        totals = Totals.of(json.loads(journal.fact("totals") or Totals().to_json()))
        summary = self._summary(journal, totals)
        samples = (row.fields for row in self._rows() if row.fields is not None)
        with (
            replacing(self.errors_path) as errors,
            replacing(
                self.path,
                samples,
                self.output_column,
                self.more_columns,
                gives_vectors=self.recipe.gives_vectors,
                more_meta=self._more_meta(),
            ) as output,
        ):
            self._write_rows(journal, summary, output, errors)
        if not (summary.failed or summary.failed_steps):
            self.errors_path.unlink(missing_ok=True)
        is_complete = summary.unfinished == 0
        if is_complete:
            Record(self._settings(), totals, summary.rows).write(self.record_path)
        self.place.publish(self._written, is_complete=is_complete)
        if is_complete:
            journal.remove()
            self.place.leave(self._written)
        return summary

    def _calibrate(self, journal: Journal, summary: Summary) -> None:
        """Fit a temperature on the rows with a gold value, and scale by it if that was asked for."""
        assert self._labels is not None
        sample = GoldSample()
        for row, job, name in self._jobs(journal) if self.gold is not None else ():
            gold = (row.fields or {}).get(self.gold or "")
            kept = journal.output(_work_key(job, name)) if isinstance(job, Job) and gold is not None else None
            if kept is not None:
                sample.add(as_label(gold), by_label(kept["outputs"][0]["label_probs"]))
        fitted = sample.fit()
        if self.label_temperature == "fit":
            self._labels = replace(self._labels, temperature=fitted or 1.0)
        summary.calibration = Calibration(sample, fitted, self._labels.temperature)

    def _write_rows(self, journal: Journal, summary: Summary, output: Writer, errors: Writer) -> None:
        for row, job, name in self._jobs(journal):
            self._write_row(journal, summary, output, errors, row, job, name)

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
        if isinstance(job, RowError):
            error = job
        else:
            key = _work_key(job, name)
            kept = self._cascade.kept(journal, key, job.model)
            failure = journal.failure(key) if kept is None else self._complaint(key, kept)
            if kept is not None and failure is None:
                line = self._lines.make(row, name, kept)
                output.write(line)
                self.on_row(line)
                self.on_end(row.number, line)
                gold = None if self.gold is None else (row.fields or {}).get(self.gold)
                is_merged = job.is_repeatable and not name.endswith("-1")
                summary.add_sample(row, line[self.output_column])
                summary.add_success(kept, line[self.output_column], gold, is_merged=is_merged)
                if self._labels is not None and gold is not None:
                    prob = line[f"{self.output_column}_prob"]
                    summary.add_confidence(line[self.output_column], prob, gold)
                return
            if failure is None:
                self.on_end(row.number, {})
                summary.add_unfinished()
                return
            error = RowError(failure.code, failure.message, raw_text(row.fields or {}))
        self._write_error(summary, errors, row, error)

    def _write_error(self, summary: Summary, errors: Writer, row: Row, error: RowError) -> None:
        """Count a row that has no line in the output."""
        self.on_end(row.number, {})
        if error.is_skipped:
            summary.add_skipped(error.code)
            return
        summary.add_failure(row.number, error.code, error.message)
        errors.write({"row": row.number, "raw": error.raw, "code": error.code, "message": error.message})

    def _complaint(self, key: str, kept: Mapping[str, Any]) -> Failure | None:
        return self.recipe.cut_off(kept, self.on_cut)

    def _begin(self, journal: Journal) -> None:
        """Record the work in an existing output, and that it has been read, atomically."""
        with journal.transaction():
            totals = Totals()
            if not self.overwrite:
                self.place.fetch(self._written)
            if self.path.exists() and not self.overwrite:
                totals = self._adopt(journal)
            journal.set_facts(
                began=str(int(time.time())), settings=json.dumps(self._settings()), totals=totals.to_json()
            )

    def _adopt(self, journal: Journal) -> Totals:
        """Record the rows of an existing output as work done; returns the time that they took."""
        if not _has_rows(self.path):
            return Totals()
        record = Record.read(self.record_path)
        if record is not None:
            self._check_same(record.settings, self.place.name)
            if self.limit is not None and self.limit < record.rows:
                raise DatasetError(
                    f"{self.place.name} is the output of {record.rows:,} rows, and --limit {self.limit} would drop "
                    "some of them; choose another --out, or replace it with --overwrite"
                )
        rows = tokens = 0
        for row in open_source(self.path).rows():
            line = self._take(journal, row.fields or {})
            if line is None:
                raise DatasetError(
                    f"{self.place.name} is there already and was not written by a run (row {row.number}); "
                    "choose another --out, or replace it with --overwrite"
                )
            tokens += line
            rows += 1
        if rows and not self._knows_a_row(journal):
            raise DatasetError(
                f"{self.place.name} has none of these rows with this prompt, model and sampling: it is the output of "
                "another run. Choose another --out, or replace it with --overwrite"
            )
        return Totals(untimed_rows=rows, untimed_tokens=tokens) if record is None else record.totals

    def _take(self, journal: Journal, fields: Mapping[str, Any]) -> int | None:
        """Record a line's work as done, and return its output tokens; None for no line of a run."""
        line = self._lines.read(fields, self.path)
        if line is None:
            return None
        name, kept = line
        digest, _, occurrence = name.partition("-")
        answers = dict(self._cascade.recorded(kept, digest))
        journal.record(name, answers[digest], None)
        for key, answer in answers.items() if occurrence == "1" else ():
            journal.record(key, answer, None)
        return sum(answer["usage"].get("completion_tokens") or 0 for answer in answers.values())

    def _knows_a_row(self, journal: Journal) -> bool:
        return any(journal.output(name) for _, _, name in self._jobs(journal) if name)

    def _continue(self, journal: Journal, producer: Producer) -> None:
        """Check that the journal is of the same work; with `overwrite` other work is cancelled and forgotten."""
        then = json.loads(journal.fact("settings") or "null")
        if then is None:
            return
        if not self.overwrite:
            self._check_same(then, self.journal_path)
        elif differences(then, self._settings()):
            WorkLoop(producer, journal).cancel()
            journal.start_over()
            self._begin(journal)
        journal.set_facts(settings=json.dumps(self._settings()))

    def _check_same(self, then: dict[str, Any], name: object) -> None:
        """Raise DatasetError for other settings. More stages for rows that have the first are the same work."""
        known = then.get("to") or []
        if list(self._cascade.models[: len(known)]) == known:
            then = then | {"to": self._settings()["to"]}
        if differing := differences(then, self._settings()):
            raise DatasetError(
                f"{name} is of a run with other settings ({differing}). "
                "Choose another --out, or start over with --overwrite"
            )

    def _settings(self) -> dict[str, Any]:
        """Return what the output depends on but the rows, as JSON."""
        about = {
            "output_column": self.output_column,
            "where": self.where,
            "schema_columns": self.schema_columns,
            "to": self._cascade.models or None,
        }
        settings = {**self.recipe.settings(), **about}
        return cast("dict[str, Any]", json.loads(json.dumps(settings, default=str)))


def _work_key(job: Job, name: str) -> str:
    """Return the key of a job's work; equal deterministic jobs share one."""
    return name.partition("-")[0] if job.is_repeatable else name


def _has_rows(path: Path) -> bool:
    try:
        return next(open_source(path).rows(), None) is not None
    except EmptyFile:
        return False


def _selected(rows: Iterator[Row], condition: Condition) -> Iterator[Row]:
    """Yield the rows that the condition holds for, and those that it fails on as errors."""
    for row in rows:
        try:
            if row.fields is None or condition.holds(row.fields):
                yield row
        except TemplateFailed as error:
            yield Row(row.number, error=RowError("where_failed", str(error), raw_text(row.fields or {})))


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
