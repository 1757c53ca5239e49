"""`python -m benchmarks.gpu`."""

from __future__ import annotations

import sys

# Not defined here: a spawned process can't import a package's __main__, and sections are sent to it by name.
from benchmarks.gpu.run import main

if __name__ == "__main__":
    sys.exit(main())
