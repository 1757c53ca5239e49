"""Log lines as a collector and as an operator read them."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pagemill.monitoring.logging import (
    MAX_TEXT_CHARACTERS,
    MAX_TRACEBACK_CHARACTERS,
    LogFormat,
    configure_logging,
)


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    # basicConfig(force=True) closes the handlers that it replaces; pytest's own handlers must survive.
    root.handlers = []
    yield
    root.handlers, root.level = before, level


def test_json_lines_carry_extras_and_errors() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    logger = logging.getLogger("worker.test")
    logger.info("job %s\nstarted", 7, extra={"job_id": "01J", "attempt": 2})
    try:
        raise RuntimeError("no more blocks")
    except RuntimeError:
        logger.exception("step failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["message"] == "job 7\nstarted"
    assert (first["level"], first["logger"], first["job_id"], first["attempt"]) == (
        "info",
        "worker.test",
        "01J",
        2,
    )
    assert isinstance(first["time"], float)
    assert "RuntimeError: no more blocks" in second["error"]


def test_console_lines_end_with_the_extras() -> None:
    stream = io.StringIO()
    configure_logging("warning", stream=stream)
    logger = logging.getLogger("worker.test")
    logger.info("not shown")
    logger.warning("lease lost", extra={"job_id": "01J"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("[warning  ] lease lost [worker.test] job_id=01J")
    written = datetime.fromisoformat(line.split()[0])
    assert abs(written - datetime.now(UTC)) < timedelta(hours=1)


def test_fields_of_the_process_are_on_json_lines_only() -> None:
    as_json, for_people = io.StringIO(), io.StringIO()
    configure_logging("info", "json", as_json, {"worker": "w1", "queue": "q"})
    logging.getLogger("worker.test").info("job running", extra={"job_id": "01J"})
    line = json.loads(as_json.getvalue())
    assert list(line)[:4] == ["time", "level", "logger", "message"]
    assert (line["worker"], line["queue"], line["job_id"]) == ("w1", "q", "01J")
    configure_logging("info", "console", for_people, {"worker": "w1"})
    logging.getLogger("worker.test").info("job running")
    assert "w1" not in for_people.getvalue()


@pytest.mark.parametrize("format", ["json", "console"])
def test_a_traceback_shows_no_variables(format: LogFormat) -> None:
    """The values may be prompts."""
    stream = io.StringIO()
    configure_logging("info", format, stream)
    prompt = "".join(["my ", "secret ", "prompt"])
    try:
        raise RuntimeError(f"no more blocks for {len(prompt)} characters")
    except RuntimeError:
        logging.getLogger("worker.test").exception("step failed")
    assert "no more blocks for 16 characters" in stream.getvalue()
    assert prompt not in stream.getvalue()


def test_a_value_that_json_does_not_know_is_written_as_text() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    logging.getLogger("worker.test").info("started", extra={"where": Path("/x"), "bad": float("nan")})
    assert json.loads(stream.getvalue())["where"] == "/x"


def test_a_second_call_replaces_the_first() -> None:
    old, new = io.StringIO(), io.StringIO()
    configure_logging(stream=old)
    configure_logging(stream=new)
    logging.getLogger("worker.test").info("once")
    assert old.getvalue() == ""
    assert new.getvalue().count("once") == 1


def test_a_level_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("loud")


HOSTILE = "BadStatusLine: \r\n2026-01-01T00:00:00.000000Z [info     ] forged \x1b[2J\x07\x00\x9b\u2028\u202e"


@pytest.mark.parametrize("format", ["json", "console"])
def test_no_text_forges_a_line_or_controls_the_terminal(format: LogFormat) -> None:
    stream = io.StringIO()
    configure_logging("info", format, stream)
    logging.getLogger("worker.test").warning("webhook %s failed", HOSTILE, extra={"url": HOSTILE})
    written = stream.getvalue()
    assert written.count("\n") == 1
    assert all(one.isprintable() for one in written[:-1]) or format == "json"
    assert not any(ord(one) < 32 for one in written[:-1])
    if format == "json":
        assert json.loads(written)["url"] == HOSTILE
    else:
        assert "\\x1b[2J\\x07\\x00\\x9b\\u2028\\u202e" in written


def test_the_lines_of_an_error_s_text_are_indented_and_escaped() -> None:
    stream = io.StringIO()
    configure_logging("info", "console", stream)
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError:
        logging.getLogger("worker.test").exception("delivery failed")
    first, *others = stream.getvalue().split("\n")[:-1]
    assert "delivery failed" in first
    assert any("forged" in line for line in others)
    assert all(line.startswith("  ") and line.isprintable() for line in others)


@pytest.mark.parametrize("format", ["json", "console"])
def test_long_text_is_cut_in_its_middle(format: LogFormat) -> None:
    stream = io.StringIO()
    configure_logging("info", format, stream)
    logging.getLogger("worker.test").warning("begin %s end", "x" * 65_536, extra={"name_": "y" * 65_536})
    try:
        raise RuntimeError("z" * 10**6)
    except RuntimeError:
        logging.getLogger("worker.test").exception("failed")
    first, *others = stream.getvalue().splitlines()
    assert len(first) < 2 * MAX_TEXT_CHARACTERS + 500
    assert "begin x" in first
    assert "x end" in first
    assert sum(map(len, others)) < MAX_TRACEBACK_CHARACTERS + 500


@pytest.mark.parametrize(
    ("command", "last"),
    [
        (("worker", "--model", "echo", "--http-port", "0"), "ready: model"),
        (("gateway", "--port", "0"), "in a browser"),
        (("exporter", "--http-port", "0"), "queue metrics at"),
        (
            ("up", "--model", "echo", "--http-port", "0", "--gateway-port", "0", "--exporter-port", "0"),
            "ready",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_every_line_of_a_long_running_command_is_json(
    valkey_url: str, queue_name: str, tmp_path: Path, command: tuple[str, ...], last: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    ours = {
        "REDIS_URL": valkey_url,
        "QUEUE": queue_name,
        "LOG_FORMAT": "json",
        "STATE_DIR": str(tmp_path),
        "RUN_DIR": str(tmp_path / "up"),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "pagemill", *command],
        env=kept | {f"PAGEMILL_{name}": value for name, value in ours.items()},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not lines or last not in lines[-1]:
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            process.terminate()
            lines += process.stderr
        finally:
            process.kill()
    assert all(isinstance(json.loads(line), dict) for line in lines)
