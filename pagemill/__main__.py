"""The command `pagemill`; also `python -m pagemill`.

Imported without torch: the model's libraries load when a worker starts, so that `pagemill status` is fast and
works where only the producer is installed.
"""

from __future__ import annotations

import os
import re

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
    app(prog_name="pagemill")


def drop_service_links() -> None:
    """Remove the variables of Kubernetes that look like settings: PAGEMILL_GATEWAY_PORT=tcp://10.0.0.7:8000."""
    for name, value in list(os.environ.items()):
        if re.fullmatch(r"PAGEMILL_\w*PORT", name) and re.match(r"(tcp|udp|sctp)://", value):
            del os.environ[name]


if __name__ == "__main__":
    main()
