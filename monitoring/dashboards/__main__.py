"""Writes the dashboards: `python -m pagemill.monitoring.dashboards`. `--check` only compares them."""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from pagemill.monitoring.dashboards.boards import BOARDS

DIRECTORY = Path(__file__).parent.parent / "grafana" / "dashboards"


def rendered() -> dict[Path, str]:
    """Return each dashboard's file and its expected content."""
    return {
        DIRECTORY / f"{board.uid}.json": JSONEncoder(sort_keys=True, indent=2).encode(board) + "\n"
        for board in BOARDS
    }


def stale() -> list[Path]:
    """Return the files that are missing, outdated or not a dashboard's."""
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
