"""Untrusted text in the commands' output: it cannot control a terminal, and does not add a line or cell."""

from __future__ import annotations

import pytest

from pagemill.cli.app import print_stderr
from pagemill.cli.terminal import views
from pagemill.producer.dataset.report import bars
from pagemill.producer.wire.schema.outputs import Output, Result, Usage

HOSTILE = "a\x1b[2Jb\x07\tc\r\u202ed"
SHOWN = r"a\x1b[2Jb\x07\tc\r\u202ed"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_cells(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    views.print_rows(("name", "[bold]value[/x]"), [(HOSTILE, 5), ("[red]", HOSTILE + "\n")])
    printed = capsys.readouterr().out
    assert printed.count(SHOWN) == 2
    assert "[bold]value[/x]" in printed
    assert "[red]" in printed
    assert printed.count("\n") == 3
    assert "\x07" not in printed
    assert "\x1b[2J" not in printed


def test_messages_keep_their_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_stderr(f"1 row failed: {HOSTILE}\nAll reasons are elsewhere")
    assert capsys.readouterr().err == f"1 row failed: {SHOWN}\nAll reasons are elsewhere\n"


def test_labels(capsys: pytest.CaptureFixture[str]) -> None:
    assert bars({HOSTILE: 2, "b\nc": 1})[0][0] == SHOWN
    output = Output(index=0, text="x", label=HOSTILE, label_probs={HOSTILE: 0.75, "b\n0.9\tc": 0.25})
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    views.print_result(Result(id="j", model="m", outputs=(output,), usage=usage, seed=1), as_json=False)
    assert capsys.readouterr().out == f"0.7500\t{SHOWN}\n0.2500\tb\\n0.9\\tc\n"
