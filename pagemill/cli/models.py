"""`pagemill pull` downloads a model, `pagemill models` lists what has been downloaded."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import AfterValidator
from rich.console import Console

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, EXIT_USAGE, Printing, app, print_stderr
from pagemill.cli.local_worker import download
from pagemill.cli.terminal.options import Options
from pagemill.cli.terminal.views import print_rows
from pagemill.engine.errors import ConfigError, EngineError, ModelLoadError
from pagemill.engine.models.hubs.cached import CachedModel, cached_models
from pagemill.engine.models.hubs.progress import size
from pagemill.engine.models.source import ModelSource
from pagemill.engine.text.sampling_defaults import SamplingDefaults, read_sampling_defaults

if TYPE_CHECKING:
    from pagemill.engine.models.directory import LocalModel

_COMMIT_DIGITS = 12


def _check_repository(model: str) -> str:
    if not ModelSource.parse(model).is_remote:
        raise ValueError("should be a repository of a hub, org/name")
    return model


Repository = Annotated[str, AfterValidator(_check_repository)]


class PullOptions(Options):
    model: Annotated[Repository, typer.Argument(metavar="MODEL")]
    """org/name[@revision], or modelscope:org/name[@revision]."""


@app.command()
def pull(flags: PullOptions, printing: Printing) -> None:
    """Download a model into its hub's cache.

    Prints where it lies. A worker does the same when it starts; files that are cached are not downloaded again.
    """
    try:
        found = download(flags.model)
    except EngineError as error:
        print_stderr(str(error))
        raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_NOT_SUCCEEDED) from None
    if printing.as_json:
        typer.echo(json.dumps(_pulled(found)))
        return
    print_stderr(f"{found.source}: commit {found.commit or 'unknown'}, {size(_bytes(found.directory))}, in")
    typer.echo(found.directory)


@app.command()
def models(printing: Printing) -> None:
    """List the cached models, and whether Pagemill can run them."""
    is_shown = sys.stdout.isatty() and not printing.as_json
    with Console(stderr=True).status("looking into the caches") if is_shown else nullcontext():
        cached = cached_models()
        verdict = _verdict() if cached else None
        listed = [(found, verdict(found.directory) if verdict else None) for found in cached]
    if printing.as_json:
        typer.echo(json.dumps([_listed(found, reason, verdict is not None) for found, reason in listed]))
        return
    rows = [
        (
            found.model,
            ",".join(found.revisions),
            (found.commit or "")[:_COMMIT_DIGITS],
            size(found.size_bytes),
            "unknown" if verdict is None else reason or "yes",
            str(_defaults(found) or ""),
        )
        for found, reason in listed
    ]
    print_rows(("model", "revision", "commit", "size", "can run", "samples with"), rows)
    if not cached:
        print_stderr("no model is cached; get one: pagemill pull org/name")
    elif verdict is None:
        print_stderr("whether they can be run is unknown here: pip install 'pagemill[worker]'")


def _verdict() -> Callable[[Path], str | None] | None:
    try:
        from pagemill.engine.runnable import reason_not_runnable
    except ModuleNotFoundError:
        return None
    return reason_not_runnable


def _pulled(found: LocalModel) -> dict[str, Any]:
    return {
        "model": found.source.name,
        "hub": found.source.kind,
        "revision": found.source.revision,
        "commit": found.commit,
        "directory": str(found.directory),
        "size_bytes": _bytes(found.directory),
    }


def _listed(found: CachedModel, reason: str | None, is_known: bool) -> dict[str, Any]:
    return {
        "model": found.model,
        "revisions": found.revisions,
        "commit": found.commit,
        "directory": str(found.directory),
        "size_bytes": found.size_bytes,
        "can_run": (reason is None) if is_known else None,
        "reason": reason,
        "sampling_defaults": None if (defaults := _defaults(found)) is None else dataclasses.asdict(defaults),
    }


def _defaults(found: CachedModel) -> SamplingDefaults | None:
    """Return the model's sampling defaults; None: they cannot be read."""
    try:
        return read_sampling_defaults("auto", found.directory)
    except ModelLoadError:
        return None


def _bytes(directory: Path) -> int:
    """Return the bytes of a snapshot, whose files may be links into the cache."""
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
