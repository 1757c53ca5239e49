"""Derives children from settings: each worker's GPUs, threads, memory and port, the gateway, the exporter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.engine.errors import ConfigError
from pagemill.producer.wire.server.discovery import URL_VARIABLE
from pagemill.supervisor.child import ChildSpec
from pagemill.supervisor.devices import (
    ALL,
    Group,
    divided_kv_bytes,
    divided_threads,
    list_cards,
    parse_groups,
)
from pagemill.supervisor.member import Timeouts
from pagemill.supervisor.ports import Ports
from pagemill.supervisor.settings import SHARED, Scalar, SettingsError, Table, UpSettings
from pagemill.worker.config import ENV_PREFIX, WorkerConfig

GATEWAY_DRAIN_S = 25.0
"""Open requests get 20 s after SIGTERM."""
_SPARE_S = 5.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_NOT_FORWARDED = {"redis_url", "http_port", "state_dir"}
"""Shared settings of which each child gets a separate value, or none."""
_KV_SETTINGS = ("kv_cache_memory_bytes", "num_kv_blocks")


def worker_groups(settings: UpSettings) -> tuple[Group, ...]:
    """Return each worker's GPUs; an empty group is a worker on the CPU. Raises SettingsError."""
    if settings.workers is not None:
        return ((),) * settings.workers
    text = settings.devices
    if text is None:
        asked = str(_setting(settings, "device") or "auto")
        text = ALL if asked in ("auto", "cuda") and list_cards() else None
    if text is None:
        return ((),)
    try:
        return parse_groups(text)
    except ValueError as error:
        raise SettingsError(f"devices: {error}") from error


def specs(settings: UpSettings, groups: Sequence[Group], ports: Ports, redis_url: str) -> list[ChildSpec]:
    """Describe every child. Raises SettingsError for settings that a worker would reject."""
    shared = _shared(settings, redis_url)
    found = [
        _worker(settings, number, group, len(groups), ports.workers[number], shared)
        for number, group in enumerate(groups)
    ]
    if ports.gateway is not None:
        found.append(_gateway(settings, ports, shared))
    if ports.exporter is not None:
        found.append(_exporter(settings, ports.exporter, shared))
    return found


def timeouts(settings: UpSettings) -> Timeouts:
    """Resolve the bounds: a child's SIGKILL comes after its own limit."""
    stop_s = settings.stop_timeout_s
    if stop_s is None:
        default = float(WorkerConfig.model_fields["shutdown_s"].default)
        longest = float(_setting(settings, "shutdown_s") or default)
        stop_s = max(longest, GATEWAY_DRAIN_S if settings.gateway is not False else 0.0) + _SPARE_S
    return Timeouts(
        stop_s=stop_s,
        start_s=settings.start_timeout_s,
        liveness_s=settings.liveness_s,
        max_backoff_s=settings.max_backoff_s,
    )


def _setting(settings: UpSettings, name: str) -> Any:
    """Return a worker's setting from the file or the environment; None if there is none."""
    return settings.worker.get(name, os.environ.get(ENV_PREFIX + name.upper()) or None)


def _shared(settings: UpSettings, redis_url: str) -> dict[str, str]:
    named = {name: str(getattr(settings, name)) for name in SHARED - _NOT_FORWARDED}
    # Not as arguments: a URL may contain a password.
    return {ENV_PREFIX + name.upper(): value for name, value in named.items()} | {URL_VARIABLE: redis_url}


def _worker(
    settings: UpSettings, number: int, group: Group, workers: int, port: int, shared: Mapping[str, str]
) -> ChildSpec:
    chosen: Table = dict(settings.worker)
    if settings.model is not None:
        chosen["model"] = settings.model
    if group:
        chosen |= {"device": "cuda", "tensor_parallel_size": len(group)}
    elif settings.workers is not None:
        chosen.setdefault("device", _setting(settings, "device") or "cpu")
    is_divided = not group and workers > 1
    if is_divided and _setting(settings, "num_threads") is None:
        chosen["num_threads"] = divided_threads(workers)
    if (
        is_divided
        and chosen.get("device") == "cpu"
        and not any(_setting(settings, name) for name in _KV_SETTINGS)
    ):
        chosen["kv_cache_memory_bytes"] = divided_kv_bytes(workers)
    _check_worker(chosen)
    environment = {ENV_PREFIX + name.upper(): _text(value) for name, value in chosen.items()}
    if group:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(group)
    threads = _setting(settings, "num_threads") or chosen.get("num_threads")
    return ChildSpec(
        name=f"worker-{number}",
        kind="worker",
        arguments=("worker", "--http-port", str(port)),
        environment={**shared, **environment},
        url=_url(settings.http_host, port),
        devices=group,
        threads=int(str(threads)) if threads else None,
    )


def _check_worker(chosen: Table) -> None:
    try:
        WorkerConfig.load(**{name: _text(value) for name, value in chosen.items()})
    except ConfigError as error:
        hint = (
            "; for the packaged one: --model smollm2"
            if error.setting == "model" and not chosen.get("model")
            else ""
        )
        raise SettingsError(
            f"worker.{error}{hint}" if error.setting != "model" else f"{error}{hint}"
        ) from None


def _gateway(settings: UpSettings, ports: Ports, shared: Mapping[str, str]) -> ChildSpec:
    assert ports.gateway is not None
    host, port = settings.gateway_host, int(ports.gateway.getsockname()[1])
    arguments = ["gateway", "--host", host, "--port", str(port), "--fd", str(ports.gateway.fileno())]
    return ChildSpec(
        name="gateway",
        kind="gateway",
        arguments=(*arguments, *_flags("gateway", settings.gateway)),
        environment=shared,
        url=_url(host, port),
        listener=ports.gateway.fileno(),
    )


def _exporter(settings: UpSettings, port: int, shared: Mapping[str, str]) -> ChildSpec:
    arguments = ["exporter", "--http-host", settings.http_host, "--http-port", str(port)]
    arguments += ["--log-format", settings.log_format]
    return ChildSpec(
        name="exporter",
        kind="exporter",
        arguments=(*arguments, *_flags("exporter", settings.exporter)),
        environment=shared,
        url=_url(settings.http_host, port),
    )


def _flags(kind: str, table: bool | Table) -> list[str]:
    """Return a table's entries as a command's options: `max_in_flight = 9` is `--max-in-flight 9`."""
    words: list[str] = []
    for name, value in (table if isinstance(table, dict) else {}).items():
        flag = f"--{name.replace('_', '-')}"
        if flag in ("--redis-url", "--host", "--port", "--fd", "--http-host", "--http-port", "--log-format"):
            raise SettingsError(f"{kind}.{name}: it stands above the tables (such as {kind}_port)")
        if value is False:
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [flag] if one is True else [flag, str(one)]
    return words


def _text(value: Scalar | list[Scalar]) -> str:
    return " ".join(str(one) for one in value) if isinstance(value, list) else str(value)


def _url(host: str, port: int) -> str:
    address = _ANY_ADDRESS.get(host, host)
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"
