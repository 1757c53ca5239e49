"""The command `pagemill`; also `python -m pagemill`.

Imported without torch: the model's libraries load when a worker starts, so that `pagemill status` is fast and
works where only the producer is installed.
"""

from __future__ import annotations

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
    app(prog_name="pagemill")


if __name__ == "__main__":
    main()
