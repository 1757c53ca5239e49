"""`pagemill doctor`: checks the server, the queue and this machine; `--plan` sizes a load.

Exit codes: 0 no error (warnings are possible), 1 an error, 3 Redis does not answer.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import redis
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, EXIT_REDIS, AtQueue, Printing, app, describe
from pagemill.cli.terminal import plan_view
from pagemill.cli.terminal.checked import ModelOrPath, between
from pagemill.cli.terminal.options import Options
from pagemill.producer.doctor.finding import Finding, worst
from pagemill.producer.doctor.machine_checks import DEFAULT_HTTP_PORT, machine_findings
from pagemill.producer.doctor.queue_checks import queue_findings
from pagemill.producer.doctor.server_checks import server_findings
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.producer.wire.server.clients import open_client, redacted
from pagemill.producer.wire.server.discovery import find_redis, state_dir
from pagemill.producer.wire.server.transport import SyncTransport

if TYPE_CHECKING:
    from pagemill.sizing.answer import Answer

_MARKS = {
    "ok": ("ok", "green"),
    "note": ("note", "dim"),
    "warning": ("warning", "yellow"),
    "error": ("ERROR", "bold red"),
}


class DoctorOptions(Options):
    at: AtQueue
    http_port: Annotated[int, between(0, 65535), typer.Option(envvar="PAGEMILL_HTTP_PORT")] = (
        DEFAULT_HTTP_PORT
    )
    """Port of a worker."""
    model: Annotated[ModelOrPath | None, typer.Option(envvar="PAGEMILL_MODEL")] = None
    """Model: print how a worker would run it on this machine."""
    plan: bool = False
    """Print the resources that a load of this model requires: blocks, rows, workers, Redis."""
    question: Annotated[dict[str, Any], plan_view.QUESTION]
    settings: Annotated[dict[str, Any], plan_view.ENGINE]


@app.command()
def doctor(flags: DoctorOptions, printing: Printing) -> None:
    """Check the server, the queue and this machine. Exit code 1: a check failed; 3: Redis does not respond."""
    if flags.plan:
        plan_view.print_answer(_planned(flags), printing.as_json)
        return
    findings, is_reachable = examine(flags.at.redis_url, flags.at.queue, flags.http_port or DEFAULT_HTTP_PORT)
    if flags.model is not None:
        findings.append(model_parts(flags.model))
    verdict = worst(findings)
    if printing.as_json:
        typer.echo(json.dumps({"verdict": verdict, "findings": [asdict(finding) for finding in findings]}))
    else:
        print_findings(findings)
    if not is_reachable:
        raise typer.Exit(EXIT_REDIS)
    if verdict == "error":
        raise typer.Exit(EXIT_NOT_SUCCEEDED)


def _planned(flags: DoctorOptions) -> Answer:
    """Raises a usage error, for a model too that can't be planned."""
    if flags.model is None or not {"prompt_tokens", "output_tokens"} <= flags.question.keys():
        raise typer.BadParameter(
            "--plan needs --model, --prompt-tokens, --output-tokens, and --rate or --rows"
        )
    from pagemill.engine.config import EngineConfig
    from pagemill.engine.errors import EngineError
    from pagemill.engine.models.echo import is_echo
    from pagemill.sizing.answer import Question, answer
    from pagemill.sizing.plan import PlanError

    if is_echo(flags.model):
        raise typer.BadParameter("--plan: echo is not a model; name one, or the folder of its config.json")
    try:
        return answer(Question(config=EngineConfig(model=flags.model, **flags.settings), **flags.question))
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"--plan: {error.name} is missing: pip install 'pagemill[worker]'"
        ) from error
    except (PlanError, EngineError) as error:
        raise typer.BadParameter(f"--plan: {error}") from error


def examine(redis_url: str | None, queue: str, http_port: int) -> tuple[list[Finding], bool]:
    """Return all findings, and whether Redis answers."""
    machine = machine_findings(state_dir(), http_port)
    try:
        url = find_redis(redis_url)
        with open_client(url, queue, socket_timeout=5.0, retry=None) as client:
            server = server_findings(client, queue)
            inside = _inside(client, queue) if server[-1].level == "ok" else []
    except RedisUnavailable as error:
        complaint, _, remedy = describe(error).partition("\n")
        return [Finding("redis", "error", complaint, remedy), *machine], False
    reached = Finding("redis", "ok", f"answers at {redacted(url)}")
    return [reached, *server, *inside, *machine], True


def model_parts(model: str) -> Finding:
    """Report the parts that a worker with this model and environment would log at its start."""
    try:
        from pagemill.engine.errors import EngineError
        from pagemill.engine.models.echo import is_echo

        if is_echo(model):
            return Finding("model parts", "note", f"{model} has none")
        from pagemill.engine.builder import describe_model
        from pagemill.engine.models.directory import find_model
        from pagemill.engine.runnable import check_files
        from pagemill.worker.config import WorkerConfig
    except ModuleNotFoundError as error:
        missing = f"{error.name} is missing: how {model} would be run is unknown"
        return Finding("model parts", "note", missing, "pip install 'pagemill[worker]'")
    try:
        engine = WorkerConfig.load(model=model).engine
        if (found := find_model(model)) is None:
            unknown = f"{model} has not been downloaded, so how it would be run is unknown"
            return Finding("model parts", "note", unknown, f"pagemill pull {model}")
        engine = replace(engine, model=str(found.directory))
        parts = describe_model(engine)
        check_files(engine, found.directory)
        return Finding("model parts", "ok", f"{found if found.source.is_remote else model}: {parts}")
    except EngineError as error:
        return Finding("model parts", "error", str(error), "a worker would fail with the same message")


def _inside(client: redis.Redis, queue: str) -> list[Finding]:
    transport = SyncTransport(client)
    return queue_findings(queue, registry.stats(transport.run, queue), transport.run(registry.workers(queue)))


def print_findings(findings: list[Finding]) -> None:
    """Print a table to a terminal, to a pipe tab-separated lines: level, check, message and remedy."""
    if not sys.stdout.isatty():
        for finding in findings:
            typer.echo("\t".join((finding.level, finding.check, finding.message, finding.remedy)).rstrip())
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        message = Text(finding.message)
        if finding.remedy:
            message.append(f"\n-> {finding.remedy}", style="cyan" if finding.level != "note" else "dim")
        table.add_row(Text(mark, style=style), Text(finding.check, style="bold"), message)
    Console(highlight=False).print(table)
