"""`pagemill queue limit | weights | quota`: limits of a queue, weights and quotas of its tenants."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from pagemill.cli.app import AsJson, Queue, RedisUrl, ask, queue_app, say
from pagemill.cli.terminal import views
from pagemill.cli.terminal.checked import between, checked
from pagemill.producer.wire.calls import limits
from pagemill.producer.wire.calls.limits import QueueLimits
from pagemill.producer.wire.calls.memory import DEFAULT_SHARE
from pagemill.producer.wire.calls.metering import quotas
from pagemill.producer.wire.schema import keys


@queue_app.command("limit")
def queue_limit(
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=0, max=10**12, help="Jobs that may wait; 0: no own limit.")
    ] = None,
    payload_bytes: Annotated[
        int | None,
        typer.Option("--payload-bytes", min=0, max=10**12, help="Bytes of one job; 0: no own limit."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            callback=between(0.0, limits.MAX_LIMIT),
            help="Jobs that may start per second; 0: as they come.",
        ),
    ] = None,
    burst: Annotated[
        int | None,
        typer.Option("--burst", min=1, max=10**12, help="Of these, how many at once after a pause."),
    ] = None,
    memory_share: Annotated[
        float | None,
        typer.Option(
            "--memory-share",
            callback=between(0.0, 1.0),
            help="Of Redis' maxmemory, up to which jobs are taken, from 0.1; 0: no own share.",
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take every limit away first.")] = False,
    redis_url: RedisUrl = None,
    queue: Queue = "default",
    as_json: AsJson = False,
) -> None:
    """Set limits of the queue, and print them. What is not named stays."""
    current = ask(redis_url, limits.limits(queue))
    wanted = QueueLimits() if clear else current
    if jobs is not None:
        wanted = dataclasses.replace(wanted, jobs=jobs or None)
    if payload_bytes is not None:
        wanted = dataclasses.replace(wanted, payload_bytes=payload_bytes or None)
    if rate is not None:
        wanted = dataclasses.replace(wanted, rate=rate or None, burst=None)
    if burst is not None:
        wanted = dataclasses.replace(wanted, burst=burst)
    if memory_share is not None:
        wanted = dataclasses.replace(wanted, memory_share=memory_share or None)
    if wanted.burst is not None and wanted.rate is None and burst is not None:
        raise typer.BadParameter("--burst goes with --rate")
    if wanted != current:
        current = ask(redis_url, limits.set_limits(queue, wanted))
    if as_json:
        typer.echo(json.dumps({"queue": queue} | dataclasses.asdict(current)))
        return
    views.print_rows(
        (),
        [
            ("jobs that may wait", current.jobs or "default (1,000,000)"),
            ("bytes of one job", current.payload_bytes or "default (1 MiB)"),
            ("jobs started per second", f"{current.rate:g}" if current.rate else "unlimited"),
            ("burst", current.burst or ""),
            ("share of Redis' maxmemory", current.memory_share or f"default ({DEFAULT_SHARE})"),
        ],
    )


@queue_app.command("weights")
def queue_weights(
    pairs: Annotated[
        list[str] | None,
        typer.Argument(metavar="TENANT=WEIGHT", help="1 to 1000; everybody else's is 1."),
    ] = None,
    redis_url: RedisUrl = None,
    queue: Queue = "default",
    as_json: AsJson = False,
) -> None:
    """Set tenants' weights, and print them. With 3, a tenant has three turns for another's one."""
    wanted = dict(_pair(text) for text in pairs or [])
    call = limits.set_weights(queue, wanted) if wanted else limits.weights(queue)
    current = ask(redis_url, call)
    if as_json:
        typer.echo(json.dumps(current))
    elif current:
        views.print_rows(("tenant", "weight"), sorted(current.items()))
    else:
        say(f"every tenant of queue {queue} has weight 1")


Quota = Annotated[int | None, typer.Option(min=0, max=quotas.MAX_QUOTA, help="0: as much as there is.")]


@queue_app.command("quota")
def queue_quota(
    tenant: Annotated[
        str | None,
        typer.Argument(
            metavar="TENANT",
            callback=checked(keys.TenantName),
            help="Default: every tenant without its own quotas.",
        ),
    ] = None,
    tokens_per_minute: Quota = None,
    jobs_per_minute: Quota = None,
    tokens_per_day: Quota = None,
    jobs_per_day: Quota = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take the tenant's quotas away first.")] = False,
    redis_url: RedisUrl = None,
    queue: Queue = "default",
    as_json: AsJson = False,
) -> None:
    """Set a tenant's quotas, and print them all. What is not named stays. A tenant over its quota waits."""
    name = tenant or quotas.EVERYBODY
    current = ask(redis_url, quotas.quotas(queue))
    before = current.get(name, quotas.Quota())
    given = {
        "tokens_per_minute": tokens_per_minute,
        "jobs_per_minute": jobs_per_minute,
        "tokens_per_day": tokens_per_day,
        "jobs_per_day": jobs_per_day,
    }
    wanted = dataclasses.replace(
        quotas.Quota() if clear else before,
        **{field: value or None for field, value in given.items() if value is not None},
    )
    if wanted != before:
        current = ask(redis_url, quotas.set_quotas(queue, {name: wanted}))
    left = ask(redis_url, quotas.left(queue, sorted(current.keys() - {quotas.EVERYBODY})))
    if as_json:
        told = {
            each: dataclasses.asdict(quota)
            | ({"left": dataclasses.asdict(left[each])} if each in left else {})
            for each, quota in sorted(current.items())
        }
        typer.echo(json.dumps(told))
    elif current:
        rows = [
            (each, *(_shown(quota, left.get(each), field) for field in given))
            for each, quota in sorted(current.items())
        ]
        views.print_rows(("tenant", *(field.replace("_", " ") for field in given)), rows)
    else:
        say(f"no tenant of queue {queue} has a quota")


def _shown(quota: quotas.Quota, left: quotas.QuotaLeft | None, field: str) -> str:
    limit, found = getattr(quota, field), getattr(left, field, None)
    if limit is None:
        return "-"
    return str(limit) if found is None else f"{found.remaining} of {limit}"


def _pair(text: str) -> tuple[str, int]:
    tenant, separator, weight = text.rpartition("=")
    if not separator or not weight.isascii() or not weight.isdigit():
        raise typer.BadParameter(f"{text!r} is not TENANT=WEIGHT, for instance acme=3")
    return tenant, int(weight)
