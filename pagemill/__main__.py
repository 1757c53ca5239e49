"""The command `pagemill`; also `python -m pagemill`.

Imported without torch: the model's libraries load when a worker starts, so that `pagemill status` is fast and
works where only the producer is installed.
"""

from __future__ import annotations

import io
import os
import re
import sys

from pagemill.cli import (  # noqa: F401 - they register their commands
    adapter,
    batch,
    dead,
    doctor,
    inspect,
    models,
    queue,
    recall,
    rollout,
    run,
    tenant,
    top,
    usage,
    verify,
    why,
    workers,
)
from pagemill.cli.app import app
from pagemill.cli.processes import celery, exporter, gateway, up, worker  # noqa: F401


def main() -> None:
    """The console script."""
    drop_service_links()
    fill_closed_streams()
    escape_unencodable()
    app(prog_name="pagemill")


def drop_service_links() -> None:
    """Remove the variables of Kubernetes that look like settings: PAGEMILL_GATEWAY_PORT=tcp://10.0.0.7:8000."""
    for name, value in list(os.environ.items()):
        if re.fullmatch(r"PAGEMILL_\w*PORT", name) and re.match(r"(tcp|udp|sctp)://", value):
            del os.environ[name]


def fill_closed_streams() -> None:
    """Replace streams that were closed before the start.

    Writes to stdout fail: no output is lost unnoticed. Those to stderr are dropped, as the logs of a daemon.
    """
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        # Descriptor 2, so that no socket gets the number to which libraries write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w")


def escape_unencodable() -> None:
    """Make stdout and stderr write characters that their encoding lacks as escapes, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
