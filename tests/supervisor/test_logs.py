"""The logs of several processes on one stream."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading

from pagemill.supervisor.logs import MAX_LINE_BYTES, LogStream


def test_text_lines_say_whose_they_are() -> None:
    out = io.BytesIO()
    logs = LogStream(out, "console", width=8)
    logs.write("worker-0", b"ready\n")
    logs.writer("up").write("one\ntwo\n")
    assert out.getvalue() == b"worker-0 | ready\nup       | one\nup       | two\n"


def test_json_lines_get_a_field() -> None:
    out = io.BytesIO()
    logs = LogStream(out, "json")
    for line in (
        b'{"time": 1.5, "message": "ready"}',
        b"{}",
        b"Fatal Python error: \xff",
        b"[1]",
        b"{broken",
        b"[" * 5000,
    ):
        logs.write("worker-0", line)
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [record["process"] for record in records] == ["worker-0"] * 6
    assert records[0] == {"process": "worker-0", "time": 1.5, "message": "ready"}
    assert records[1] == {"process": "worker-0"}
    assert [record["message"] for record in records[2:5]] == ["Fatal Python error: \ufffd", "[1]", "{broken"]
    assert {record["logger"] for record in records[2:]} == {"stderr"}


def test_lines_of_many_processes_are_not_mixed() -> None:
    out = io.BytesIO()
    logs = LogStream(out, "console")
    program = "import sys\nfor i in range(2000): print(sys.argv[1] * 40)"
    children = [
        subprocess.Popen([sys.executable, "-c", program, letter], stdout=subprocess.PIPE) for letter in "abc"
    ]
    pumps: list[threading.Thread] = []
    for child, letter in zip(children, "abc", strict=True):
        assert child.stdout is not None
        pumps.append(logs.pump(letter, child.stdout))
    for child, pump in zip(children, pumps, strict=True):
        pump.join(60)
        child.wait(60)
    lines = out.getvalue().decode().splitlines()
    assert sorted(lines) == sorted(f"{letter} | {letter * 40}" for letter in "abc" for _ in range(2000))


def test_a_line_without_an_end_takes_bounded_memory() -> None:
    out = io.BytesIO()
    pump = LogStream(out, "console").pump("w", io.BytesIO(b"x" * (3 * MAX_LINE_BYTES)))
    pump.join(60)
    assert [len(line) for line in out.getvalue().splitlines()] == [MAX_LINE_BYTES + len("w | ")] * 3


def test_a_stream_that_is_closed_ends_nobody() -> None:
    out = io.BytesIO()
    logs = LogStream(out, "console")
    out.close()
    logs.write("w", b"unheard")
