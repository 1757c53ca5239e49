"""The implementation for CUDA tensors, in Triton."""

from __future__ import annotations

import os
from pathlib import Path

from pagemill.kernels import cache_directory

# Triton opens its cache directory at the first compile, and fails if it is not writable.
_home = Path(os.environ.get("TRITON_HOME") or Path.home())
_asked = Path(os.environ.get("TRITON_CACHE_DIR") or _home / ".triton" / "cache")
os.environ["TRITON_CACHE_DIR"] = str(cache_directory.usable(_asked, "TRITON_CACHE_DIR"))
