"""`pagemill inspect` against a real server."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from pagemill.cli import inspect as cli_inspect
from pagemill.cli.app import app
from pagemill.producer.wire.server.discovery import URL_VARIABLE
from tests.producer.driving import Queue


@pytest.fixture(autouse=True)
def _environment(valkey_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, valkey_queue.url)
    monkeypatch.setenv("PAGEMILL_QUEUE", valkey_queue.name)


def inspect(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments])


def events(result: Result) -> list[list[str]]:
    """(what, where, why) of every line of the timeline."""
    return [line.split("\t")[2:] for line in result.stdout.splitlines() if line.count("\t") == 4]


def test_the_timeline_names_attempts_workers_and_errors(valkey_queue: Queue) -> None:
    valkey_queue.submit("one", prompt="a secret prompt")
    valkey_queue.retry(valkey_queue.pull_one(worker="w1"))
    valkey_queue.make_due("one")
    valkey_queue.commit(valkey_queue.pull_one(worker="w2"), text="a secret output")
    shown = inspect("one")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert events(shown) == [
        ["submitted", "", ""],
        ["started", "w1", "attempt 1"],
        ["retried", "w1", "engine_error: it broke"],
        ["started", "w2", "attempt 2"],
        ["succeeded", "w2", ""],
    ]
    assert "secret" not in shown.stdout


def test_json_has_the_same(valkey_queue: Queue) -> None:
    valkey_queue.submit("one")
    valkey_queue.pull_one(worker="w1")
    document = json.loads(inspect("one", "--json").stdout)
    assert (document["state"], document["executions"][0]["worker"]) == ("running", "w1")


def test_what_is_to_come_is_shown(valkey_queue: Queue) -> None:
    valkey_queue.submit("later", delay=600, ttl=900)
    assert [what for what, _, _ in events(inspect("later"))] == ["submitted", "due", "deadline"]
    valkey_queue.submit("now")
    shown = inspect("now")
    assert [what for what, _, _ in events(shown)] == ["submitted", "waiting"]
    assert "no live worker serves it" in shown.stdout


def test_an_end_while_waiting_is_told(valkey_queue: Queue) -> None:
    valkey_queue.submit("one")
    valkey_queue.cancel("one")
    assert events(inspect("one"))[-1] == ["cancelled", "", "cancelled: the job was cancelled"]


def test_an_unknown_job_is_exit_code_1_and_a_strange_id_2() -> None:
    unknown = inspect("nobody")
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "no job nobody" in unknown.stderr
    assert inspect("not an id").exit_code == 2


def test_a_terminal_gets_a_table(
    valkey_queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    valkey_queue.submit("one")
    valkey_queue.pull_one(worker="w1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    found = valkey_queue.run(cli_inspect.history(valkey_queue.name, "one"))
    assert found is not None
    cli_inspect.print_history(found)
    assert "attempt 1" in capsys.readouterr().out


def test_a_waiting_job_says_what_it_waits_for(valkey_queue: Queue) -> None:
    valkey_queue.submit("stuck")
    CliRunner().invoke(app, ["queue", "pause"])
    shown = inspect("stuck")
    assert f"pagemill queue resume --queue {valkey_queue.name}" in shown.stderr
    assert "no live worker serves m;" in shown.stderr
    CliRunner().invoke(app, ["queue", "resume"])
    assert "paused" not in inspect("stuck").stderr
