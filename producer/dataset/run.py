"""A dataset run: it can be killed and restarted, produces the same file, and computes nothing twice.

Every row goes through a chain of steps: one, those of a recipe, or the stages of a cascade. Work is identified by its
content, never by a row's number: the hash of prompt, model and sampling (and if equal jobs have different outputs, the
number of earlier equal ones). During the run OUT.partial holds its state (journal.py). At the end the rows are read
once more and written with their outputs, in order, to a temporary file that is renamed to OUT. A later run treats OUT
as finished work, and only does new work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.errors import DatasetError, DiskError, RunStopped
from pagemill.producer.dataset.journal import Failure, Journal
from pagemill.producer.dataset.label_columns import LabelColumns, LabelTemperature, as_label, by_label
from pagemill.producer.dataset.labels.calibration import Calibration, GoldSample
from pagemill.producer.dataset.labels.cascade import chain_of, remote_of
from pagemill.producer.dataset.labels.stages import StageFigures
from pagemill.producer.dataset.outputs import LineWriter, no_lines, output_of
from pagemill.producer.dataset.recipe import OnRow, OnTruncated, Recipe, raw_text
from pagemill.producer.dataset.record import Mean, Record, Totals, differences
from pagemill.producer.dataset.remote_model import Remote, RemoteModel
from pagemill.producer.dataset.row_lines import RowLines
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.figures import StepFigures
from pagemill.producer.dataset.steps.step import Step
from pagemill.producer.dataset.steps.walk import StepState, Walk, plain_job
from pagemill.producer.dataset.stopwatch import Stopwatch
from pagemill.producer.dataset.summary import Summary
from pagemill.producer.dataset.tables.pictures import picture_folders, with_pictures
from pagemill.producer.dataset.tables.rows import MemorySource, Row, RowError, Source
from pagemill.producer.dataset.tables.shards import SAMPLED_ROWS, ShardedSource, changed_files, joined_lines
from pagemill.producer.dataset.tables.writers import META, STEPS, Form, Writer, replacing
from pagemill.producer.dataset.template import Condition, TemplateFailed
from pagemill.producer.dataset.watch import Notify
from pagemill.producer.dataset.work import WINDOW, Tally, WorkLoop, warn
from pagemill.producer.wire.schema.job import Job

SPOOL_ROWS = 1_000
SPOOL_ROWS_WITH_IMAGES = 32


NOT_FOR_RECIPES = {
    "gold": "each step names its own column of gold values",
    "output_column": "each step names its own column",
    "label_temperature": "the queue compares the probabilities that `when` asks for, and does not scale them",
    "escalate_below": "`when` selects the rows that another step processes, with prob_below",
    "to": "each step names its model",
    "api_budget": "its steps run in the queue",
    "api_key_file": "its steps run in the queue",
}
"""Options of a run that a recipe does not support, with the reasons."""


@dataclass
class DatasetRun:
    """One run. `limit`: maximum number of rows, for a trial. `gold`: the column to compare outputs with."""

    source: Source
    out: str | Path
    """A path, or a URI that fsspec supports; `path` is then where it is created. A folder, or a name with `{shard}`,
    for an output of several files."""
    recipe: InitVar[Recipe | Chain]
    """The processing of each row; a chain consists of a recipe's steps."""
    limit: int | None = None
    gold: str | None = None
    max_errors: int | None = None
    window: int = WINDOW
    overwrite: bool = False
    price_per_hour: float | None = None
    is_trial: bool = False
    """Write no output: results stay in the journal for a later run."""
    output_column: str = ""
    """The name of the output's column. Default: `label` with `label_probs`, otherwise `output`."""
    schema_columns: bool = False
    """Add a column for each field of a JSON schema, named `output.FIELD`."""
    label_temperature: LabelTemperature = 1.0
    """Scales the probabilities of labels in the output; `fit`: as fits the gold values best."""
    escalate_below: float | None = None
    """Rows whose label's probability is lower are passed on to the next model of `to`."""
    to: Sequence[str] | str = ()
    """The models of a cascade's later stages, in order."""
    api_budget: int | None = None
    """Maximum tokens to use at the API of a last model `openai:https://host/v1/NAME`, which requires it."""
    api_key_file: str | Path | None = None
    """The file with that API's key. Default: the variable PAGEMILL_API_KEY."""
    where: str | None = None
    """The rows to process, as an expression in Jinja2's syntax; `limit` only counts these."""
    image_column: str | None = None
    """The column with each row's image, or a list of images: a path, bytes, a URL or a Hugging Face struct."""
    on_null: OnRow = "fail"
    on_empty: OnRow = "fail"
    on_truncated: OnTruncated | None = None
    """The treatment of an output that ended at max_tokens. Default: `fail` if it is structured; otherwise `label`."""
    rows_per_file: int | None = None
    """Rows per file of an output that is a folder. Default: a file for each file of the source."""
    on_news: Callable[[Tally], None] = field(default=lambda tally: None)
    on_notice: Notify = warn
    """Called with the reason why the run waits, and whether it cannot continue without help. Default: a log warning."""
    kv: Callable[[], tuple[Mean, Mean]] = field(default=lambda: (Mean(), Mean()))
    """Returns the KV utilization and waste of this start so far."""
    on_row: Callable[[Mapping[str, Any]], None] = field(default=lambda line: None)
    """Called with every output line, in order, as the output is written."""
    on_end: Callable[[int, Mapping[str, Any]], None] = field(default=lambda number, columns: None)
    """Called with every row's number and output line, in order; the line is empty for a row without an output."""

    def __post_init__(self, recipe: Recipe | Chain) -> None:
        self.output = output_of(self.out, self.source, self.rows_per_file)
        self.place = self.output.place
        self.path = self.output.path
        for name, known in (("on_null", OnRow), ("on_empty", OnRow), ("on_truncated", OnTruncated)):
            if getattr(self, name) not in (*get_args(known), None):
                raise DatasetError(f"{name} is one of {', '.join(get_args(known))}")
        self._remote: RemoteModel | None = None
        if isinstance(recipe, Chain):
            for name, reason in NOT_FOR_RECIPES.items():
                default = getattr(DatasetRun, name)
                if (getattr(self, name) or default) != default:
                    raise DatasetError(f"{name} is not for a recipe: {reason}")
            chain = recipe
        else:
            chain = chain_of(recipe, self)
            self._remote = remote_of(self)
        chain = chain.with_recipes(
            on_null=self.on_null, on_empty=self.on_empty, image_column=self.image_column
        )
        self.chain = chain.with_schema_columns() if self.schema_columns else chain
        self.output_column, *_ = self.chain.columns
        if self.output_column == META:
            raise DatasetError(f"{META} is the column about the run; choose another --output-column")
        self._shard = 0
        self._noticed: set[str] = set()
        self._condition = None if self.where is None else Condition(self.where)

    @property
    def more_columns(self) -> dict[str, str]:
        """Return the output's columns except the first, and their types."""
        return {name: kind for name, kind in self.chain.columns.items() if name != self.output_column}

    @property
    def journal_path(self) -> Path:
        return self.path.with_name(self.path.name + ".partial")

    @property
    def outputs_name(self) -> str:
        """Return the name of the file with the outputs at the end: OUT, or the journal for a trial."""
        return str(self.journal_path) if self.is_trial else self.place.name

    @property
    def record_path(self) -> Path:
        return self.path.with_name(self.path.name + ".run.json")

    @property
    def errors_path(self) -> Path:
        return self.path.with_name(self.path.name + ".errors.jsonl")

    @property
    def _written(self) -> tuple[Path, ...]:
        return self.errors_path, self.path, self.record_path

    def count(self) -> int | None:
        """Return the number of rows to process, regardless of `limit`, if it is cheap to determine."""
        return self.source.count() if self._condition is None else None

    def execute(self, producer: Producer) -> Summary:
        """Run to the end. Raises DatasetError, RunStopped, TooManyErrors and the producer's errors."""
        with self._opened(producer) as journal, _begun():
            self._notice_joined()
            with Stopwatch(journal, self.kv) as stopwatch:

                def report(tally: Tally) -> None:
                    tally.files = self._files_read()
                    stopwatch.tick()
                    self.on_news(tally)

                loop = WorkLoop(
                    producer,
                    journal,
                    window=self.window,
                    max_errors=self.max_errors,
                    on_news=report,
                    on_notice=self.on_notice,
                )
                loop.complaint = self._complaint
                loop.tally.stages = {step.name: Tally() for step in self.chain.steps[1:]}
                walk = Walk(self.chain, journal, self.on_truncated)
                with nullcontext() if self._remote is None else Remote(self._remote, journal) as loop.remote:
                    loop.run(lambda: walk.works(self._noted(self._rows())), walk.followers(self._rows))
            return self._finish(journal)

    def _noted(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the rows, and record the file that they are read from."""
        for row in rows:
            self._shard = row.shard
            yield row

    def _files_read(self) -> tuple[int, int] | None:
        """Return the number of the file that is being read, and the total number."""
        return (self._shard + 1, len(self.source.shards)) if isinstance(self.source, ShardedSource) else None

    def _notice_joined(self) -> None:
        """Report rows of several lines, which stray quotes may have joined, as soon as all have been read."""
        for notice in joined_lines(self.source):
            if notice not in self._noticed:
                self._noticed.add(notice)
                self.on_notice(notice, False)

    def detach(self, producer: Producer) -> Tally:
        """Submit everything without collecting: `execute` collects later, possibly in another process."""
        with self._opened(producer) as journal:
            loop = WorkLoop(producer, journal, on_news=self.on_news)
            walk = Walk(self.chain, journal, self.on_truncated)
            loop.run(lambda: walk.works(self._rows()), collect=False)
            return loop.tally

    def cancel(self, producer: Producer) -> int:
        """Cancel the unfinished jobs of an earlier run; returns their number. Its outputs are kept."""
        self.place.prepare()
        with Journal(self.journal_path) as journal:
            return WorkLoop(producer, journal).cancel()

    def previews(self) -> Iterator[tuple[Row, str, Job | RowError]]:
        """Yield the rows and their steps' jobs, with placeholders for outputs of other steps, without a server."""
        self._check_rows()
        for row in self._rows():
            for step in self.chain.at_once:
                yield row, step.name, plain_job(row, step)

    @property
    def models(self) -> list[str]:
        """Return the models of the queue's jobs; NO_MODEL for the one that `use_model` will set."""
        return [name for name in self.chain.models if self._remote is None or name != self._remote.name]

    def use_model(self, name: str) -> None:
        """Use this model for the steps that name none."""
        self.chain = self.chain.with_model(name)

    def _opened(self, producer: Producer) -> Journal:
        self.place.prepare()
        self.output.check()
        journal = Journal(self.journal_path)
        try:
            if isinstance(self.source, MemorySource) and not self.source.is_repeatable:
                step = SPOOL_ROWS if self.image_column is None else SPOOL_ROWS_WITH_IMAGES
                self.source = _spooled(self.source, journal, step)
            self._check_rows()
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

    def _check(self, sample: Row | None, first: Row | None = None) -> None:
        """Raise DatasetError for columns that the sample lacks, or that the first row has already."""
        self.chain.check(sample)
        if self._condition is not None and sample is not None and sample.fields:
            self._condition.check_columns(sample.fields)
        columns = (first.fields if first else None) or {}
        for name in self.chain.columns:
            if name in columns:
                raise DatasetError(
                    f"the input has a column {name!r} already; name the new one with --output-column"
                )

    def _check_jobs(self) -> None:
        """Raise DatasetError if there are rows, but no row makes a job of any step."""
        count, first = 0, None
        for row in self._rows():
            for step in self.chain.at_once:
                job = plain_job(row, step)
                if isinstance(job, Job):
                    return
                first = first or f"row {row.number}: {job.code}: {job.message}"
            count += 1
        if count:
            raise DatasetError(f"none of the {count:,} rows makes a job; {first}")

    def _check_rows(self) -> None:
        """Raise DatasetError if the columns of any file are not those that the run needs."""
        source = self.source
        if not isinstance(source, ShardedSource):
            self._check_not_replaced(source)
            self._check(*_sample(source.rows()))
            return
        for path in (self.path, self.errors_path, self.record_path):
            if source.covers(path):
                raise DatasetError(f"{path} would be among the files of {source.name}; choose another --out")
        self._check(None)
        source.check_columns()
        for index, shard in enumerate(source.shards):
            sample = _sample(source.rows_of(index))
            try:
                self._check(*sample)
            except DatasetError as error:
                raise DatasetError(f"{shard.path}: {error}") from None

    def _check_not_replaced(self, source: Source) -> None:
        file = Path(source.name)
        for path in (self.path, self.errors_path, self.record_path):
            if path.exists() and file.exists() and path.samefile(file):
                raise DatasetError(f"{path} is the input, and would be replaced; choose another --out")

    def _rows(self) -> Iterator[Row]:
        rows = self.source.rows()
        if self.image_column is not None:
            rows = with_pictures(rows, self.image_column, picture_folders(self.source))
        rows = _without_columns(rows, self.chain.columns)
        return islice(rows if self._condition is None else _selected(rows, self._condition), self.limit)

    def _states(self, journal: Journal) -> Iterator[tuple[Row, list[StepState]]]:
        """Yield every row, and the states of its steps; none for an unreadable row."""
        walk = Walk(self.chain, journal, self.on_truncated)
        journal.start_reading()
        for row in self._rows():
            yield row, list(walk.states(row))

    def _summary(self, journal: Journal, totals: Totals) -> Summary:
        first = self.chain.first
        summary = Summary(gold=self.gold, price_per_hour=self.price_per_hour, totals=totals)
        if self.chain.is_recipe:
            summary.steps = StepFigures(self.chain)
            return summary
        summary.wants_schema = first.recipe.wants_json
        if len(self.chain.steps) > 1:
            summary.stages = StageFigures(self.chain)
        elif first.labels is not None:
            self._calibrate(journal, summary, first, first.labels)
        return summary

    def _more_meta(self) -> Sequence[str]:
        if self.chain.is_recipe:
            return (STEPS,)
        return ("logprobs",) if self.chain.first.recipe.fields.get("logprobs") is not None else ()

    def _finish(self, journal: Journal) -> Summary:
        totals = Totals.from_fields(json.loads(journal.fact("totals") or Totals().to_json()))
        summary = self._summary(journal, totals)
        with replacing(self.errors_path) as errors, self._output() as output:
            self._write_rows(journal, summary, output, errors)
            output.end(summary, is_limited=self.limit is not None)
            self._check_files(journal)
        self._notice_joined()
        if not (summary.failed or summary.failed_steps):
            self.errors_path.unlink(missing_ok=True)
        if self.is_trial:
            self.place.publish((self.errors_path,))
            return summary
        is_complete = summary.unfinished == 0
        if is_complete:
            Record(self._settings(), totals, summary.rows).write(self.record_path)
        self.place.publish(self._written, is_complete=is_complete)
        if is_complete:
            journal.remove()
            self.place.leave(self._written)
        return summary

    def _output(self) -> AbstractContextManager[LineWriter]:
        if self.is_trial:
            return nullcontext(no_lines())
        return self.output.writing(
            partial(
                Form.from_path,
                samples=(row.fields for row in self._rows() if row.fields is not None),
                output_column=self.output_column,
                fields=self.more_columns,
                gives_vectors=self.chain.first.recipe.gives_vectors,
                more_meta=self._more_meta(),
            )
        )

    def _calibrate(self, journal: Journal, summary: Summary, step: Step, labels: LabelColumns) -> None:
        """Fit a temperature on the rows with a gold value, and scale by it if requested."""
        sample = GoldSample()
        for row, (state, *_) in self._states(journal) if self.gold is not None else ():
            gold = (row.fields or {}).get(self.gold or "")
            if gold is not None and state.kept is not None:
                sample.add(as_label(gold), by_label(state.kept["outputs"][0]["label_probs"]))
        fitted = sample.fit()
        if self.label_temperature == "fit":
            labels = replace(labels, temperature=fitted or 1.0)
            self.chain = Chain((replace(step, labels=labels),))
        summary.calibration = Calibration(sample, fitted, labels.temperature)

    def _check_files(self, journal: Journal) -> None:
        """Raise DatasetError if the source's files are not those at the start of the run."""
        then = journal.fact("files")
        if then is None or not isinstance(self.source, ShardedSource):
            return
        if differing := changed_files(json.loads(then), self.source.fingerprints()):
            raise DatasetError(
                f"the files of {self.source.name} are not those that this run began with ({differing}). "
                "Restore them, or continue with the changed files by --overwrite; what was done is kept"
            )

    def _write_rows(self, journal: Journal, summary: Summary, output: LineWriter, errors: Writer) -> None:
        for row, states in self._states(journal):
            output.reach(row)
            if any(state.job is not None for state in states):
                self.on_end(row.number, {})
                summary.add_unfinished()
            elif any(state.kept is not None for state in states):
                self._write_line(summary, output, errors, row, states)
            else:
                if summary.steps is not None and row.error is None:
                    summary.steps.add(row, states, {})
                self._write_error(summary, errors, row, row.error or self._ended(row, states))

    def _write_line(
        self, summary: Summary, output: LineWriter, errors: Writer, row: Row, states: list[StepState]
    ) -> None:
        """Write the results of the steps; for a recipe also the failed steps."""
        lines = RowLines(self.chain, self.path)
        result = lines.result(states)
        line = lines.make(row, states, result)
        output.write(line)
        self.on_row(line)
        self.on_end(row.number, line)
        value = line[self.output_column]
        gold = None if self.gold is None else (row.fields or {}).get(self.gold)
        is_merged = all(state.is_merged for state in states if state.kept is not None)
        shown = {name: line[name] for name in self.chain.columns} if self.chain.is_recipe else value
        summary.add_sample(row, shown)
        summary.add_success(result, value, gold, is_merged=is_merged)
        if gold is not None and self.chain.first.labels is not None:
            summary.add_confidence(value, line[f"{self.output_column}_prob"], gold)
        if summary.steps is None:
            return
        summary.steps.add(row, states, line)
        for state in states:
            if state.failure is not None:
                about = {**self._about(row), "step": state.step.name, "raw": raw_text(row.fields or {})}
                errors.write(about | {"code": state.failure.code, "message": state.failure.message})

    def _ended(self, row: Row, states: list[StepState]) -> RowError:
        """Return the first step's failure, or the reason why all were left out."""
        raw = raw_text(row.fields or {})
        for state in states:
            if state.failure is not None:
                step = f"step {state.step.name}: " if self.chain.is_recipe else ""
                return RowError(state.failure.code, step + state.failure.message, raw)
        return RowError(states[0].skipped, "no step was to run", raw, True)

    def _write_error(self, summary: Summary, errors: Writer, row: Row, error: RowError) -> None:
        """Count a row without a line in the output."""
        self.on_end(row.number, {})
        if error.is_skipped:
            summary.add_skipped(error.code)
            return
        about = self._about(row)
        place = f" ({about['file']} row {about['file_row']})" if "file" in about else ""
        summary.add_failure(f"{row.number}{place}", error.code, error.message)
        errors.write({**about, "raw": error.raw, "code": error.code, "message": error.message})

    def _about(self, row: Row) -> dict[str, Any]:
        """Return a row's number and, for a source of several files, its file and its number in it."""
        if not isinstance(self.source, ShardedSource):
            return {"row": row.number}
        return {"row": row.number, "file": self.source.shards[row.shard].name, "file_row": row.shard_row}

    def _complaint(self, key: str, kept: Mapping[str, Any]) -> Failure | None:
        name = key.partition("~")[0].partition("@")[2]
        step = next((step for step in self.chain.steps if step.name == name), self.chain.first)
        return step.recipe.cut_off(kept, self.on_truncated)

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
            self._note_files(journal)

    def _note_files(self, journal: Journal) -> None:
        """Record the files of the source."""
        if isinstance(self.source, ShardedSource):
            journal.set_facts(files=json.dumps(self.source.fingerprints()))

    def _adopt(self, journal: Journal) -> Totals:
        """Record the rows of an existing output as finished work. Returns the time that they took."""
        if next(self.output.lines(), None) is None:
            return Totals()
        record = Record.read(self.record_path)
        if record is not None:
            self._check_same(record.settings, self.place.name)
            if self.limit is not None and self.limit < record.rows and not self.is_trial:
                raise DatasetError(
                    f"{self.place.name} is the output of {record.rows:,} rows, and --limit {self.limit} would drop "
                    "some of them; choose another --out, or replace it with --overwrite"
                )
        rows = tokens = 0
        for file, row in self.output.lines():
            line = self._take(journal, file, row.fields or {})
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

    def _take(self, journal: Journal, file: Path, fields: Mapping[str, Any]) -> int | None:
        """Record a line's work as finished, and return its output tokens; None if it is not a line of a run."""
        works = RowLines(self.chain, file).read(fields)
        if works is None:
            return None
        for key, kept in works:
            journal.record(key, kept, None)
        results = {id(kept): kept for _, kept in works}.values()
        return sum(kept["usage"].get("completion_tokens") or 0 for kept in results)

    def _knows_a_row(self, journal: Journal) -> bool:
        return any(
            journal.output(state.key) is not None for _, states in self._states(journal) for state in states
        )

    def _continue(self, journal: Journal, producer: Producer) -> None:
        """Check that the journal is of the same work; with `overwrite` other work is cancelled and deleted."""
        then = json.loads(journal.fact("settings") or "null")
        if then is None:
            return
        if not self.overwrite:
            self._check_same(then, self.journal_path)
            self._check_limit(journal)
            self._check_files(journal)
        elif differences(then, self._settings()):
            WorkLoop(producer, journal).cancel()
            journal.start_over()
            self._begin(journal)
        journal.set_facts(settings=json.dumps(self._settings()))
        self._note_files(journal)

    def _check_limit(self, journal: Journal) -> None:
        """Raise DatasetError if the end of a limited run would delete finished rows beyond the limit."""
        if self.limit is None or self.is_trial:
            return
        done = journal.count() // len(self.chain.steps)
        if done > self.limit:
            raise DatasetError(
                f"{self.place.name} has {done:,} finished rows, and --limit {self.limit} would drop some of them; "
                "choose another --out, or replace it with --overwrite"
            )

    def _check_same(self, then: dict[str, Any], name: object) -> None:
        """Raise DatasetError if the settings differ. Steps and stages may be added."""
        now = self._settings()
        stages = then.get("to") or []
        if (now.get("to") or [])[: len(stages)] == stages:
            then = then | {"to": now.get("to")}
        known, steps = then.get("steps") or {}, now.get("steps") or {}
        if differing := differences(then | {"steps": None}, now | {"steps": None}):
            raise DatasetError(
                f"{name} is of a run with other settings ({differing}). "
                "Choose another --out, or start over with --overwrite"
            )
        for step, settings in known.items():
            if step not in steps:
                raise DatasetError(f"{name} has a step {step}, which the recipe lacks; choose another --out")
            if differing := differences(settings, steps[step]):
                raise DatasetError(
                    f"{name} is of a recipe whose step {step} was another ({differing}). "
                    "Choose another --out, or start over with --overwrite"
                )

    def _settings(self) -> dict[str, Any]:
        """Return everything that the output depends on except the rows, as JSON."""
        return self.chain.settings(self.where, schema_columns=self.schema_columns)


def _sample(rows: Iterable[Row]) -> tuple[Row | None, Row | None]:
    """Return a row with the columns of a sample's rows, and the first readable row."""
    rows = iter(rows)
    sample = [row for row in islice(rows, SAMPLED_ROWS) if row.fields is not None]
    if not sample:
        first = next((row for row in rows if row.fields is not None), None)
        return first, first
    fields: dict[str, Any] = {}
    for row in sample:
        fields |= {name: value for name, value in (row.fields or {}).items() if name not in fields}
    return replace(sample[0], fields=fields), sample[0]


@contextmanager
def _begun() -> Iterator[None]:
    """Raise RunStopped for a DatasetError of the block, since jobs may have been submitted."""
    try:
        yield
    except (DiskError, RunStopped):
        raise
    except DatasetError as error:
        raise RunStopped(str(error)) from error


def _without_columns(rows: Iterator[Row], columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows, but as errors if they already have a column of the output, which would be overwritten."""
    for row in rows:
        if row.fields and (taken := columns.keys() & row.fields.keys()):
            reason = f"the row has a column {min(taken)!r} already; name the new one with --output-column"
            yield replace(row, fields=None, error=RowError("invalid_row", reason, raw_text(row.fields)))
        else:
            yield row


def _selected(rows: Iterator[Row], condition: Condition) -> Iterator[Row]:
    """Yield the rows that meet the condition, and those for which it fails as errors."""
    for row in rows:
        try:
            if row.fields is None or condition.holds(row.fields):
                yield row
        except TemplateFailed as error:
            failed = RowError("where_failed", str(error), raw_text(row.fields or {}))
            yield replace(row, fields=None, error=failed)


class _SpooledSource:
    def __init__(self, name: str, journal: Journal) -> None:
        self.name = name
        self._journal = journal

    def rows(self) -> Iterator[Row]:
        return self._journal.spooled()

    def count(self) -> int | None:
        return self._journal.spool_size()


def _spooled(source: MemorySource, journal: Journal, step: int) -> Source:
    """Store the rows of an iterator on disk, so that they can be read again to write the output."""
    rows = source.rows()
    journal.clear_spool()
    while chunk := list(islice(rows, step)):
        journal.spool(chunk)
    return _SpooledSource(source.name, journal)
