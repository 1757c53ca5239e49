"""`pagemill queue limit | weights | quota`: limits of a queue, weights and quotas of its tenants."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from pagemill.cli.app import Report, queue_app
from pagemill.cli.terminal.checked import between, checked
from pagemill.producer.wire.calls import limits
from pagemill.producer.wire.calls.limits import QueueLimits
from pagemill.producer.wire.calls.memory import DEFAULT_SHARE
from pagemill.producer.wire.calls.metering import quotas
from pagemill.producer.wire.schema import keys


@queue_app.command("limit")
def queue_limit(
    at: Report,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=0, max=10**12, help="Maximum number of waiting jobs; 0: the default limit."
        ),
    ] = None,
    payload_bytes: Annotated[
        int | None,
        typer.Option(
            "--payload-bytes", min=0, max=10**12, help="Maximum size of a job in bytes; 0: the default limit."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            callback=between(0.0, limits.MAX_LIMIT),
            help="Maximum number of jobs that start per second; 0: no limit.",
        ),
    ] = None,
    burst: Annotated[
        int | None,
        typer.Option(
            "--burst", min=1, max=10**12, help="Number of jobs that start immediately after a pause."
        ),
    ] = None,
    memory_share: Annotated[
        float | None,
        typer.Option(
            "--memory-share",
            callback=between(0.0, 1.0),
            help="Share of Redis' maxmemory up to which jobs are accepted, from 0.1; 0: no separate share.",
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all limits first.")] = False,
) -> None:
    """Set limits of the queue, and print them. Other limits are unchanged."""
    current = at.run(limits.limits(at.queue))
    wanted = QueueLimits() if clear else current
    flags = {"jobs": jobs, "payload_bytes": payload_bytes, "rate": rate, "memory_share": memory_share}
    changed: dict[str, Any] = {name: value or None for name, value in flags.items() if value is not None}
    if rate is not None or burst is not None:
        changed["burst"] = burst
    wanted = dataclasses.replace(wanted, **changed)
    if wanted.burst is not None and wanted.rate is None and burst is not None:
        raise typer.BadParameter("--burst goes with --rate")
    if wanted != current:
        current = at.run(limits.set_limits(at.queue, wanted))
    at.print(
        {"queue": at.queue} | dataclasses.asdict(current),
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
    at: Report,
    pairs: Annotated[
        list[str] | None,
        typer.Argument(metavar="TENANT=WEIGHT", help="Weight from 1 to 1000; the default is 1."),
    ] = None,
) -> None:
    """Set tenants' weights, and print them. A tenant of weight 3 gets three times the share of one of weight 1."""
    wanted = dict(_pair(text) for text in pairs or [])
    current = at.run(limits.set_weights(at.queue, wanted) if wanted else limits.weights(at.queue))
    none = f"every tenant of queue {at.queue} has weight 1"
    at.print(current, sorted(current.items()), ("tenant", "weight"), none=none)


Quota = Annotated[
    int | None,
    typer.Option(min=0, max=quotas.MAX_QUOTA, help="Maximum number of tokens per minute; 0: no limit."),
]


@queue_app.command("quota")
def queue_quota(
    at: Report,
    tenant: Annotated[
        str | None,
        typer.Argument(
            metavar="TENANT",
            callback=checked(keys.TenantName),
            help="Tenant. Default: every tenant without its own quotas.",
        ),
    ] = None,
    tokens_per_minute: Quota = None,
    jobs_per_minute: Quota = None,
    tokens_per_day: Quota = None,
    jobs_per_day: Quota = None,
    running: Annotated[
        int | None,
        typer.Option(min=0, max=quotas.MAX_QUOTA, help="Maximum number of running jobs; 0: no limit."),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove the tenant's quotas first.")] = False,
) -> None:
    """Set a tenant's quotas, and print all quotas. Others are unchanged. Jobs of a tenant over its quota wait."""
    name = tenant or quotas.EVERYBODY
    current = at.run(quotas.quotas(at.queue))
    before = current.get(name, quotas.Quota())
    flags = {
        "tokens_per_minute": tokens_per_minute,
        "jobs_per_minute": jobs_per_minute,
        "tokens_per_day": tokens_per_day,
        "jobs_per_day": jobs_per_day,
        "running": running,
    }
    wanted = dataclasses.replace(
        quotas.Quota() if clear else before,
        **{field: value or None for field, value in flags.items() if value is not None},
    )
    if wanted != before:
        current = at.run(quotas.set_quotas(at.queue, {name: wanted}))
    left = at.run(quotas.remaining(at.queue, sorted(current.keys() - {quotas.EVERYBODY})))
    listed = sorted(current.items())
    document = {
        each: dataclasses.asdict(quota) | ({"left": dataclasses.asdict(left[each])} if each in left else {})
        for each, quota in listed
    }
    rows = [(each, *(_quota_cell(quota, left.get(each), field) for field in flags)) for each, quota in listed]
    columns = ("tenant", *(field.replace("_", " ") for field in flags))
    at.print(document, rows, columns, none=f"no tenant of queue {at.queue} has a quota")


def _quota_cell(quota: quotas.Quota, left: quotas.TenantQuotas | None, field: str) -> str:
    limit, found = getattr(quota, field), getattr(left, field, None)
    if limit is None:
        return "-"
    return str(limit) if found is None else f"{found.remaining} of {limit}"


def _pair(text: str) -> tuple[str, int]:
    tenant, separator, weight = text.rpartition("=")
    if not separator or not weight.isascii() or not weight.isdigit():
        raise typer.BadParameter(f"{text!r} is not TENANT=WEIGHT, for instance acme=3")
    return tenant, int(weight)
