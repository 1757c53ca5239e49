"""`python -m pagemill` is `pagemill`."""

from __future__ import annotations

from pagemill.worker.cli import main

if __name__ == "__main__":
    main()
