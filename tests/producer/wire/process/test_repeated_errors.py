from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator

import pytest

from pagemill.producer.wire.process.repeated_errors import IN_LOOP, MAX_KINDS, RepeatedErrors


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger(f"loop-{uuid.uuid4().hex}")
    logger.addFilter(RepeatedErrors())
    return logger


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def fail(logger: logging.Logger, error: Exception, message: str = "it failed; trying again") -> None:
    try:
        raise error
    except Exception:
        logger.exception(message)


def test_the_same_error_is_told_once_and_then_counted_each_minute(
    logger: logging.Logger, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(150):
        clock[0] = 1000.0 + second
        fail(logger, RuntimeError(f"no room for {second} jobs at 0x{second:x}"))
    first, *counts = caplog.records
    assert first.exc_info is not None
    assert "RuntimeError" in caplog.text
    assert [record.getMessage() for record in counts] == [
        "it failed; trying again: no room for 60 jobs at 0x3c (60 times more in 60 s)",
        "it failed; trying again: no room for 120 jobs at 0x78 (60 times more in 60 s)",
    ]
    assert all(record.exc_info is None for record in counts)


def test_other_errors_are_told(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        fail(logger, RuntimeError("one"))
        fail(logger, RuntimeError("another"))
        fail(logger, ValueError("one"))
        fail(logger, RuntimeError("one"), "elsewhere")
    assert len(caplog.records) == 4


def test_lines_without_an_error_are_left_alone_unless_they_are_a_loops(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        logger.warning("job %s is late", "a")
        logger.warning("no server: %s", "refused", extra=IN_LOOP)
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("job a is late") == 5
    assert messages.count("no server: refused") == 1
    assert not any(hasattr(record, "in_loop") for record in caplog.records)


def test_what_is_remembered_is_bounded(logger: logging.Logger) -> None:
    (seen,) = logger.filters
    assert isinstance(seen, RepeatedErrors)
    for number in range(3 * MAX_KINDS):
        fail(logger, RuntimeError("x" * number))
    assert len(seen._seen) == MAX_KINDS


def test_an_error_without_a_traceback_is_one_of_a_kind(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        logger.error("failed", exc_info=RuntimeError("never raised"))
    assert len(caplog.records) == 1
