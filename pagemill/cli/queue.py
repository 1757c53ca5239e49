"""`pagemill queue limit | weights | quota`: limits of a queue, weights and quotas of its tenants."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from pagemill.cli.app import Report, queue_app
from pagemill.cli.terminal.checked import between
from pagemill.cli.terminal.options import Options
from pagemill.producer.wire.calls import limits
from pagemill.producer.wire.calls.limits import QueueLimits
from pagemill.producer.wire.calls.memory import DEFAULT_SHARE
from pagemill.producer.wire.calls.metering import quotas
from pagemill.producer.wire.schema import keys


class LimitOptions(Options):
    jobs: Annotated[int | None, between(0, 10**12)] = None
    """Maximum number of waiting jobs; 0: the default limit."""
    payload_bytes: Annotated[int | None, between(0, 10**12)] = None
    """Maximum size of a job in bytes; 0: the default limit."""
    rate: Annotated[float | None, between(0.0, limits.MAX_LIMIT)] = None
    """Maximum number of jobs that start per second; 0: no limit."""
    burst: Annotated[int | None, between(1, 10**12)] = None
    """Number of jobs that start immediately after a pause."""
    memory_share: Annotated[float | None, between(0.0, 1.0)] = None
    """Share of Redis' maxmemory up to which jobs are accepted, from 0.1; 0: no separate share."""
    clear: bool = False
    """Remove all limits first."""


@queue_app.command("limit")
def queue_limit(flags: LimitOptions, at: Report) -> None:
    """Set limits of the queue, and print them. Other limits are unchanged."""
    current = at.run(limits.limits(at.queue))
    given = flags.fields_of(QueueLimits)
    changed: dict[str, Any] = {name: value or None for name, value in given.items() if value is not None}
    if flags.rate is not None and current.rate and current.burst == limits.default_burst(current.rate):
        changed.setdefault("burst", None)  # the default of the new rate
    wanted = dataclasses.replace(QueueLimits() if flags.clear else current, **changed)
    if wanted.burst is not None and wanted.rate is None and flags.burst is not None:
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


class WeightOptions(Options):
    pairs: Annotated[list[str] | None, typer.Argument(metavar="TENANT=WEIGHT")] = None
    """Weight from 1 to 1000; the default is 1."""


@queue_app.command("weights")
def queue_weights(flags: WeightOptions, at: Report) -> None:
    """Set tenants' weights, and print them. A tenant of weight 3 gets three times the share of one of weight 1."""
    wanted = dict(_pair(text) for text in flags.pairs or [])
    current = at.run(limits.set_weights(at.queue, wanted) if wanted else limits.weights(at.queue))
    none = f"every tenant of queue {at.queue} has weight 1"
    at.print(current, sorted(current.items()), ("tenant", "weight"), none=none)


Amount = Annotated[int | None, between(0, quotas.MAX_QUOTA)]


class QuotaOptions(Options):
    tenant: Annotated[keys.TenantName | None, typer.Argument(metavar="TENANT")] = None
    """Tenant. Default: every tenant without its own quotas."""
    tokens_per_minute: Amount = None
    """Maximum number of tokens per minute; 0: no limit."""
    jobs_per_minute: Amount = None
    """Maximum number of jobs that start per minute; 0: no limit."""
    tokens_per_day: Amount = None
    """Maximum number of tokens per day; 0: no limit."""
    jobs_per_day: Amount = None
    """Maximum number of jobs that start per day; 0: no limit."""
    running: Amount = None
    """Maximum number of running jobs; 0: no limit."""
    clear: bool = False
    """Remove the tenant's quotas first."""


@queue_app.command("quota")
def queue_quota(options: QuotaOptions, at: Report) -> None:
    """Set a tenant's quotas, and print all quotas. Others are unchanged. Jobs of a tenant over its quota wait."""
    name = options.tenant or quotas.EVERYBODY
    current = at.run(quotas.quotas(at.queue))
    before = current.get(name, quotas.Quota())
    flags = options.fields_of(quotas.Quota)
    wanted = dataclasses.replace(
        quotas.Quota() if options.clear else before,
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
