"""The process that converts: `python -m pagemill.engine.models.formats.child KIND DIRECTORY FILE...`.

Its last line of output is the reason of a failure as JSON. It exits when its input is closed.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import threading
from pathlib import Path

from pagemill.engine.child_process import limit_memory

_SPARE_BYTES = 2 * 2**30
"""Memory in addition to the files: tensor tables, a shard to be written, and library allocations."""
_PER_FILE_BYTE = 3
"""A file is mapped (or read), and at most its largest tensor is copied and converted."""

_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def main(kind: str, directory: Path, files: list[Path]) -> None:
    """Convert `files` into `directory`. Raises the error that occurred."""
    if kind == "pickle":
        from pagemill.engine.models.formats.pickle_conversion import convert_pickles as convert
    else:
        # gguf imports it, if it is installed, for writing files, which takes seconds.
        sys.modules.setdefault("mistral_common", None)  # type: ignore[arg-type]
        import pagemill.engine.layers.library  # noqa: F401  first: it halves transformers' import time
        from pagemill.engine.models.formats.gguf_conversion import convert_gguf as convert
    from pagemill.engine.models.formats.shards import SHARD_BYTES

    largest = max(file.stat().st_size for file in files)
    limit_memory(_SPARE_BYTES + _PER_FILE_BYTE * largest + 3 * min(largest, SHARD_BYTES), is_final=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    convert(files, directory)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _reason(error: BaseException) -> str:
    from pagemill.engine.errors import ModelLoadError

    if isinstance(error, ModelLoadError):
        return str(error)
    if isinstance(error, MemoryError) or "alloc" in str(error):
        return "reading it takes far more memory than its size explains; the file may be damaged or hostile"
    first = (str(error) or type(error).__name__).strip().splitlines()[0]
    return f"{first[:300]}; download it again"


def _place_errno(error: BaseException) -> int | None:
    """Return the error number of a write to a full or broken disk; None for any other error."""
    return error.errno if isinstance(error, OSError) and error.errno in _WRITING else None


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = 0
    try:
        main(sys.argv[1], Path(sys.argv[2]), [Path(word) for word in sys.argv[3:]])
    except BaseException as error:
        print(json.dumps({"error": _reason(error), "errno": _place_errno(error)}))  # noqa: T201
        code = 1
    sys.stdout.flush()
    os._exit(code)  # without cleanup: the thread above waits for input
