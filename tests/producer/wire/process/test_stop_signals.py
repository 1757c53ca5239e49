from __future__ import annotations

import signal

import pytest

from pagemill.producer.wire.process.stop_signals import stop_signals


@pytest.mark.parametrize(("handler", "is_taken"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_hangup_counts_unless_nohup_took_it_away(handler: signal.Handlers, is_taken: bool) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in stop_signals()) == is_taken
        assert {signal.SIGTERM, signal.SIGINT} <= set(stop_signals())
    finally:
        signal.signal(signal.SIGHUP, before)
