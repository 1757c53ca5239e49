"""The process around a worker once the model is loaded."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from pagemill.worker import process


class LoadedWorker:
    """Its model is loaded immediately, and it cannot continue after that."""

    def wait_ready(self, timeout: float, *, on_loaded: Callable[[], None]) -> bool:
        on_loaded()
        return True

    def failure(self) -> str:
        return "over"


class Watchdog:
    is_armed = False

    def arm(self) -> None:
        self.is_armed = True


@pytest.mark.slow
def test_what_is_there_with_the_model_is_collected_no_more() -> None:
    before = gc.get_freeze_count()
    watchdog = Watchdog()
    try:
        assert process._watch(LoadedWorker(), None, process.ShutdownSignals(), watchdog) == "over"  # type: ignore[arg-type]
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
    assert watchdog.is_armed
