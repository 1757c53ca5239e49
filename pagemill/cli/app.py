"""`pagemill submit | status | result | cancel | workers | queue`: the queue from a terminal or a script.

Results go to stdout, everything else to stderr, so that commands work in a pipe; `--json` prints one JSON
document (streams: one per line). Exit codes: 0 done, 1 the job did not succeed (or does not exist, or not in
time), 2 usage, 3 Redis is not reachable, 5 the queue is full, 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from redis import exceptions
from typer.core import TyperGroup

from pagemill.cli.local_worker import settled_workers
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import (
    MAX_TEMPERATURE,
    YEAR_S,
    LogFormat,
    LogLevel,
    Priority,
    between,
    checked,
    served_name,
)
from pagemill.cli.terminal.interrupts import interrupts_kept
from pagemill.cli.terminal.options import Options, grouped
from pagemill.common.plain_text import escaped
from pagemill.producer.client import flows
from pagemill.producer.client.effects import Effect
from pagemill.producer.client.handles import JobHandle
from pagemill.producer.client.listener import Watched
from pagemill.producer.client.submit_flow import OnLate
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls import memory, reads, registry
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import (
    AccessDenied,
    InvalidAddress,
    InvalidJob,
    JobError,
    JobNotFound,
    PagemillError,
    QueueFull,
    RedisRefused,
    RedisUnavailable,
    ResultTimeout,
)
from pagemill.producer.wire.schema.text.chat import FunctionName
from pagemill.producer.wire.server.clients import ServerAddress, has_password, open_client
from pagemill.producer.wire.server.discovery import (
    PASSWORD_VARIABLE,
    URL_VARIABLE,
    USERNAME_VARIABLE,
    find_redis,
)
from pagemill.producer.wire.server.scripts import Call
from pagemill.producer.wire.server.transport import SyncTransport

EXIT_NOT_SUCCEEDED = 1
EXIT_USAGE = 2
EXIT_REDIS = 3
EXIT_QUEUE_FULL = 5
EXIT_INTERRUPTED = 130
SILENT_S = 3.0
"""Seconds without a response after which a command reports that it waits for Redis."""

Rows = Sequence[Sequence[Any]]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])


UsageError: Any = typer.BadParameter.__base__  # from click, or in later versions from typer


class ReportingGroup(TyperGroup):
    """Turns our errors into a line on stderr and an exit code, for all of its commands."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with reported_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with reported_errors(), interrupts_kept():
            return super().invoke(ctx)


@contextmanager
def reported_errors() -> Iterator[None]:
    try:
        yield
    except PagemillError as error:
        print_stderr(describe(error))
        raise typer.Exit(exit_code(error)) from error
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise  # its handler shows the help
        print_stderr(_usage(error))
        raise typer.Exit(EXIT_USAGE) from None
    except OSError as error:
        if error.errno == errno.EPIPE or not _is_of_stdout(error):
            raise  # a reader that disconnects ends the command silently
        print_stderr(f"standard output cannot be written: {error.strerror}")
        raise typer.Exit(EXIT_NOT_SUCCEEDED) from None


def _is_of_stdout(error: OSError) -> bool:
    """Return whether an empty line on stdout fails in the same way. If so, stdout is redirected to nowhere."""
    try:
        print(flush=True)
    except OSError as again:
        if again.errno == error.errno:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())  # at its exit, the interpreter flushes
            return True
    return False


def _usage(error: Any) -> str:
    """Format a usage error as one line: the option, its variable, and the problem."""
    message = str(error.message or error.format_message()).replace("Input should", "should").rstrip(".")
    if (parameter := getattr(error, "param", None)) is not None:
        name = (
            parameter.opts[0]
            if parameter.opts[0].startswith("-")
            else (parameter.metavar or parameter.name.upper())
        )
        variable = f" ({parameter.envvar})" if parameter.envvar else ""
        message = f"{name}{variable}: {message if error.message else 'it is missing'}"
    path = error.ctx.command_path if error.ctx is not None else "pagemill"
    return " ".join(f"{message}; see {path} --help".split())


def exit_code(error: PagemillError) -> int:
    match error:
        case RedisUnavailable() | AccessDenied() | RedisRefused():
            return EXIT_REDIS
        case QueueFull():
            return EXIT_QUEUE_FULL
        case InvalidJob() | InvalidAddress():
            return EXIT_USAGE
    return EXIT_NOT_SUCCEEDED


def describe(error: PagemillError) -> str:
    """Return the error's message, with the command to type next if there is one."""
    match error:
        case RedisUnavailable() if _is_caused_by(error, exceptions.AuthenticationError):
            return (
                f"{error}\nSet {USERNAME_VARIABLE} and {PASSWORD_VARIABLE}, or give both in {URL_VARIABLE}."
            )
        case RedisUnavailable() if _is_caused_by(
            error, exceptions.ResponseError, exceptions.BusyLoadingError
        ):
            # A server rejected the call, as opposed to one that cannot be reached.
            return (
                f"{error}\nThe server is running, but does not accept this now. To see why: pagemill doctor"
            )
        case RedisUnavailable() if error.__cause__ is not None:
            return (
                f"{error}\nIs the server running, and is the address right (--redis-url, {URL_VARIABLE})? "
                "A worker can bring its own: pagemill worker --model smollm2"
            )
        case InvalidJob() if str(error).startswith("after."):
            return f"--{error}"
        case InvalidAddress():
            return f"--redis-url ({URL_VARIABLE}): {error}"
        case QueueFull(reason="memory"):
            return f"{error}; see what holds it (pagemill queue stats), and submit again later"
        case QueueFull():
            return f"{error}; wait for it to drain (pagemill queue stats) and submit again"
        case ResultTimeout():
            batch = "batch " if "batch" in str(error) else ""
            return f"{error}. Ask again later, or end it with: pagemill {batch}cancel ID"
        case JobNotFound():
            return f"{error}. Is it in another queue (--queue, PAGEMILL_QUEUE)?"
        case JobError():
            return f"the job {error.state}: {error.message}" + (f" ({error.code})" if error.code else "")
    return str(error)


def _is_caused_by(error: BaseException | None, *kinds: type[Exception]) -> bool:
    """Return whether the driver's error is one of these."""
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__
    return error is not None


def print_stderr(message: str) -> None:
    """Print to stderr: stdout is for the result. What a message quotes cannot control the terminal."""
    typer.echo("\n".join(map(escaped, message.split("\n"))), err=True)


class LogOptions(Options):
    log_level: Annotated[LogLevel, typer.Option(envvar="PAGEMILL_LOG_LEVEL")] = "info"
    """Log level: debug, info, warning or error."""
    log_format: Annotated[LogFormat, typer.Option(envvar="PAGEMILL_LOG_FORMAT")] = "console"
    """Log format: console or json."""


def announce(message: str, log_format: str) -> None:
    """Print the services of a long-running command to stderr; as a JSON line if its log is JSON."""
    if log_format == "json":
        logging.getLogger("pagemill.cli").info(message)
    else:
        print_stderr(message)


class Commands(typer.Typer):
    """A group of commands, each of which may take classes of options (`grouped`)."""

    def command(self, *args: Any, **options: Any) -> Callable[[F], F]:
        register = super().command(*args, **options)

        def decorate(command: F) -> F:
            register(grouped(command))
            return command

        return decorate


def command_group(name: str, help: str) -> Commands:
    """Add a group of commands to the program, and return it."""
    group = Commands(no_args_is_help=True, rich_markup_mode=None, help=help)
    app.add_typer(group, name=name)
    return group


app = Commands(
    cls=ReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run LLM generation jobs from a Redis queue in a continuously batched engine with a paged KV cache.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pagemill {version('pagemill')}")
        raise typer.Exit


@app.callback()
def every_command(
    asks_version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    # Options that may precede any command.
    pass


queue_app = command_group("queue", "Inspect and configure the queue.")


def check_url(context: typer.Context, parameter: typer.CallbackParam, url: str | None) -> str | None:
    """Check --redis-url: raise a usage error before anything connects, instead of the driver's error."""
    if url is None:
        return None
    try:
        ServerAddress.parse(url)
    except ValueError as error:
        raise typer.BadParameter(f"not a Redis URL: {error}") from None
    source = context.get_parameter_source(parameter.name or "")
    if has_password(url) and source is not None and source.name == "COMMANDLINE":
        print_stderr(
            f"warning: every user of this machine can read a password on a command line; "
            f"set {URL_VARIABLE} or {PASSWORD_VARIABLE} instead"
        )
    return url


ExtraField = Annotated[
    list[str] | None, typer.Option(metavar="NAME=JSON", help="Other field of the job; may be repeated.")
]
Continuation = Annotated[
    list[str] | None,
    typer.Option(help="Text to score after the prompt, instead of generating; may be repeated."),
]


class Printing(Options):
    as_json: Annotated[bool, typer.Option("--json")] = False
    """Print JSON."""


class Patience(Options):
    timeout: Annotated[float | None, between(0.0, YEAR_S)] = None
    """Maximum seconds to wait. Default: no limit."""


class OneJob(Options):
    job_id: Annotated[keys.Id, typer.Argument(metavar="ID")]
    """Job id, as `pagemill submit` prints it."""


class AtServer(Options):
    redis_url: Annotated[str | None, typer.Option(envvar=URL_VARIABLE, callback=check_url)] = None
    """Address of the Redis server. Default: the local worker's embedded server."""


class _NoticingProducer(Producer):
    """Prints a line if a call is not answered for `SILENT_S`."""

    def _perform(self, effect: Effect, watches: dict[str, Watched]) -> Any:
        with noticed_wait() if isinstance(effect, Call) else nullcontext():
            return super()._perform(effect, watches)


class AtQueue(AtServer):
    """The options of a command that works on a queue."""

    queue: Annotated[keys.QueueName, typer.Option(envvar="PAGEMILL_QUEUE")] = "default"
    """Name of the queue."""

    def producer(self) -> Producer:
        return _NoticingProducer(self.redis_url, queue=self.queue)

    def run(self, call: Call[T]) -> T:
        """Run a call that is not a method of Producer."""
        return run_call(self.redis_url, call)

    def now(self) -> float:
        """Return the server's clock in Unix seconds; it can differ from this machine's."""
        return self.run(reads.server_time(self.queue))


class Report(Printing, AtQueue):
    """The options of a command that also prints results."""

    def print(self, document: Any, rows: Rows, columns: Sequence[str] = (), *, none: str = "") -> None:
        """Print a JSON document, or a table; without rows the message `none` on stderr."""
        if self.as_json:
            typer.echo(json.dumps(document))
        elif rows:
            views.print_rows(columns, rows)
        elif none:
            print_stderr(none)


class JobOptions(Options):
    max_tokens: Annotated[int | None, between(1, 2**31 - 1)] = None
    """Maximum number of output tokens per sample."""
    temperature: Annotated[float | None, between(0.0, MAX_TEMPERATURE)] = None
    """Sampling temperature; 0: always the most probable token. Default: 1."""
    seed: Annotated[int | None, between(0, 2**63 - 1)] = None
    """Random seed; equal seeds give equal samples."""
    stop: list[str] | None = None
    """Stop string; may be repeated."""
    adapter: Annotated[keys.AdapterName | None, typer.Option(metavar="NAME")] = None
    """Name of a LoRA adapter of the workers."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of a job that are set."""
        return {name: value for name, value in vars(self).items() if value not in (None, [])}


class SubmitOptions(Options):
    prompt: Annotated[str, typer.Argument(metavar="PROMPT")]
    """The prompt; - reads it from standard input."""
    model: keys.ModelName | None = None
    """Served name of the model. Default: the model that the live workers serve."""
    chat: bool = False
    """Send the prompt as a user message of the model's chat template."""
    system: str | None = None
    """System message; implies --chat."""
    job: JobOptions
    after: Annotated[list[str] | None, typer.Option(metavar="[NAME=]ID")] = None
    """Job to wait for; {NAME.text} in the prompt is its text; may be repeated."""
    choice: list[str] | None = None
    """Allowed output; may be repeated."""
    image: Annotated[list[str] | None, typer.Option(metavar="FILE")] = None
    """Image file or URL, placed before the prompt; implies --chat; may be repeated."""
    tools: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE")] = None
    """JSON list of functions; implies --chat."""
    tool_choice: Annotated[FunctionName | None, typer.Option(metavar="CHOICE")] = None
    """none, auto, required, or the name of a function."""
    continuation: Continuation = None
    priority: Priority | None = None
    """high, normal or low."""
    field: ExtraField = None
    estimate: bool = False
    """Print the estimated end of the job."""
    refuse_late: bool = False
    """Reject the job if it would probably miss its deadline."""
    wait: bool = False
    """Wait until the job has finished, and print the text."""
    stream: bool = False
    """Print the text as it is generated."""


@app.command()
def submit(flags: SubmitOptions, patience: Patience, at: Report) -> None:
    """Submit one job. Prints its id, or with --wait or --stream its output."""
    if flags.wait and flags.stream:
        raise typer.BadParameter("--wait and --stream exclude each other")
    fields = _submitted_fields(flags, at)
    with Producer(at.redis_url, queue=at.queue) as producer:
        on_late: OnLate | None = "refuse" if flags.refuse_late else "flag" if flags.estimate else None
        with noticed_wait():
            handle = producer.submit(fields, estimate=on_late)
        if flags.estimate and (flags.wait or flags.stream or not at.as_json):
            now = producer.run_flow(flows.call(reads.server_time(at.queue)))
            print_stderr(views.estimate_line(handle.estimate, now))
        if not (flags.wait or flags.stream):
            submitted = {"id": handle.id} | (
                {"estimate": views.estimate_fields(handle.estimate)} if flags.estimate else {}
            )
            typer.echo(json.dumps(submitted) if at.as_json else handle.id)
            return
        with _interruptible(handle):
            if flags.stream:
                _print_stream(handle, at.as_json)
            else:
                views.print_result(handle.result(patience.timeout), at.as_json)


def _submitted_fields(flags: SubmitOptions, at: AtQueue) -> dict[str, Any]:
    text = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    fields: dict[str, Any] = extra_fields(flags.field or []) | scored(flags.continuation)
    fields |= _prompt_fields(text, flags.chat or flags.tools is not None, flags.system)
    fields |= flags.job.fields() | ({"priority": flags.priority} if flags.priority else {})
    if flags.image:
        is_url = re.compile("(data|https?):", re.IGNORECASE).match
        fields["images"] = [image if is_url(image) else Path(image) for image in flags.image]
    fields |= _tool_fields(flags.tools, flags.tool_choice)
    if flags.choice:
        fields["structured_outputs"] = {"choice": flags.choice}
    if flags.stream:
        fields["stream"] = True
    if flags.after:
        fields["after"] = _parents(flags.after)
    fields.setdefault("model", flags.model or default_model(at.redis_url, at.queue))
    return fields


def _parents(pairs: list[str]) -> dict[str, str] | list[str]:
    """Return the jobs to wait for, by their names if they have any."""
    named = [pair.rpartition("=") for pair in pairs]
    if all(separator for _, separator, _ in named):
        return {name: job_id for name, _, job_id in named}
    if any(separator for _, separator, _ in named):
        raise typer.BadParameter("--after: give every job a name, or none")
    return pairs


def _tool_fields(tools: Path | None, choice: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if tools is not None:
        try:
            fields["tools"] = json.loads(tools.read_text(encoding="utf-8-sig"))
        except (ValueError, OSError, RecursionError) as error:
            raise typer.BadParameter(f"--tools: {tools} is not JSON: {error}") from error
    if choice in ("none", "auto", "required"):
        fields["tool_choice"] = choice
    elif choice is not None:
        fields["tool_choice"] = {"type": "function", "function": {"name": choice}}
    return fields


@app.command()
def status(job: OneJob, at: Report) -> None:
    """Print the state of a job."""
    with at.producer() as producer:
        views.print_status(producer.job(job.job_id).status(), at.now(), at.as_json)


@app.command()
def result(job: OneJob, patience: Patience, at: Report) -> None:
    """Wait until a job has finished, and print its text."""
    with at.producer() as producer:
        handle = producer.job(job.job_id)
        with _interruptible(handle):
            views.print_result(handle.result(patience.timeout), at.as_json)


@app.command()
def cancel(job: OneJob, at: AtQueue) -> None:
    """Cancel a job. Exit code 1: it had already ended."""
    with at.producer() as producer:
        if not producer.job(job.job_id).cancel():
            print_stderr(f"job {job.job_id} had ended before; see: pagemill status {job.job_id}")
            raise typer.Exit(EXIT_NOT_SUCCEEDED)
    print_stderr(f"job {job.job_id} is cancelled, or will be within a moment")


@queue_app.command("stats")
def queue_stats(at: Report) -> None:
    """Print the number of jobs by state. Also prints the waiting jobs; no live worker is required."""
    stats = registry.stats(at.run, at.queue)
    try:
        kinds = memory.shares(at.run, at.queue) if stats.memory.is_near else {}
    except AccessDenied:
        kinds = {}
        print_stderr(
            f"which data holds the memory is unknown: this user lacks {memory.SAMPLE_RIGHTS} (docs/security.md)"
        )
    views.print_queue(at.queue, stats, kinds, at.as_json)


@queue_app.command("pause")
def queue_pause(at: AtQueue) -> None:
    """Pause the queue. Workers pull no jobs; running ones finish, new ones are accepted."""
    at.run(registry.set_paused(at.queue, True))
    print_stderr(f"queue {at.queue} is paused; resume it with: pagemill queue resume --queue {at.queue}")


@queue_app.command("resume")
def queue_resume(at: AtQueue) -> None:
    """Resume the queue: workers pull jobs again."""
    at.run(registry.set_paused(at.queue, False))
    print_stderr(f"queue {at.queue} is running")


def run_call(url: str | None, call: Call[T]) -> T:
    """Run a call that is not a method of Producer."""
    with (
        open_client(find_redis(url), call.keys[0].partition("{")[2].partition("}")[0]) as client,
        noticed_wait(),
    ):
        return SyncTransport(client).run(call)


@contextmanager
def noticed_wait() -> Iterator[None]:
    """Print a line if the body, which calls Redis, takes longer than `SILENT_S`."""
    notice = threading.Timer(
        SILENT_S, print_stderr, ["waiting for Redis, which does not answer (Ctrl-C stops)"]
    )
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def default_model(url: str | None, queue: str) -> str:
    """Return PAGEMILL_MODEL's served name, or the only model that the live workers serve."""
    named = os.environ.get("PAGEMILL_MODEL")
    if named:
        try:
            return str(checked(keys.ModelName)(served_name(named)))
        except typer.BadParameter as error:
            raise typer.BadParameter(f"PAGEMILL_MODEL: {error.message}") from None
    message = "waiting for the worker to load its model (--model NAME submits immediately)"
    alive = settled_workers(
        find_redis(url), queue, lambda info: bool(info.models), partial(print_stderr, message)
    )
    served = {worker.models[0] for worker in alive if worker.models}  # the rest are aliases
    if len(served) == 1:
        return served.pop()
    if served:
        raise InvalidJob(f"several models are served, choose one with --model: {', '.join(sorted(served))}")
    if alive:
        raise InvalidJob(f"no worker of queue {queue} has loaded a model yet; name the job's: --model NAME")
    raise InvalidJob(
        f"no worker serves queue {queue}; start one (pagemill worker --model smollm2 --queue {queue}), "
        "or name the model that the job should wait for: --model NAME"
    )


def _prompt_fields(text: str, chat: bool, system: str | None) -> dict[str, Any]:
    if not chat and system is None:
        return {"prompt": text}
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*messages, {"role": "user", "content": text}]}


def scored(continuations: list[str] | None) -> dict[str, Any]:
    """Return the fields of a job that scores these texts; empty without texts."""
    return {"task": "score", "continuations": continuations} if continuations else {}


def extra_fields(pairs: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise typer.BadParameter(f"--field takes NAME=JSON, for instance --field top_k=5, not {pair!r}")
        try:
            fields[name] = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            fields[name] = value  # --field tenant=acme needs no quotes inside quotes
    return fields


def _print_stream(handle: JobHandle, as_json: bool) -> None:
    """Print tokens as they arrive; raises the error of an end other than success."""
    printer = views.StreamPrinter(as_json)
    for event in handle.stream():
        printer.print(event)
        if event.type == "end" and event.state != "succeeded":
            handle.result(timeout=0)


@contextmanager
def _interruptible(handle: JobHandle) -> Iterator[None]:
    ended = threading.Event()
    threading.Thread(target=_report_wait, args=(handle, ended), daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        print_stderr(f"\nthe job continues: pagemill result {handle.id}, or pagemill cancel {handle.id}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        ended.set()


def _report_wait(handle: JobHandle, ended: threading.Event) -> None:
    """Print the reason that a queued job cannot start, such as that no worker serves its model, whenever it changes."""
    printed: str | None = None
    while not ended.wait(SILENT_S):
        with suppress(PagemillError):  # the wait itself reports it
            status = handle.status()
            reason = status.error if status.state == "queued" else None
            if reason is not None and reason != printed and not ended.is_set():
                print_stderr(f"job {handle.id} waits: {reason} (Ctrl-C stops waiting)")
            printed = reason
