"""Runs of a command that are killed until one exits normally."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence


def killed_until_done(
    command: Sequence[str],
    is_done: Callable[[], bool],
    progress: Callable[[], int],
    *,
    chance: random.Random,
    steps: range,
    max_kills: int,
    last: int | None = None,
    after: Callable[[int], None] = lambda returncode: None,
) -> int:
    """Start the command repeatedly, and kill each run a random step later; returns the number of kills.

    A kill happens at a progress of `last` at the latest. `after` is called with the exit status of every process.
    """
    kills = 0
    while not is_done():
        goal = progress() + chance.randrange(steps.start, steps.stop)
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        give_up = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < give_up:
            if kills < max_kills and progress() >= min(goal, goal if last is None else last):
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
            time.sleep(0.002)
        _, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
        after(process.returncode)
    return kills
