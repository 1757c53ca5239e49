"""How the process logs: one line per event on stderr, for people or as JSON for a collector.

Callers use the standard library's loggers and pass ids as `extra={"job_id": ...}`. Prompts and outputs are
never logged: they belong to the job's owner.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

LogFormat = Literal["console", "json"]

_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(
    level: str = "info", format: LogFormat = "console", stream: TextIO | None = None
) -> None:
    """Sets up the root logger of this process. A second call replaces the first.

    Raises `ValueError` for a level that does not exist.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Drivers and model libraries tell their own story at INFO; ours would drown in it.
    for noisy in ("httpx", "urllib3", "filelock", "numba", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (unix seconds), level, logger, message, error, and the extras."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class ConsoleFormatter(logging.Formatter):
    """`12:00:00.123 info  worker.leases  message  job_id=...`, UTC."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.gmtime(record.created))
        extras = "".join(f"  {key}={value}" for key, value in _extras(record).items())
        level = record.levelname.lower()
        line = f"{clock}.{int(record.msecs):03d} {level:<7} {record.name}  {record.getMessage()}{extras}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _extras(record: logging.LogRecord) -> Mapping[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD_ATTRIBUTES}
