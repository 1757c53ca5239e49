"""`python -m benchmarks.gpu`."""

from __future__ import annotations

import sys

# Not here: a process that is spawned can't import a package's __main__, and sections travel to one by name.
from benchmarks.gpu.run import main

if __name__ == "__main__":
    sys.exit(main())
