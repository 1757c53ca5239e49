"""An engine process for the tests of the protocol: every generated token is the number of its pass."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

from benchmarks import measure


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    # Engines have child processes, which must stop and continue with them; they exit when the engine does.
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    if path := os.environ.get("COUNTING_PIDS"):
        with open(path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(f"{os.getpid()} {child.pid}\n")
    dies_at = os.environ.get("COUNTING_DIES_AT")
    passes = -1  # the warm-up is pass 0

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        nonlocal passes
        passes += 1
        if dies_at is not None and passes == int(dies_at):
            raise RuntimeError("told to die")
        return [[passes] * count for count in max_tokens]

    return generate, {"counting": "1"}


if __name__ == "__main__":
    measure.run(load)
