"""`pagemill run`: runs every row of a dataset through the queue, and survives interruptions.

Exit codes: 0 all rows done, 1 incomplete, 2 usage, 3 Redis is not reachable, 4 finished with failed rows, 5 the
queue is full, 130 Ctrl-C. After 1, 3, 5 and 130 the same command resumes the run.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from pagemill.cli.app import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    Continuation,
    ExtraField,
    JobOptions,
    Report,
    app,
    default_model,
    describe,
    exit_code,
    extra_fields,
    print_stderr,
    scored,
)
from pagemill.cli.dataset_input import recipe_and_rows, source_of_rows
from pagemill.cli.dry_run import preview, prompt_limit
from pagemill.cli.local_worker import (
    LocalWorker,
    WorkerFailed,
    can_load,
    has_server,
    live_workers,
    serving_workers,
)
from pagemill.cli.processes.worker import WorkerOptions, check_options
from pagemill.cli.prompt_tokens import token_counter
from pagemill.cli.terminal.checked import (
    MAX_TEMPERATURE,
    Delimiter,
    Encoding,
    ModelOrPath,
    OutputPath,
    Text,
    between,
    served_name,
)  # fmt: skip
from pagemill.cli.terminal.options import Options
from pagemill.cli.terminal.waiting import Waiting
from pagemill.common.sampling_fields import LabelProbs
from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset import report
from pagemill.producer.dataset.bar import RunBar
from pagemill.producer.dataset.errors import DatasetError, DiskError, RunStopped
from pagemill.producer.dataset.label_columns import LabelTemperature
from pagemill.producer.dataset.outputs import base_of
from pagemill.producer.dataset.recipe import NO_MODEL, OnRow, OnTruncated, Recipe
from pagemill.producer.dataset.remote_model import is_remote
from pagemill.producer.dataset.run import DatasetRun
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.recipe_file import read_recipe
from pagemill.producer.dataset.summary import Summary
from pagemill.producer.dataset.tables.places import Place, place_of, uri_of
from pagemill.producer.dataset.tables.rows import Format, Quoting
from pagemill.producer.dataset.watch import Notify
from pagemill.producer.dataset.work import WINDOW, Tally, TooManyErrors
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.process.stop_signals import stop_signals
from pagemill.producer.wire.schema.errors import PagemillError, RedisUnavailable
from pagemill.producer.wire.server.discovery import URL_VARIABLE, find_redis

EXIT_INCOMPLETE = 1
EXIT_FAILED_ROWS = 4
TRIAL_ROWS = 100
MAX_ROWS = 10**12
SAID_BY_RECIPES = (
    "adapter",
    "choices",
    "continuation",
    "field",
    "json_schema",
    "label_probs",
    "max_tokens",
    "no_chat",
    "regex",
    "seed",
    "stop",
    "system",
    "temperature",
    "template",
    "template_file",
)
"""Options of what a recipe has in its steps."""
GRACE_S = 1
"""Drain seconds of a worker started here, after Ctrl-C; its jobs continue later from their checkpoints."""
PIPE_WIDTH = 200
"""Console width for a log or a pipe, so that figures are not wrapped."""


ServedModel = Annotated[
    ModelOrPath | None,
    typer.Option(
        help="Served name; or a value of `pagemill worker --model`, which the run serves if no worker does."
    ),
]
Cancel = Annotated[bool, typer.Option(help="Cancel the unfinished jobs of an earlier run of this command.")]


class ServeOptions(WorkerOptions):
    quiet: bool = False
    """Do not print progress."""


class RowJobOptions(JobOptions):
    temperature: Annotated[float, between(0.0, MAX_TEMPERATURE)] = 0.0
    """Sampling temperature; 0: equal prompts run once and share the output."""


class RunOptions(Options):
    """An option with the name of a field of `DatasetRun` sets it."""

    context: typer.Context
    sources: Annotated[list[Path], typer.Argument(metavar="[RECIPE.yaml] IN...")]
    """Optionally a recipe of several steps; then JSONL, CSV or TSV (also .gz, .zst), Parquet, a directory of such
    files, a pattern in quotes or several files; a folder of pictures, which has a column image; a Hugging Face dataset
    directory; or - for standard input."""
    out: OutputPath
    """OUT.jsonl, .csv, .tsv (also .gz, .zst) or .parquet; written at the end. A folder, or DIR/part-{shard}.parquet:
    a file for each file of IN."""
    template: str | None = None
    """Template of the prompt, in Jinja2: 'Summarize: {{ text }}'."""
    template_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False)] = None
    """File with the template of the prompt."""
    system: str | None = None
    """Template of the system message."""
    no_chat: bool = False
    """Send the text without the chat template."""
    model: ServedModel = None
    choices: str | None = None
    """Allowed outputs, separated by commas."""
    label_probs: LabelProbs | None = None
    """Method for the probability of each label of --choices: product, mean (by length) or constrained."""
    label_temperature: LabelTemperature = 1
    """Temperature of these probabilities: a number, one for each stage (1.7,1.2), or fit (to --gold)."""
    escalate_below: Annotated[float | None, between(0.0, 1.0)] = None
    """Probability of the label below which the model of --to labels the row."""
    to: Annotated[list[ModelOrPath] | None, typer.Option(metavar="MODEL")] = None
    """Next model of a cascade, in the form of --model; may be repeated. The last one can be
    openai:https://HOST/v1/MODEL, a model of another API."""
    api_budget: Annotated[int | None, between(1, MAX_ROWS), typer.Option(metavar="TOKENS")] = None
    """Maximum number of tokens for --to openai:...; further rows keep the output of the previous model."""
    api_key_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE")] = None
    """File with the key for --to openai:...; default: the variable PAGEMILL_API_KEY."""
    json_schema: str | None = None
    """JSON schema of the output: a file, or the text."""
    regex: str | None = None
    """Regular expression that the output matches."""
    job: RowJobOptions
    continuation: Continuation = None
    field: ExtraField = None
    gold: Text | None = None
    """Column with the correct labels, for accuracy and a confusion table."""
    output_column: Text | None = None
    """Name of the new column. Default: output; label with --label-probs."""
    schema_columns: bool = False
    """Add a column for each field of --json-schema: output.FIELD."""
    where: str | None = None
    """Condition for rows to process, in Jinja2: 'stars >= 3 and lang == "de"'."""
    image_column: Text | None = None
    """Column with images: paths, bytes, URLs or Hugging Face structs."""
    on_null: OnRow = "fail"
    """Action for a null in the prompt: fail, skip, or label (as an empty text)."""
    on_empty: OnRow = "fail"
    """Action for a row with an empty prompt: fail, skip, or label."""
    on_truncated: OnTruncated | None = None
    """Action for an output cut off at max_tokens: fail (default for constrained outputs) or label."""
    limit: Annotated[int | None, between(1, MAX_ROWS)] = None
    """Number of rows to run, from the first."""
    rows_per_file: Annotated[int | None, between(1, MAX_ROWS)] = None
    """Number of rows per file, if --out is a folder."""
    max_errors: Annotated[int | None, between(0, MAX_ROWS)] = None
    """Number of failed rows above which the run stops."""
    price_per_hour: Annotated[float | None, between(0.0, 1e9)] = None
    """Price of the machine per hour, for the cost in the report."""
    estimate: bool = False
    """Run 100 rows, which are kept, and estimate the duration of all. OUT is not written."""
    dry_run: bool = False
    """Print prompts and token counts, without submitting."""
    detach: bool = False
    """Submit the rows and exit; run the command again to collect the outputs."""
    cancel: Cancel = False
    overwrite: bool = False
    """Replace an OUT of other settings, and do not resume from it."""
    report_file: Annotated[OutputPath | None, typer.Option("--report")] = None
    """File for the HTML report. Default: OUT.report.html."""
    kind: Annotated[Format | None, typer.Option("--format")] = None
    """jsonl, csv, tsv, parquet or arrow."""
    encoding: Encoding = "utf-8"
    """Encoding of text files."""
    delimiter: Delimiter | None = None
    r"""Character between CSV fields, such as ';' or '\t'."""
    quoting: Quoting | None = None
    """none: quotes in CSV and TSV files are text. Default: standard."""
    window: Annotated[int, between(1, 10**6)] = WINDOW
    """Maximum number of jobs in flight."""


@app.command("run")
def run(flags: RunOptions, serve: ServeOptions, at: Report) -> None:
    """Send every row of a dataset through the model. After any interruption, run the same command again."""
    check_options(serve.worker_option)
    out = base_of(uri_of(flags.out) or flags.out)
    page = place_of(flags.report_file or f"{out}.report.html")
    with reported(place_of(out).path, is_dry=flags.dry_run), contextlib.ExitStack() as inputs:
        dataset = _dataset(flags, inputs)
        if flags.dry_run:
            models, worker_options = _models(flags, dataset), serve.worker_option or []
            limit = prompt_limit(models[0], at.redis_url, at.queue, worker_options)
            counter = token_counter(models, worker_options)
            if not preview(dataset, counter, limit, as_json=at.as_json):
                raise typer.Exit(EXIT_FAILED_ROWS)
            return
        with contextlib.ExitStack() as stack:
            first, *others = _models(flags, dataset)
            serving = [server(stack, at.redis_url, at.queue, first, serve)]
            url = serving[0].url
            serving += [server(stack, url, at.queue, model, serve) for model in others]
            if NO_MODEL in dataset.models:
                dataset.use_model(default_model(url, at.queue))
            producer = stack.enter_context(Producer(url, queue=at.queue))
            if flags.cancel or flags.detach:
                _leave(dataset, producer, cancel=flags.cancel, as_json=at.as_json)
                return
            summary = _execute(dataset, producer, serving, serve.quiet)
        _report(dataset, summary, page, as_json=at.as_json)
        _finish(dataset, summary, estimate=flags.estimate)


def _models(flags: RunOptions, dataset: DatasetRun) -> list[str | None]:
    """Return the models to be served, as specified; None: any."""
    named = {served_name(model): model for model in (flags.model, *(flags.to or [])) if model}
    return [named.get(name, None if name == NO_MODEL else name) for name in dataset.models]


def _dataset(flags: RunOptions, inputs: contextlib.ExitStack) -> DatasetRun:
    recipe, rows = recipe_and_rows(flags.sources)
    options = flags.fields_of(DatasetRun) | {
        "source": source_of_rows(
            rows, inputs, flags.kind, flags.encoding, delimiter=flags.delimiter, quoting=flags.quoting
        ),
        "out": uri_of(flags.out) or flags.out,
        "recipe": _one_step(flags) if recipe is None else _steps(flags, recipe),
        "limit": TRIAL_ROWS if flags.estimate and flags.limit is None else flags.limit,
        "is_trial": flags.estimate,
        "output_column": flags.output_column or "",
        "to": [model if is_remote(model) else served_name(model) for model in flags.to or []],
    }
    return DatasetRun(**options)


def _one_step(flags: RunOptions) -> Recipe:
    model = served_name(flags.model) if flags.model else NO_MODEL
    text = _template_text(flags.template, flags.template_file)
    return Recipe(model, text, flags.system, not flags.no_chat, _job_fields(flags))


def _steps(flags: RunOptions, recipe: Path) -> Chain:
    for name in SAID_BY_RECIPES:
        how = flags.context.get_parameter_source(name)
        if how is not None and how.name != "DEFAULT":
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} is for runs of one step: {recipe} specifies it per step"
            )
    chain = read_recipe(recipe)
    return chain if flags.model is None else chain.with_model(served_name(flags.model))


def _leave(dataset: DatasetRun, producer: Producer, *, cancel: bool, as_json: bool) -> None:
    """Handle --cancel and --detach, which end without an output."""
    count = dataset.cancel(producer) if cancel else dataset.detach(producer).submitted
    if as_json:
        typer.echo(json.dumps({"cancelled" if cancel else "submitted": count}))
    elif cancel:
        print_stderr(f"{count:,} jobs cancelled; what was done is kept in {dataset.journal_path}")
    else:
        print_stderr(f"{count:,} jobs submitted; run the same command without --detach to collect them")


def _template_text(template: str | None, file: Path | None) -> str | None:
    if file is None:
        return template
    if template is not None:
        raise typer.BadParameter("--template and --template-file exclude each other")
    return _read(file, "--template-file")


def _job_fields(flags: RunOptions) -> dict[str, Any]:
    choices = flags.choices
    shapes = {
        "choice": [c.strip() for c in choices.split(",") if c.strip()] if choices is not None else None,
        "json": _schema_text(flags.json_schema) if flags.json_schema is not None else None,
        "regex": flags.regex,
    }
    shape = {name: value for name, value in shapes.items() if value is not None}
    if len(shape) > 1:
        raise typer.BadParameter("--choices, --json-schema and --regex exclude each other")
    fields = flags.job.fields() | ({"label_probs": flags.label_probs} if flags.label_probs else {})
    if shape:
        fields["structured_outputs"] = shape
    return fields | extra_fields(flags.field or []) | scored(flags.continuation)


def _schema_text(flags: str) -> str:
    text = flags if flags.lstrip().startswith("{") else _read(Path(flags), "--json-schema")
    try:
        json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise typer.BadParameter(f"--json-schema is not JSON: {error}") from None
    return text


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option}: {error}") from None


@contextlib.contextmanager
def _stopped_as_by_ctrl_c() -> Iterator[None]:
    """Make SIGTERM and SIGHUP act like Ctrl-C, so that the journal is written and the worker drained."""
    others = [number for number in stop_signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, signal.default_int_handler) for number in others}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def reported(out: Path, *, is_dry: bool = False) -> Any:
    """Report an early stop: the cause, that no data are lost, and the command for resuming.

    `is_dry`: no jobs are submitted.
    """
    again = "run the same command again to continue; all finished work is kept"
    has_begun = out.with_name(out.name + ".partial").exists
    try:
        with _stopped_as_by_ctrl_c():
            yield
    except (DiskError, RunStopped, WorkerFailed) as error:
        # A full disk has separate advice.
        print_stderr(str(error) + (f"\n{again}" if has_begun() and not isinstance(error, DiskError) else ""))
        raise typer.Exit(EXIT_INCOMPLETE) from None
    except DatasetError as error:
        print_stderr(str(error))
        raise typer.Exit(EXIT_USAGE) from None
    except TooManyErrors as error:
        print_stderr(f"{error}\n{again}")
        raise typer.Exit(EXIT_INCOMPLETE) from None
    except PagemillError as error:
        print_stderr(describe(error) + (f"\n{again}" if has_begun() else ""))
        raise typer.Exit(exit_code(error)) from None
    except KeyboardInterrupt:
        kept = f"; submitted jobs still run where a worker serves them (--cancel ends them)\n{again}"
        print_stderr("\nstopped" + ("" if is_dry else kept))
        raise typer.Exit(EXIT_INTERRUPTED) from None


class Serving(NamedTuple):
    """Who serves a model of a run."""

    url: str
    """The queue's server."""
    metrics_url: str | None
    worker: LocalWorker | None = None
    """The worker that was started for the run."""


def notifier(quiet: bool) -> Notify:
    """Return the printer of a run's notices: with --quiet only those without which it would silently wait forever."""

    def notify(message: str, is_endless: bool) -> None:
        if is_endless or not quiet:
            print_stderr(message)

    return notify


def checked_update(update: Callable[[Tally], None], serving: Sequence[Serving]) -> Callable[[Tally], None]:
    """Return `update`, and raise WorkerFailed from it once a worker that was started for the run has exited."""

    def checked(tally: Tally) -> None:
        update(tally)
        for one in serving:
            if one.worker is not None:
                one.worker.check()

    return checked


def server(
    stack: contextlib.ExitStack, url: str | None, queue: str, model: str | None, flags: ServeOptions
) -> Serving:
    """Return the queue's URL and who serves the model; starts a worker if the model requires one."""
    serving = []
    is_loadable = model is not None and can_load(model)
    if model is None or has_server(url):
        url = find_redis(url)
        serving = _serving(url, queue, model, flags.quiet)
    elif not is_loadable:
        raise RedisUnavailable(
            f"no Redis server, and a worker cannot load {model}: give --redis-url or {URL_VARIABLE} "
            "of the queue whose worker serves it, or as --model a folder, a GGUF file or a Hub name"
        )
    if url is not None and (serving or not is_loadable):
        if not serving:
            # Also printed with --quiet: without a worker the run never ends.
            print_stderr(
                f"no live worker of queue {queue} serves {model or 'anything'}; the jobs will wait for one"
            )
        return Serving(url, next((f"{info.url}/metrics" for info in serving if info.url), None))
    assert model is not None, "without a model, find_redis() gave a URL"
    options = [f"drain_grace_s={GRACE_S}", *(flags.worker_option or [])]
    settings = [word for option in options for word in ("--option", option)]
    worker = stack.enter_context(LocalWorker(model, queue=queue, url=url, options=settings))
    worker.is_quiet = flags.quiet
    with Waiting(f"starting a worker for {model}", Console(stderr=True, quiet=flags.quiet)) as waiting:
        url, info = worker.wait_ready(waiting.report)
    return Serving(url, f"{info.url}/metrics" if info.url else None, worker)


def _serving(url: str, queue: str, model: str | None, quiet: bool) -> list[WorkerInfo]:
    """Return the workers to take metrics from, or that make starting one unnecessary."""
    if model is None or not can_load(model):
        alive = live_workers(url, queue)
        return [info for info in alive if model is None or served_name(model) in info.models]
    return serving_workers(url, queue, model, (lambda _: None) if quiet else print_stderr)


def _execute(dataset: DatasetRun, producer: Producer, serving: Sequence[Serving], quiet: bool) -> Summary:
    count = dataset.count()
    total = count if count is None or dataset.limit is None else min(count, dataset.limit)
    with RunBar(total, serving[0].metrics_url, is_quiet=quiet) as bar:
        dataset.on_news, dataset.kv = checked_update(bar.update, serving), bar.kv_figures
        dataset.on_notice = notifier(quiet)
        return dataset.execute(producer)


def _report(dataset: DatasetRun, summary: Summary, page: Place, *, as_json: bool) -> None:
    """Write the report's files, and print its figures to stdout; the output itself is complete by now."""
    is_json = page.path.suffix == ".json"
    paths = page.path.with_suffix(".html") if is_json else page.path, page.path.with_suffix(".json")
    about = {"input": dataset.source.name, "output": dataset.outputs_name, "model": dataset.models[0]}
    try:
        page.prepare()
        report.write_html(summary, paths[0], about)
        report.write_json(summary, paths[1], about)
        page.publish(paths)
        page.leave(paths)
    except (OSError, DatasetError) as error:
        reason = (
            f"{error.strerror or error}: {error.filename or page.name}"
            if isinstance(error, OSError)
            else error
        )
        print_stderr(
            f"the report's files could not be written ({reason}); {dataset.outputs_name} is complete"
        )
    if as_json:
        typer.echo(json.dumps({**about, **summary.as_json()}))
    else:
        _print(dataset, summary, page)


def _finish(dataset: DatasetRun, summary: Summary, *, estimate: bool) -> None:
    """Print the closing messages, and exit with the code of the run."""
    if estimate:
        _print_estimate(dataset, summary)
        print_stderr(
            f"no output was written; run the same command without --estimate to continue from {dataset.journal_path}"
        )
    if summary.unfinished:
        print_stderr(f"{summary.unfinished:,} rows are unfinished; run the same command again")
        raise typer.Exit(EXIT_INCOMPLETE)
    if summary.failed:
        rows = "1 row" if summary.failed == 1 else f"{summary.failed:,} rows"
        print_stderr(
            f"{rows} failed, the first: {summary.first_failure}\nAll reasons are in {dataset.place.name}.errors.jsonl"
        )
        raise typer.Exit(EXIT_FAILED_ROWS)
    if summary.steps is not None and summary.steps.failed:
        rows = "1 row" if summary.steps.failed == 1 else f"{summary.steps.failed:,} rows"
        print_stderr(
            f"a step failed for {rows}, the first: {summary.steps.first_failure}\n"
            "What other steps gave is kept; the same command tries again. "
            f"All reasons are in {dataset.place.name}.errors.jsonl"
        )
        raise typer.Exit(EXIT_FAILED_ROWS)
    if summary.stages is not None and summary.stages.failed:
        rows = "1 row" if summary.stages.failed == 1 else f"{summary.stages.failed:,} rows"
        print_stderr(
            f"a later model failed for {rows}, the first: {summary.stages.first_failure}\n"
            "The earlier answer stays; the same command tries again"
        )
        raise typer.Exit(EXIT_FAILED_ROWS)


def _print(dataset: DatasetRun, summary: Summary, page: Place) -> None:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in [*report.figures(summary), ("output", dataset.outputs_name), ("report", page.name)]:
        table.add_row(name, value)
    console.print(table)
    labels = summary.labels.as_json() if summary.labels.are_labels else {}
    is_free_text = not dataset.chain.first.recipe.fields.get("structured_outputs")
    if 0 < len(labels) <= 20 and (max(labels.values()) > 1 or not is_free_text):
        chart = Table(show_header=False, box=None, pad_edge=False)
        block = "#" if console.options.ascii_only else "█"
        for label, bar, count in report.bars(labels, block):
            chart.add_row(label, bar, f"{count:,}")
        console.print(chart)
    if points := report.curve_rows(summary):
        curve = Table(*report.CURVE_COLUMNS, box=None, pad_edge=False)
        for cells in points:
            curve.add_row(*cells)
        console.print(curve)


def _print_estimate(dataset: DatasetRun, summary: Summary) -> None:
    count = dataset.count() or (sum(1 for _ in dataset.source.rows()) if dataset.where is None else None)
    rate = summary.rows_per_second
    if not count or not rate:
        print_stderr(
            "no estimate: no row is done of which the time is known, or the number of rows is not known"
        )
        return
    seconds = count / rate
    cost = (
        ""
        if dataset.price_per_hour is None
        else f", {seconds / 3600 * dataset.price_per_hour:.2f} at that price"
    )
    print_stderr(
        f"all {count:,} rows: about {report.rough_duration(seconds)}{cost}, going by these {summary.timed:,}"
    )
