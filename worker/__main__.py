"""`python -m worker` is `pagemill`."""

from __future__ import annotations

from worker.cli import main

if __name__ == "__main__":
    main()
