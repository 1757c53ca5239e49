"""`pagemill run` and `pagemill batch run` as users type them: processes, files, exit codes, Ctrl-C, kill -9."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

Finished = subprocess.CompletedProcess[str]


def environment(url: str, queue: str) -> dict[str, str]:
    return bare_environment() | {"PAGEMILL_REDIS_URL": url, "PAGEMILL_QUEUE": queue}


def bare_environment() -> dict[str, str]:
    """This environment without any Pagemill setting; the packages come from the repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    return kept


@pytest.fixture
def pagemill(valkey_url: str, queue_name: str, tmp_path: Path) -> Callable[..., Finished]:
    def run(*arguments: str) -> Finished:
        return subprocess.run(
            [sys.executable, "-m", "pagemill", *arguments], env=environment(valkey_url, queue_name), cwd=tmp_path,
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def worker(valkey_url: str, queue_name: str) -> Iterator[Any]:
    with running_worker(worker_config(valkey_url, queue_name)) as worker:
        yield worker


def write_rows(path: Path, count: int) -> Path:
    path.write_text(
        "".join(json.dumps({"text": f"row {i}", "side": "ab"[i % 2]}) + "\n" for i in range(count))
    )
    return path


def outputs(path: Path) -> list[str]:
    return [json.loads(line)["output"] for line in path.read_text().splitlines()]


RUN = ("run", "in.jsonl", "--out", "out.jsonl", "--template", "{{ text }}", "--no-chat", "--max-tokens", "20")


def test_a_run_with_its_report(pagemill: Callable[..., Finished], worker: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 30)
    done = pagemill(*RUN, "--json", "--gold", "side", "--price-per-hour", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["rows"], report["succeeded"], report["failed"]) == (30, 30, 0)
    assert report["accuracy"] == 0.0
    assert report["cost"] > 0
    assert outputs(tmp_path / "out.jsonl") == [f"row {i}" for i in range(30)]
    page = (tmp_path / "out.jsonl.report.html").read_text()
    assert "http" not in page.replace("http-equiv", ""), "the page must need nothing from elsewhere"
    assert json.loads((tmp_path / "out.jsonl.report.json").read_text())["rows"] == 30


def test_characters_that_the_output_s_encoding_lacks_are_escaped(
    pagemill: Callable[..., Finished], worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "iso8859-1")
    (tmp_path / "in.jsonl").write_text('{"text": "a 😀"}\n')
    done = pagemill(*RUN, "--choices", "b,😀")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert re.search(r"^(b|\\U0001f600) +#+ +1$", done.stdout, re.MULTILINE)
    assert (tmp_path / "out.jsonl.report.html").exists()
    submitted = pagemill("submit", "😀", "--max-tokens", "4", "--wait")
    assert (submitted.returncode, submitted.stdout) == (0, "\\U0001f600\n")


@pytest.mark.slow
def test_markup_in_the_data_stays_text(
    pagemill: Callable[..., Finished], worker: Any, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "<script>x"}\n{"text": "[red]y[/red]"}\n')
    done = pagemill(*RUN, "--choices", "[red]y[/red]")
    assert done.returncode == 0, done.stderr
    assert "<script>x" not in (tmp_path / "out.jsonl.report.html").read_text()
    assert "[red]y[/red]" in done.stdout


@pytest.mark.slow
def test_failed_rows_have_an_exit_code_of_their_own(
    pagemill: Callable[..., Finished], worker: Any, tmp_path: Path
) -> None:
    write_rows(tmp_path / "in.jsonl", 3)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("{torn\n")
    done = pagemill(*RUN)
    assert done.returncode == 4
    assert "1 row failed, the first: row 4: invalid_json" in done.stderr
    assert json.loads((tmp_path / "out.jsonl.errors.jsonl").read_text())["row"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--template", "{{ nope }}"), "the columns are: text, side"),
        (("--template", "{{ text"), "template"),
        (("--out", "nowhere/out.jsonl"), "nowhere"),
        (("--out", "out.xyz"), ".jsonl"),
        (("--gold", "nope"), "nope"),
        (("--field", "no_such=1"), "no_such"),
        (("--choices", "a,b", "--regex", "x"), "exclude each other"),
        (("--json-schema", "{torn"), "JSON"),
        (("--json-schema", '{"a":' * 9999), "recursion"),
        (("--encoding", "utf-16"), "UTF-8"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    pagemill: Callable[..., Finished], tmp_path: Path, worker: Any, arguments: tuple[str, ...], says: str
) -> None:
    write_rows(tmp_path / "in.jsonl", 2)
    done = pagemill(*RUN, *arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


@pytest.mark.slow
def test_a_dry_run_submits_nothing(pagemill: Callable[..., Finished], tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 5)
    done = pagemill(*RUN, "--model", "echo", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "row 0" in done.stdout
    assert "5 of 5 rows" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


@pytest.mark.slow
def test_a_dry_run_shows_control_characters_as_escapes(
    pagemill: Callable[..., Finished], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "a\x1b]0;title\x07\tb\nc\x9b1m é"}) + "\n")
    done = pagemill(*RUN, "--model", "echo", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "a\\x1b]0;title\\x07\tb\nc\\x9b1m é\n" in done.stdout


@pytest.mark.slow
def test_a_run_waits_for_a_worker_that_is_loading(tmp_path: Path, client: QueueClient) -> None:
    write_rows(tmp_path / "in.jsonl", 3)
    loading = WorkerInfo(id="loading", models=(), state="loading")
    client.run(registry.heartbeat(client.queue, loading, ttl_ms=300_000))
    command = [sys.executable, "-m", "pagemill", *RUN, "--model", "echo"]
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environment(client.url, client.queue), stderr=subprocess.PIPE, text=True
    )
    assert run.stderr is not None
    assert "waiting for the worker" in run.stderr.readline()
    with running_worker(worker_config(client.url, client.queue)):
        _, said = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, said
    assert "starting a worker" not in said
    assert len(outputs(tmp_path / "out.jsonl")) == 3


@pytest.mark.slow
def test_no_server_is_exit_code_3(tmp_path: Path, pagemill: Callable[..., Finished]) -> None:
    write_rows(tmp_path / "in.jsonl", 2)
    done = pagemill(*RUN, "--redis-url", "redis://127.0.0.1:1/0")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_estimate_keeps_what_it_did(
    pagemill: Callable[..., Finished], worker: Any, tmp_path: Path
) -> None:
    write_rows(tmp_path / "in.jsonl", 150)
    trial = pagemill(*RUN, "--estimate", "--price-per-hour", "3")
    assert trial.returncode == 0, trial.stderr
    assert re.search(
        r"all 150 rows: about (a second|\d+ (seconds|minutes)), [\d.]+ at that price", trial.stderr
    )
    assert "no output was written" in trial.stderr
    assert not (tmp_path / "out.jsonl").exists(), "it would look like a finished output"
    whole = pagemill(*RUN, "--json")
    assert whole.returncode == 0, whole.stderr
    assert len(outputs(tmp_path / "out.jsonl")) == 150
    assert json.loads(whole.stdout)["starts"] == 2, "the rows of the trial are not computed again"
    assert not (tmp_path / "out.jsonl.partial").exists()
    again = pagemill(*RUN, "--estimate")
    assert again.returncode == 0, again.stderr
    assert len(outputs(tmp_path / "out.jsonl")) == 150


@pytest.mark.slow
def test_detached_and_collected_another_day(
    pagemill: Callable[..., Finished], worker: Any, tmp_path: Path
) -> None:
    write_rows(tmp_path / "in.jsonl", 40)
    away = pagemill(*RUN, "--detach")
    assert away.returncode == 0, away.stderr
    assert "40 jobs submitted" in away.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert pagemill(*RUN).returncode == 0
    assert len(outputs(tmp_path / "out.jsonl")) == 40


@pytest.mark.parametrize(
    "ending",
    [
        signal.SIGKILL,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ),
    ],
)
def test_interrupted_and_started_again(
    pagemill: Callable[..., Finished],
    valkey_url: str,
    queue_name: str,
    tmp_path: Path,
    ending: signal.Signals,
) -> None:
    write_rows(tmp_path / "in.jsonl", 60)
    config = worker_config(valkey_url, queue_name, model="echo:20")
    with running_worker(config) as worker:
        command = [sys.executable, "-m", "pagemill", *RUN, "--window", "10", "--model", "echo"]
        first = subprocess.Popen(
            command, cwd=tmp_path, env=environment(valkey_url, queue_name), stderr=subprocess.PIPE, text=True
        )
        eventually(lambda: len(worker.table) > 0 or first.poll() is not None, "the run's first jobs")
        waiting = QueueClient(valkey_url, queue_name)
        waiting.pause()  # it cannot end before the test says so
        time.sleep(0.3)
        first.send_signal(ending)
        _, said = first.communicate(timeout=PATIENCE_S)
        assert first.returncode == (130 if ending != signal.SIGKILL else -signal.SIGKILL), said
        if ending != signal.SIGKILL:
            assert "(--cancel ends them)\nrun the same command again to continue;" in said
        waiting.pause(False)
        waiting.redis.close()
        again = pagemill(*RUN, "--model", "echo")
        assert again.returncode == 0, again.stderr
    assert outputs(tmp_path / "out.jsonl") == [f"row {i}" for i in range(60)]


@pytest.mark.slow
def test_a_run_brings_its_own_worker(tmp_path: Path, pagemill: Callable[..., Finished]) -> None:
    """No server, no worker: `--model` starts both, and stops them afterwards."""
    write_rows(tmp_path / "in.jsonl", 5)
    done = subprocess.run(
        [sys.executable, "-m", "pagemill", *RUN, "--model", "echo"], cwd=tmp_path, capture_output=True, text=True,
        env=bare_environment() | {"PAGEMILL_STATE_DIR": str(tmp_path / "state")}, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(outputs(tmp_path / "out.jsonl")) == 5
    # A run prints the worker's latest message at intervals: an echo model may be loaded between two of them.
    assert re.search(r"starting a worker for echo: (loading echo|ready: model echo)", done.stderr), (
        done.stderr
    )
    assert not (tmp_path / "state" / "server.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_run_that_is_killed_takes_its_own_worker_along(tmp_path: Path, client: QueueClient) -> None:
    write_rows(tmp_path / "in.jsonl", 3)
    client.pause()  # the run cannot end before it is killed
    run = subprocess.Popen(
        [sys.executable, "-m", "pagemill", *RUN, "--model", "echo"], cwd=tmp_path,
        env=environment(client.url, client.queue),
    )  # fmt: skip
    call = registry.workers(client.queue)
    eventually(lambda: any(info.state == "ready" for info in client.run(call)), "the run's own worker")
    run.kill()
    run.wait(timeout=PATIENCE_S)
    eventually(lambda: not client.run(call), "the worker's end")


@pytest.mark.slow
def test_a_batch_file(pagemill: Callable[..., Finished], worker: Any, tmp_path: Path) -> None:
    requests = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "gpt-4o-mini", "prompt": f"row {i}", "temperature": 0}}
        for i in range(4)
    ]  # fmt: skip
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(item) + "\n" for item in requests))
    done = pagemill("batch", "run", "requests.jsonl", "--model", "echo", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 4
    answers = [json.loads(line) for line in (tmp_path / "requests.output.jsonl").read_text().splitlines()]
    assert [a["response"]["body"]["choices"][0]["text"] for a in answers] == [f"row {i}" for i in range(4)]


@pytest.mark.slow
def test_a_run_in_a_pipe(worker: Any, valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    """Standard input is read to its end, even if the run is started a second time."""
    data = gzip.compress(b"".join(b'{"text": "row %d"}\n' % i for i in range(8)))
    for adopted in (0, 8):
        done = subprocess.run(
            [sys.executable, "-m", "pagemill", "run", "-", "--out", "out.jsonl.gz", "--template", "{{ text }}",
             "--no-chat", "--max-tokens", "20", "--json"], input=data, cwd=tmp_path, capture_output=True,
            env=environment(valkey_url, queue_name), timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["input"], report["succeeded"], report["adopted"]) == ("standard input", 8, adopted)
    found = gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()).decode().splitlines()
    assert [json.loads(line)["output"] for line in found] == [f"row {i}" for i in range(8)]
