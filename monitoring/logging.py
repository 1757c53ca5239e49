"""Logging: one line per event on stderr, as text for people or as JSON for a collector.

Callers use the standard library's loggers and pass ids as `extra={"job_id": ...}`; structlog renders every
line, including those of libraries. Prompts and outputs are never logged: they belong to the job's owner.

Lines contain external names, addresses and responses: they are escaped and cut here, so that no text can forge a line,
control the terminal or fill the disk.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from pagemill.common.plain_text import escaped, shortened

LogFormat = Literal["console", "json"]

MAX_TEXT_CHARACTERS = 4_000
"""Limit of a message and of each extra."""
MAX_TRACEBACK_CHARACTERS = 32_000

_NOISY = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock", "numba", "transformers")
"""Drivers and model libraries whose INFO messages would obscure the worker's."""


def configure_logging(
    level: str = "info",
    format: LogFormat = "console",
    stream: TextIO | None = None,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Set up the root logger of this process. A second call replaces the first.

    A JSON line has time (unix seconds), level, logger, message, the extras, `error` (a traceback, if there is
    one), and `fields`: values constant for this process, which text lines omit. Raises `ValueError` for an
    unknown level.
    """
    out = stream or sys.stderr
    handler = logging.StreamHandler(out)
    is_json = format == "json"
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_json_processors(fields or {}) if is_json else _console_processors(out.isatty())),
            ],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _json_processors(fields: Mapping[str, Any]) -> list[Processor]:
    def in_order(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        first = {name: event[name] for name in ("time", "level", "logger", "message")}
        return {**first, **fields, **event}

    return [
        structlog.processors.TimeStamper(fmt=None, key="time"),
        structlog.processors.format_exc_info,
        _cut,
        structlog.processors.EventRenamer("message"),
        _rename("exception", "error"),
        in_order,
        structlog.processors.JSONRenderer(ensure_ascii=False, default=str),
    ]


def _console_processors(colors: bool) -> list[Processor]:
    return [
        structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%fZ", utc=True, key="timestamp"),
        _cut,
        _escape,
        structlog.dev.ConsoleRenderer(
            colors=colors,
            sort_keys=False,
            pad_event_to=0,
            exception_formatter=_write_traceback,
        ),
    ]


def _cut(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = shortened(
                value, MAX_TRACEBACK_CHARACTERS if name == "exception" else MAX_TEXT_CHARACTERS
            )
    return event


def _escape(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = escaped(value)
    return event


def _write_traceback(out: TextIO, exc_info: ExcInfo) -> None:
    """Indented: no line of an error's text looks like a line of the log.

    Without local variables, unlike structlog's default: they may hold prompts.
    """
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    for line in shortened(text.getvalue().strip("\n"), MAX_TRACEBACK_CHARACTERS).split("\n"):
        out.write(f"\n  {escaped(line)}")


def _rename(old: str, new: str) -> Processor:
    def rename(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if old in event:
            event[new] = event.pop(old)
        return event

    return rename
