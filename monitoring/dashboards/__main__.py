"""Writes the boards: `python -m pagemill.monitoring.dashboards`. `--check` only compares them."""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from pagemill.monitoring.dashboards.dataset_runs import dataset_runs
from pagemill.monitoring.dashboards.engine import engine
from pagemill.monitoring.dashboards.gateway import gateway
from pagemill.monitoring.dashboards.kv_cache import kv_cache
from pagemill.monitoring.dashboards.overview import overview
from pagemill.monitoring.dashboards.queue import queue
from pagemill.monitoring.dashboards.reliability import reliability

DIRECTORY = Path(__file__).parent.parent / "grafana" / "dashboards"


def boards() -> list[Dashboard]:
    return [overview(), kv_cache(), queue(), engine(), reliability(), dataset_runs(), gateway()]


def rendered() -> dict[Path, str]:
    """Return each board's file and its expected content."""
    return {
        DIRECTORY / f"{board.uid}.json": JSONEncoder(sort_keys=True, indent=2).encode(board) + "\n"
        for board in boards()
    }


def stale() -> list[Path]:
    """Return the files that are missing, outdated or not a board's."""
    wanted = rendered()
    differing = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    return differing + [path for path in DIRECTORY.glob("*.json") if path not in wanted]


def main() -> int:
    paths = stale()
    if "--check" in sys.argv[1:]:
        for path in paths:
            sys.stderr.write(f"{path} is stale; run python -m pagemill.monitoring.dashboards\n")
        return int(bool(paths))
    wanted = rendered()
    for path in paths:
        if path in wanted:
            path.write_text(wanted[path])
        else:
            path.unlink()
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
