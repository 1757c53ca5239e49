"""The commands as users type them: processes, pipes and a worker with the echo model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.worker.harness import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

Finished = subprocess.CompletedProcess[str]
Pagemill = Callable[..., Finished]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pagemill", *arguments]


def settings(**extra: str) -> dict[str, str]:
    """This environment without its Pagemill settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    return kept | extra


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def pagemill(state_dir: Path) -> Pagemill:
    """Run a command that finds the server only through the state directory."""

    def run(*arguments: str, stdin: str = "") -> Finished:
        environment = settings(PAGEMILL_STATE_DIR=str(state_dir))
        return subprocess.run(
            command(*arguments), env=environment, input=stdin, capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def worker(state_dir: Path, tmp_path: Path, pagemill: Pagemill) -> Iterator[subprocess.Popen[bytes]]:
    """`pagemill worker --model echo` with an embedded server, as a new user starts it."""
    log_path = tmp_path / "worker.log"
    arguments = command("worker", "--model", "echo", "--http-port", "0", "--state-dir", str(state_dir))
    with log_path.open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env=settings(), start_new_session=True)
    try:
        eventually(lambda: process.poll() is not None or "ready" in pagemill("workers").stdout, "the worker")
        assert process.poll() is None, log_path.read_text()
        yield process
    finally:
        process.kill()
        process.wait(timeout=PATIENCE_S)


@pytest.mark.usefixtures("worker")
def test_a_job_from_the_terminal_and_back(pagemill: Pagemill) -> None:
    submitted = pagemill("submit", "hello there", "--max-tokens", "4")
    assert (submitted.returncode, submitted.stderr) == (0, "")
    job_id = submitted.stdout.strip()
    answer = pagemill("result", job_id, "--json")
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert document["model"] == "echo"
    assert document["usage"]["completion_tokens"] == 4
    assert pagemill("result", job_id).stdout == document["outputs"][0]["text"] + "\n"
    assert json.loads(pagemill("status", job_id, "--json").stdout)["state"] == "succeeded"


@pytest.mark.usefixtures("worker")
def test_wait_and_stream_print_the_same_text(pagemill: Pagemill) -> None:
    waited = pagemill("submit", "-", "--max-tokens", "12", "--wait", stdin="once upon a time")
    streamed = pagemill("submit", "-", "--max-tokens", "12", "--stream", stdin="once upon a time")
    assert waited.returncode == streamed.returncode == 0, waited.stderr + streamed.stderr
    assert streamed.stdout.splitlines()[-1:] == waited.stdout.splitlines()[-1:]
    assert len(waited.stdout) > 1


@pytest.mark.usefixtures("worker")
def test_workers_and_queue_stats_see_it(pagemill: Pagemill) -> None:
    (listed,) = json.loads(pagemill("workers", "--json").stdout)
    assert (listed["models"], listed["state"]) == (["echo"], "ready")
    assert re.match(r"http://127\.0\.0\.1:\d+", listed["url"])
    stats = json.loads(pagemill("queue", "stats", "--json").stdout)
    assert stats["queue"] == "default"


def test_ctrl_c_ends_a_worker_with_exit_code_0(worker: subprocess.Popen[bytes], pagemill: Pagemill) -> None:
    worker.send_signal(signal.SIGINT)
    assert worker.wait(timeout=PATIENCE_S) == 0
    gone = pagemill("workers")
    assert gone.returncode == 3
    assert "pagemill worker --model smollm2" in gone.stderr


@pytest.mark.usefixtures("worker")
def test_ctrl_c_while_waiting_leaves_the_job_alone(pagemill: Pagemill, state_dir: Path) -> None:
    assert pagemill("queue", "pause").returncode == 0
    waiting = subprocess.Popen(
        command("submit", "patience", "--wait"), env=settings(PAGEMILL_STATE_DIR=str(state_dir)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def is_queued() -> bool:
        return bool(json.loads(pagemill("queue", "stats", "--json").stdout)["counts"].get("queued"))

    try:
        eventually(is_queued, "the job")
        waiting.send_signal(signal.SIGINT)
        output, errors = waiting.communicate(timeout=PATIENCE_S)
    finally:
        waiting.kill()
        waiting.communicate()
    assert (waiting.returncode, output) == (130, "")
    found = re.search(r"pagemill cancel (\S+)", errors)
    assert found is not None, errors
    assert json.loads(pagemill("status", found[1], "--json").stdout)["state"] == "queued"


@pytest.mark.usefixtures("worker")
def test_output_survives_a_reader_that_goes_away(pagemill: Pagemill, state_dir: Path) -> None:
    """`pagemill ... | head -1` ends quietly."""
    environment = settings(PAGEMILL_STATE_DIR=str(state_dir))
    with subprocess.Popen(
        command("submit", "x" * 200, "--max-tokens", "200", "--stream", "--json"), env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as streaming:  # fmt: skip
        assert streaming.stdout is not None
        assert streaming.stderr is not None
        streaming.stdout.readline()
        streaming.stdout.close()
        assert "Traceback" not in streaming.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--model smollm2"),
        (["--model", "echo", "--max-num-seqs", "many"], "--max-num-seqs"),
        (["--model", "echo", "--option", "block_size=0"], "PAGEMILL_BLOCK_SIZE"),
        (["--model", "echo", "--option", "color=red"], "color"),
        (["--model", "echo", "--http-port", "99999999"], "--http-port"),
        (["--model", "echo", "--redis-url", "nowhere"], "not a Redis URL"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--model", "echo:fast"], "echo:fast"),
    ],
)
def test_a_worker_that_cannot_be_is_refused_with_its_reason(
    pagemill: Pagemill, arguments: list[str], complaint: str
) -> None:
    refused = pagemill("worker", *arguments)
    assert refused.returncode == 2, refused.stderr
    assert complaint in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_worker_without_its_server_is_exit_code_3(pagemill: Pagemill) -> None:
    refused = pagemill("worker", "--model", "echo", "--redis-url", "redis://127.0.0.1:1/0")
    assert refused.returncode == 3, refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_light_install_says_what_a_worker_needs(state_dir: Path) -> None:
    """Only the producer's libraries are available: all others are hidden from the import system."""
    hidden = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'prometheus_client', 'numba']));"
    program = (
        hidden + "sys.argv[1:] = ['worker', '--model', 'smollm2']; from pagemill.__main__ import main; main()"
    )
    refused = subprocess.run(
        [sys.executable, "-c", program], env=settings(PAGEMILL_STATE_DIR=str(state_dir)),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert refused.returncode == 2, refused.stderr
    assert "pagemill[worker]" in refused.stderr
