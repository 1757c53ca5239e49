"""`python -m pagemill.demo`."""

from __future__ import annotations

import sys

from pagemill.demo.run import main

if __name__ == "__main__":
    sys.exit(main())
