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
from pagemill.worker.config import DAY_S, ENV_PREFIX, SECRETS, WorkerConfig

_Port = Annotated[int, Field(ge=0, le=65535)]
_Seconds = Annotated[float, Field(ge=0.1, le=DAY_S)]
Scalar = bool | int | float | str
Table = dict[str, Scalar | list[Scalar]]
"""Settings by name."""
TABLES = ("worker", "gateway", "exporter")


class SettingsError(ValueError):
    """A setting is invalid; the message names it."""


class UpSettings(BaseModel):
    """The supervisor's settings, those that all children share, and a table for each kind of child.

    The docstrings are the help texts of `pagemill up`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    model: str | None = None
    """The workers' model, as for pagemill worker."""
    redis_url: str | None = Field(default=None, repr=False)
    """The queue's server. Default: an embedded Valkey server, which the supervisor owns."""
    queue: QueueName = "default"
    """The queue to serve."""
    state_dir: str | None = None
    """The embedded server's data directory. Default: ~/.local/state/pagemill, or in XDG_STATE_HOME."""
    workers: Annotated[int, Field(ge=1, le=256)] | None = None
    """Workers on the CPU, which share its cores. Default: one, or with GPUs one for each."""
    devices: str | None = None
    """The GPUs of each worker, separated by bars; all: a worker per GPU. Default: all that exist."""
    http_host: HostName = "127.0.0.1"
    """Address that serves metrics and health of the workers and the exporter."""
    http_port: _Port | None = None
    """The first worker's port; the next ones follow. Default: the free ports from 9790 on; 0: any free port."""
    gateway: bool | Table = True
    """Run a gateway. In a file, a table holds options of `pagemill gateway`."""
    gateway_host: HostName = "127.0.0.1"
    """Address of the gateway; 0.0.0.0 makes it reachable from other hosts."""
    gateway_port: _Port = 8000
    """Port of the gateway; 0: any free port."""
    exporter: bool | Table = True
    """Run an exporter. In a file, a table holds options of `pagemill exporter`."""
    exporter_port: _Port = 9791
    """Port of the exporter; 0: any free port."""
    worker: Table = {}
    """Settings of `pagemill worker`."""
    stop_timeout_s: _Seconds | None = None
    """Seconds from SIGTERM to SIGKILL. Default: 5 s more than a worker or a gateway takes at most."""
    start_timeout_s: _Seconds = 1200.0
    """Seconds until a child must be ready; otherwise it is restarted."""
    liveness_s: _Seconds = 120.0
    """Seconds that the /healthz of a child can fail before it is replaced."""
    max_backoff_s: _Seconds = 60.0
    """Longest pause, in seconds, before a child that keeps exiting is restarted."""
    log_format: Literal["console", "json"] = "console"
    """Format of log lines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""

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


SHARED = UpSettings.model_fields.keys() & WorkerConfig.model_fields.keys()
"""Settings of `pagemill worker` that the supervisor sets for all children."""


def _variable(name: str) -> str:
    return os.environ.get(ENV_PREFIX + name.upper(), "")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"--config: {path} can't be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config: {path} is not TOML: {error}") from error


def _check(settings: UpSettings) -> None:
    if settings.workers is not None and settings.devices is not None:
        raise SettingsError("workers (on the CPU) and devices (GPUs) exclude each other")
    for name in settings.worker:
        if name in SECRETS:
            raise SettingsError(
                f"worker.{name} is a secret: set {ENV_PREFIX}{name.upper()} in the environment instead"
            )
        if name in SHARED:
            raise SettingsError(f"worker.{name}: all children share it, so it stands above the tables")
