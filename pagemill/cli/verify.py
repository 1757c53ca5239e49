"""`pagemill verify ID`: a job runs again, and the two results are compared.

Exit codes: 0 the replay gave what the fingerprints promise, or where they promise nothing, the same tokens; 1 it gave
less; 4 there is no verdict (the reason is printed); 2, 3, 5 and 130 as for the other commands. Of a batch: 1 if any
job's is 1, or 4 if any has no verdict.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagemill.cli.app import EXIT_NOT_SUCCEEDED, Patience, Report, app, describe, print_stderr
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import Priority, between
from pagemill.cli.terminal.options import Options
from pagemill.cli.terminal.waiting import Waiting
from pagemill.producer.client.replay.flow import Placement
from pagemill.producer.client.replay.verification import Verification
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import JobNotFound, ResultTimeout, Unverifiable

EXIT_NO_VERDICT = 4


class VerifyOptions(Options):
    job_id: Annotated[keys.Id | None, typer.Argument(metavar="[ID]")] = None
    """A job submitted with keep_input."""
    batch: Annotated[keys.Id | None, typer.Option(metavar="ID")] = None
    """Batch from which jobs are drawn at random."""
    sample: Annotated[int, between(1, 100_000)] = 50
    """Maximum number of jobs of the batch."""
    any_worker: bool = False
    """Allow workers with another fingerprint, without a guarantee."""
    priority: Priority = "low"
    """Priority of the copies: high, normal or low."""


@app.command()
def verify(flags: VerifyOptions, patience: Patience, at: Report) -> None:
    """Run a job again and compare the two results.

    They are equal bitwise, in their tokens or neither, and that is held against what was promised.

    Exit code 0: as promised. 1: less. 4: no verdict.
    """
    job_id, batch, timeout = flags.job_id, flags.batch, patience.timeout
    if (job_id is None) == (batch is None):
        raise typer.BadParameter("a job id or --batch is required")
    placement: Placement = {"priority": flags.priority, "any_worker": flags.any_worker}
    with at.producer() as producer:
        try:
            if job_id is not None:
                with Waiting("running a copy", is_short=True):
                    found = producer.verify(job_id, timeout=timeout, **placement)
                _print(found, at.as_json)
                code = _code(found)
            else:
                assert batch is not None
                code = _verify_batch(producer, batch, flags.sample, timeout, placement, as_json=at.as_json)
        except (Unverifiable, ResultTimeout, JobNotFound) as error:
            print_stderr(describe(error) if isinstance(error, JobNotFound) else str(error))
            code = EXIT_NO_VERDICT
    if code:
        raise typer.Exit(code)


def _code(found: Verification) -> int:
    if found.exactness is None:
        return EXIT_NO_VERDICT
    return 0 if found.is_reproduced else EXIT_NOT_SUCCEEDED


def _verify_batch(
    producer: Producer, batch: str, sample: int, timeout: float | None, placement: Placement, *, as_json: bool
) -> int:
    """Print unexpected results, or with `as_json` each line; return the exit code."""
    total = min(sample, producer.batch(batch).counts().total)
    codes: dict[int, int] = {0: 0, EXIT_NOT_SUCCEEDED: 0, EXIT_NO_VERDICT: 0}
    words: dict[str, int] = {}
    console = Console(stderr=True)
    columns = (TextColumn("verified"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("jobs", total=total)
        for found in producer.verify_batch(batch, sample, timeout=timeout, **placement):
            bar.advance(task)
            code = _code(found)
            codes[code] += 1
            words[found.exactness or "no verdict"] = words.get(found.exactness or "no verdict", 0) + 1
            if as_json:
                typer.echo(found.model_dump_json())
            elif code:
                typer.echo(f"{found.id}\t{found.exactness or 'no verdict'}\t{detail(found)}")
    listed = ", ".join(f"{count:,} {word}" for word, count in sorted(words.items()))
    print_stderr(f"{sum(codes.values()):,} jobs of batch {batch}: {listed or 'none is left'}")
    if codes[EXIT_NOT_SUCCEEDED]:
        return EXIT_NOT_SUCCEEDED
    return EXIT_NO_VERDICT if codes[EXIT_NO_VERDICT] or not sum(codes.values()) else 0


def _print(found: Verification, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found.model_dump(mode="json") | {"is_reproduced": found.is_reproduced}))
        return
    comparison = found.comparison
    assert comparison is not None
    honoured = {True: "honoured", False: "broken", None: "not known to be honoured"}[found.honoured]
    promise = "nothing" if found.promise == "nothing" else f"{found.promise}: {honoured}"
    same = found.fingerprint == found.replayed_fingerprint
    prints = (found.fingerprint,) if same else (found.fingerprint, found.replayed_fingerprint)
    tiers = dict.fromkeys((found.tier, found.replayed_tier))
    facts = {
        "result": str(found.exactness),
        "promised": promise,
        "compared": ", ".join(comparison.compared),
        "difference": detail(found),
        "note": found.reason or "",
        "fingerprint": " and ".join(prints),
        "tier": " and ".join(tiers),
        "seed": "" if found.seed is None else str(found.seed),
        "copy": f"{found.replayed_as}" + (f" ({found.copies} were run)" if found.copies > 1 else ""),
    }
    views.print_rows((), [(name, value) for name, value in facts.items() if value])


def detail(found: Verification) -> str:
    """Describe the first difference, or the reason why there is no verdict."""
    if found.comparison is None:
        return found.reason or ""
    parts = []
    if (first := found.comparison.difference) is not None:
        where = f"{first.what} of {'row' if first.what == 'row' else 'output'} {first.output}"
        parts.append(where + ("" if first.position is None else f" at {first.position}"))
        if (first.stored, first.replayed) != (None, None):
            parts.append(f"{_format(first.stored)}, replayed {_format(first.replayed)}")
        if first.stored_logprob is not None or first.replayed_logprob is not None:
            parts.append(
                f"log-probabilities {_format(first.stored_logprob)} and {_format(first.replayed_logprob)}"
            )
    if found.comparison.max_logprob_difference:
        parts.append(f"log-probabilities up to {found.comparison.max_logprob_difference:.3g} apart")
    if found.comparison.min_cosine not in (None, 1.0):
        parts.append(f"least cosine {found.comparison.min_cosine:.6f}")
    return "; ".join(parts)


def _format(value: object) -> str:
    return "nothing" if value is None else str(value)
