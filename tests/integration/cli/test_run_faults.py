"""`pagemill run` with faults: a disk that becomes full, a report that cannot be written, unusable rows."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from pagemill.__main__ import app
from pagemill.cli import run as cli_run
from pagemill.cli.local_worker import WorkerFailed
from pagemill.producer.dataset.errors import DatasetError, DiskError, RunStopped
from tests.integration.cli.test_run import environment
from tests.worker.harness import PATIENCE_S, running_worker, worker_config

ROWS = 300
TEXT = "x" * 300
RUN = ("run", "in.jsonl", "--template", "{{ text }}", "--no-chat", "--max-tokens", "1", "--model", "echo")


@pytest.fixture(scope="module")
def place(valkey_url: str) -> Iterator[dict[str, str]]:
    """The environment of a queue with an echo worker."""
    queue = f"q-{uuid.uuid4().hex[:12]}"
    with running_worker(worker_config(valkey_url, queue)):
        yield environment(valkey_url, queue)


@pytest.fixture
def run(place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [*RUN, *arguments], env=place)


def write_rows(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": f"{i} {TEXT}", "n": i}) + "\n" for i in range(ROWS)))


def check_output(path: Path) -> None:
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == list(range(ROWS))


@pytest.mark.slow
def test_a_limit_on_file_sizes_stops_the_run_and_lifting_it_ends_it(
    place: dict[str, str], tmp_path: Path, run: Callable[..., Result]
) -> None:
    write_rows(tmp_path / "in.jsonl")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [sys.executable, "-m", "pagemill", *RUN, "--out", "out.jsonl"]
    stopped = subprocess.run(
        command, cwd=tmp_path, env=place, preexec_fn=limited, capture_output=True, text=True, timeout=PATIENCE_S
    )  # fmt: skip
    assert stopped.returncode == 1, stopped.stderr
    assert "run the same command again" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert {path.name for path in tmp_path.iterdir()} >= {"in.jsonl", "out.jsonl.partial"}
    again = run("--out", "out.jsonl", "--json")
    assert again.exit_code == 0, again.stderr
    check_output(tmp_path / "out.jsonl")


@pytest.mark.slow
def test_a_disk_that_fills_stops_the_run_and_space_ends_it(place: dict[str, str], tmp_path: Path) -> None:
    """On a file system of 160 KB in a separate mount namespace, which is then enlarged."""
    write_rows(tmp_path / "in.jsonl")
    (tmp_path / "disk").mkdir()
    command = " ".join(
        [f"'{sys.executable}' -m pagemill", *(f"'{word}'" for word in RUN), "--out disk/out.jsonl"]
    )
    script = f"""
        mount -t tmpfs -o size=160k tmpfs disk 2>/dev/null || exit 77
        {command}; echo "exit code $?" >&2
        mount -o remount,size=16m disk
        {command} --json && cp disk/out.jsonl .
    """
    try:
        done = subprocess.run(
            ["unshare", "--map-root-user", "--mount", "sh", "-c", script], cwd=tmp_path, env=place,
            capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this machine lets nobody mount a file system of their own")
    assert "the disk is full" in done.stderr
    assert "exit code 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["succeeded"] == ROWS
    check_output(tmp_path / "out.jsonl")


@pytest.mark.slow
def test_an_output_survives_a_report_that_cannot_be_written(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    done = run("--out", "out.jsonl", "--report", "nowhere/report.html")
    assert done.exit_code == 0, done.stderr
    assert "the report's files could not be written" in done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_report_named_as_json_does_not_replace_the_page(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    assert run("--out", "out.jsonl", "--report", "r.json").exit_code == 0
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == 1
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_every_kind_of_bad_row_is_told_apart(run: Callable[..., Result], tmp_path: Path) -> None:
    good = b'{"text": "good"}\n'
    rows = {
        "invalid_json": b'{"text": "torn\n',
        "invalid_encoding": b'{"text": "caf\xe9"}\n',
        "template_error": b'{"other": 1}\n',
        "invalid_row": b"[1, 2]\n",
        "payload_too_large": b'{"text": "' + b"w" * (65 << 20) + b'"}\n',
    }
    fifty = b'{"text": "' + b"w" * 50_000_000 + b'"}\n'
    (tmp_path / "in.jsonl").write_bytes(good + b"".join(rows.values()) + fifty + good)
    done = run("--out", "out.jsonl", "--json")
    assert done.exit_code == 4, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["succeeded"], summary["failed"]) == (8, 2, 6)
    errors = [json.loads(line) for line in (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines()]
    assert [error["row"] for error in errors] == [2, 3, 4, 5, 6, 7]
    assert [error["code"] for error in errors[:5]] == list(rows)
    assert errors[0]["message"] == "Unterminated string starting (character 10)"
    assert errors[5]["code"] == "template_error"
    assert "1048576 characters" in errors[5]["message"]
    assert all(len(error["raw"]) < 3_000 and error["message"] for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "schema_invalid"),
        ("false", "schema_invalid"),
    ],
)
def test_a_schema_that_nothing_satisfies(
    run: Callable[..., Result], tmp_path: Path, schema: str, says: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "schema.json").write_text(schema)
    done = run("--out", "out.jsonl", "--json-schema", "schema.json", "--json")
    assert done.exit_code in (2, 4), done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"), [(DatasetError("x"), 2), (RunStopped("x"), 1), (DiskError("x"), 1)]
)
def test_exit_code_2_means_that_nothing_was_started(error: DatasetError, code: int, tmp_path: Path) -> None:
    with pytest.raises(typer.Exit) as ended, cli_run.reported(tmp_path / "out.jsonl"):
        raise error
    assert ended.value.exit_code == code


def test_a_worker_of_ones_own_drains_briefly_unless_told_otherwise(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def start(model: str, *, options: list[str], **_: Any) -> Any:
        given.extend(options)
        raise WorkerFailed(model)

    monkeypatch.setattr(cli_run, "LocalWorker", start)
    flags = cli_run.ServeOptions(worker_option=["drain_grace_s=5"], quiet=True)
    with contextlib.ExitStack() as stack, pytest.raises(WorkerFailed):
        cli_run.server(stack, valkey_url, queue_name, "echo", flags)
    assert given == ["--option", "drain_grace_s=1", "--option", "drain_grace_s=5"]


def test_what_ends_without_an_output_is_json_too(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert json.loads(run("--out", "out.jsonl", "--detach", "--json").stdout) == {"submitted": 2}
    found: dict[str, Any] = json.loads(run("--out", "out.jsonl", "--cancel", "--json").stdout)
    assert set(found) == {"cancelled"}


def test_no_server_is_said_in_one_line(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    done = run("--out", "out.jsonl", "--json", "--redis-url", "redis://127.0.0.1:1/0")
    assert done.exit_code == 3
    assert done.stdout == ""
    assert "127.0.0.1:1" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


def test_a_mistyped_model_without_a_server_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEMILL_REDIS_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    done = CliRunner().invoke(
        app,
        [*RUN, "--out", "out.jsonl", "--model", "smolm2"],
        env={"PAGEMILL_STATE_DIR": str(tmp_path / "state")},
    )
    assert done.exit_code == 3, done.output
    assert "no Redis server" in done.stderr
    assert "smolm2" in done.stderr
    assert "--redis-url" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_finished_output_is_taken_up_as_it_was(
    run: Callable[..., Result], tmp_path: Path, suffix: str
) -> None:
    """A list of one element stays a list, and its schema counts as kept."""
    schema = '{"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 1}'
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    out = tmp_path / f"out.{suffix}"
    command = ("--out", str(out), "--json-schema", schema, "--max-tokens", "20", "--json")
    first = run(*command)
    assert first.exit_code == 0, first.stderr
    written = out.read_bytes()
    again = run(*command)
    assert again.exit_code == 0, again.stderr
    assert (
        json.loads(first.stdout)["schema_valid_ratio"] == json.loads(again.stdout)["schema_valid_ratio"] == 1
    )
    assert out.read_bytes() == written
