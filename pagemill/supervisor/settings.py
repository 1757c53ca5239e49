"""The settings of `pagemill up`: flags, the environment, and a TOML file. In this order the first one counts."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pagemill.engine.errors import complaint
from pagemill.producer.wire.schema.host_names import HostName
from pagemill.producer.wire.schema.keys import QueueName
from pagemill.worker.config import DAY_S, ENV_PREFIX, SECRETS

_Port = Annotated[int, Field(ge=0, le=65535)]
_Seconds = Annotated[float, Field(ge=0.1, le=DAY_S)]
Scalar = bool | int | float | str
Table = dict[str, Scalar | list[Scalar]]
"""Settings by name."""
TABLES = ("worker", "gateway", "exporter")


class SettingsError(ValueError):
    """A setting that won't do; the message names it."""


class UpSettings(BaseModel):
    """The supervisor's own settings, what all children share, and a table for each kind of child."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    model: str | None = None
    redis_url: str | None = Field(default=None, repr=False)
    """None: an embedded Valkey server, which the supervisor owns."""
    queue: QueueName = "default"
    state_dir: str | None = None
    workers: Annotated[int, Field(ge=1, le=256)] | None = None
    """Workers on the CPU, which share its cores. None: one, or with cards one for each."""
    devices: str | None = None
    """`0|1|2,3`: a worker's cards between bars; `all`: a worker per card."""
    http_host: HostName = "127.0.0.1"
    """Of the workers' and the exporter's metrics and probes."""
    http_port: _Port | None = None
    """The first worker's, the next ones follow. None: from 9790, those that are free; 0: any that are free."""
    gateway: bool | Table = True
    """False: none. A table: options of `pagemill gateway`."""
    gateway_host: HostName = "127.0.0.1"
    gateway_port: _Port = 8000
    exporter: bool | Table = True
    """False: none. A table: options of `pagemill exporter`."""
    exporter_port: _Port = 9791
    worker: Table = {}
    """Settings of `pagemill worker`."""
    stop_timeout_s: _Seconds | None = None
    """From SIGTERM to SIGKILL. None: 5 s more than a worker or a gateway takes at most."""
    start_timeout_s: _Seconds = 1200.0
    """From a child's start until it is ready; then it is started anew."""
    liveness_s: _Seconds = 120.0
    """A child whose /healthz has failed this long is replaced."""
    max_backoff_s: _Seconds = 60.0
    """The longest pause before a child that keeps ending is started again."""
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def load(cls, path: Path | None, flags: Mapping[str, Any], options: Mapping[str, Scalar]) -> UpSettings:
        """Load a file, if one is given, under the environment and the flags. Raises SettingsError.

        `flags` by field, None where it is not given; `options`: a worker's settings from the command line.
        """
        given = {} if path is None else _read(path)
        for name in set(cls.model_fields) - set(TABLES):
            if value := _variable(name):
                given[name] = value
        given |= {name: value for name, value in flags.items() if value is not None}
        worker = given.get("worker", {})
        if isinstance(worker, dict):
            given["worker"] = {name: value for name, value in worker.items() if not _variable(name)} | dict(
                options
            )
        try:
            settings = cls.model_validate(given)
        except ValidationError as error:
            place = ".".join(str(part) for part in error.errors(include_url=False)[0]["loc"][:2])
            where = f"{path}: " if path is not None and place.partition(".")[0] in given else ""
            raise SettingsError(f"{where}{place}: {complaint(error)}") from None
        _check(settings)
        return settings


def _variable(name: str) -> str:
    return os.environ.get(ENV_PREFIX + name.upper(), "")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config: {path} can't be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config: {path} is no TOML: {error}") from error


def _check(settings: UpSettings) -> None:
    if settings.workers is not None and settings.devices is not None:
        raise SettingsError("give workers (on the CPU) or devices (cards), not both")
    for name in settings.worker:
        if name in SECRETS:
            raise SettingsError(
                f"worker.{name} is a secret: set {ENV_PREFIX}{name.upper()} in the environment instead"
            )
        if name in ("redis_url", "queue", "http_port", "http_host", "state_dir", "log_format", "log_level"):
            raise SettingsError(f"worker.{name}: all children share it, so it stands above the tables")
