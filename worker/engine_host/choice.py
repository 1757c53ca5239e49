"""The choice of where a worker's engine runs."""

from __future__ import annotations

import os
from pathlib import Path

from pagemill.common.api_keys import read_key
from pagemill.engine.models.echo import is_echo
from pagemill.worker.config import WorkerConfig
from pagemill.worker.endpoint_settings import EndpointSettings
from pagemill.worker.engine_host.host import Deliver, EngineHost
from pagemill.worker.engine_host.process import EngineProcess, LogSettings
from pagemill.worker.engine_host.thread import EngineThread

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of the drivers of NVIDIA, AMD, and Windows' subsystem for Linux."""


def runs_in_process(config: WorkerConfig) -> bool:
    """Return True if the engine runs in a separate process. Does not query device libraries, which takes seconds."""
    if config.engine_process != "auto":
        return config.engine_process == "on"
    engine = config.engine
    if is_echo(engine.model) or engine.device == "cpu":
        return False
    return engine.device == "cuda" or _has_card()


def make_host(config: WorkerConfig, deliver: Deliver, log_fields: dict[str, str]) -> EngineHost:
    """Create the host of the configured engine, without starting it."""
    if config.engine_url is not None:
        from pagemill.worker.engine_host.endpoint.host import (
            EndpointHost,
        )  # other workers need no HTTP client

        settings = EndpointSettings(
            config.engine_url,
            read_key(config.engine_key_file),
            config.revision_name or "",
            config.engine_stall_s,
        )
        return EndpointHost(config.engine, settings, deliver)
    if not runs_in_process(config):
        return EngineThread(config.engine, deliver)
    log = LogSettings(config.log_level, config.log_format, log_fields)
    return EngineProcess(config.engine, deliver, log)


def _has_card() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    return hidden not in ("", "-1") and any(Path(file).exists() for file in _DEVICE_FILES)
