"""The producer's commands against a real server, with a scripted worker where one is needed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner, Result

from pagemill.__main__ import app, drop_service_links
from pagemill.cli import app as cli_app
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.text.chat import NamedToolChoice
from pagemill.producer.wire.server.discovery import STATE_DIR_VARIABLE, URL_VARIABLE
from tests.conftest import RedisServer
from tests.producer.driving import Queue, delta, open_queue
from tests.producer.scripted_worker import scripted_worker

NOBODY = "redis://127.0.0.1:1/0"

Pagemill = Callable[..., Result]


@pytest.fixture
def queue(valkey_url: str, queue_name: str) -> Iterator[Queue]:
    with open_queue(valkey_url, queue_name) as queue:
        yield queue


@pytest.fixture
def pagemill(valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> Pagemill:
    """Run a command on the test's own queue."""
    monkeypatch.setenv(URL_VARIABLE, valkey_url)
    monkeypatch.setenv("PAGEMILL_QUEUE", queue_name)
    monkeypatch.delenv("PAGEMILL_MODEL", raising=False)

    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return run


def test_submit_prints_the_id_alone_and_status_finds_the_job(pagemill: Pagemill) -> None:
    submitted = pagemill("submit", "hello", "--model", "m", "--priority", "high")
    assert (submitted.exit_code, submitted.stderr) == (0, "")
    job_id = submitted.stdout.strip()
    status = json.loads(pagemill("status", job_id, "--json").stdout)
    assert (status["id"], status["state"], status["priority"]) == (job_id, "queued", "high")


def test_submit_says_when_the_job_will_end(pagemill: Pagemill, queue: Queue) -> None:
    asked = ("submit", "hello", "--model", "m", "--estimate")
    done = pagemill(*asked)
    assert "no estimate" in done.stderr
    speed = registry.Speed(rows=1, busy_rate=1.0, free_rate=1.0)
    queue.run(registry.heartbeat(queue.name, registry.WorkerInfo(id="w", models=("m",), speed=speed)))
    done = pagemill(*asked)
    assert "it will probably end in" in done.stderr
    assert queue.state(done.stdout.strip()) == "queued"
    told = json.loads(pagemill(*asked, "--field", "ttl=1", "--json").stdout)["estimate"]
    assert told["misses_deadline"] is True
    assert told["p50"] < told["p90"]
    refused = pagemill(*asked, "--field", "ttl=1", "--refuse-late")
    assert refused.exit_code == 1
    assert "after its deadline; it was not submitted" in refused.stderr


def test_submit_takes_tools_from_a_file(pagemill: Pagemill, queue: Queue, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text('\ufeff[{"type": "function", "function": {"name": "time"}}]')  # as Windows writes it
    done = pagemill("submit", "when?", "--model", "m", "--tools", str(file), "--tool-choice", "time")
    assert done.exit_code == 0, done.stderr
    (pulled,) = queue.pull(1)
    job = Job.from_payload(pulled.payload)
    assert job.messages is not None
    assert [tool.function.name for tool in job.tools or ()] == ["time"]
    assert job.tool_choice == NamedToolChoice.model_validate({"function": {"name": "time"}})
    file.write_text("{")
    assert pagemill("submit", "x", "--model", "m", "--tools", str(file)).exit_code == 2


def test_submit_takes_images(pagemill: Pagemill, queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    images = ("--image", str(tmp_path / "a.png"), "--image", "https://host/b.jpg")
    assert pagemill("submit", "What?", "--model", "m", *images).exit_code == 0
    (pulled,) = queue.pull(models=("m",))
    job = Job.from_payload(pulled.payload)
    assert job.images == ("data:image/png;base64,iVBORw0KGgo=", "https://host/b.jpg")
    missing = pagemill("submit", "What?", "--model", "m", "--image", str(tmp_path / "b.png"))
    assert (missing.exit_code, "images[0]: cannot read b.png" in missing.stderr) == (2, True)


def test_a_dead_letter_shows_no_pixels(pagemill: Pagemill, queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    pagemill("submit", "What?", "--model", "m", "--image", str(tmp_path / "a.png"))
    (pulled,) = queue.pull(models=("m",))
    queue.fail(pulled, "dead")
    for form in ([], ["--json"]):
        output = pagemill("dead", "show", pulled.job_id, *form).stdout
        assert "[image/png, 8 bytes]" in output
        assert "iVBORw" not in output


def test_status_for_a_pipe_is_a_name_a_tab_and_a_value(pagemill: Pagemill, queue: Queue) -> None:
    queue.submit("one")
    lines = pagemill("status", "one").stdout.splitlines()
    assert ["id", "one"] in [line.split("\t") for line in lines]
    assert ["state", "queued"] in [line.split("\t") for line in lines]


@pytest.mark.parametrize("command", [("status", "one"), ("dead", "list"), ("batch", "list")], ids=" ".join)
def test_ages_do_not_depend_on_the_local_clock(
    pagemill: Pagemill, queue: Queue, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.submit("one", batch_id="B", max_attempts=1)
    queue.retry(queue.pull_one())
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 7200)
    shown = pagemill(*command)
    assert shown.exit_code == 0, shown.stderr
    ages = [float(age) for age in re.findall(r"([\d.]+) s ago", shown.stdout)]
    assert ages, shown.stdout
    assert max(ages) < 3600


def test_wait_prints_the_text(pagemill: Pagemill, valkey_url: str, queue_name: str) -> None:
    with scripted_worker(valkey_url, queue_name):
        waited = pagemill("submit", "say this", "--model", "m", "--wait")
    assert (waited.exit_code, waited.stdout) == (0, "say this\n")


def test_prompt_from_standard_input(pagemill: Pagemill, valkey_url: str, queue_name: str) -> None:
    with scripted_worker(valkey_url, queue_name):
        waited = pagemill("submit", "-", "--model", "m", "--wait", stdin="two\nlines")
    assert waited.stdout == "two\nlines\n"


@pytest.mark.slow
def test_result_prints_json(pagemill: Pagemill, valkey_url: str, queue_name: str) -> None:
    with scripted_worker(valkey_url, queue_name):
        job_id = json.loads(pagemill("submit", "text", "--model", "m", "--json").stdout)["id"]
        result = json.loads(pagemill("result", job_id, "--json").stdout)
    assert (result["id"], result["outputs"][0]["text"]) == (job_id, "text")


def test_a_failed_job_is_exit_code_1_with_its_reason(
    pagemill: Pagemill, valkey_url: str, queue_name: str
) -> None:
    with scripted_worker(valkey_url, queue_name):
        failed = pagemill("submit", "fail please", "--model", "m", "--wait")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert "failed: no good (invalid_job)" in failed.stderr


def test_stream_prints_tokens_as_one_text(pagemill: Pagemill, valkey_url: str, queue_name: str) -> None:
    def two_words(queue: Queue, pulled: PulledJob) -> None:
        queue.checkpoint(pulled, delta(0, 1, text="one "))
        queue.checkpoint(pulled, delta(1, 2, text="two"))
        queue.commit(pulled, "one two")

    with scripted_worker(valkey_url, queue_name, two_words):
        streamed = pagemill("submit", "count", "--model", "m", "--stream")
        as_json = pagemill("submit", "count", "--model", "m", "--stream", "--json")
    assert streamed.exit_code == 0
    assert streamed.stdout.splitlines()[-1] == "one two"
    events = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [event["type"] for event in events].count("end") == 1
    assert events[-1]["state"] == "succeeded"


def test_a_stream_that_ends_badly_is_exit_code_1(
    pagemill: Pagemill, valkey_url: str, queue_name: str
) -> None:
    with scripted_worker(valkey_url, queue_name):
        assert pagemill("submit", "die now", "--model", "m", "--stream").exit_code == 1


def test_the_only_served_model_is_the_default(pagemill: Pagemill, queue: Queue) -> None:
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w1", models=("tiny",))))
    job_id = pagemill("submit", "hello").stdout.strip()
    assert queue.status(job_id).model == "tiny"
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w2", models=("huge",))))
    refused = pagemill("submit", "hello")
    assert refused.exit_code == 2
    assert "huge, tiny" in refused.stderr


def test_without_a_worker_the_model_must_be_named(pagemill: Pagemill) -> None:
    refused = pagemill("submit", "hello")
    assert refused.exit_code == 2
    assert "--model" in refused.stderr


def test_a_worker_that_is_about_to_be_ready_is_waited_for(pagemill: Pagemill, queue: Queue) -> None:
    loading = WorkerInfo(id="w1", models=(), state="loading")
    queue.run(registry.heartbeat(queue.name, loading))
    ready = loading.model_copy(update={"models": ("tiny",), "state": "ready"})
    timer = threading.Timer(0.3, queue.run, [registry.heartbeat(queue.name, ready)])
    timer.start()
    submitted = pagemill("submit", "hello")
    timer.join()
    assert submitted.exit_code == 0, submitted.stderr
    assert queue.status(submitted.stdout.strip()).model == "tiny"


@pytest.mark.slow
def test_fields_reach_the_job(pagemill: Pagemill, queue: Queue) -> None:
    options = ["--choice", "a", "--choice", "b", "--max-tokens", "3", "--temperature", "0"]
    extra = ["--field", "top_k=5", "--field", "tenant=acme", "--system", "be brief"]
    submitted = pagemill("submit", "hello", "--model", "m", *options, *extra)
    assert submitted.exit_code == 0, submitted.stderr
    payload = json.loads(queue.pull_one().payload)
    assert payload["structured_outputs"] == {"choice": ["a", "b"]}
    assert [message["role"] for message in payload["messages"]] == ["system", "user"]
    assert (payload["max_tokens"], payload["temperature"], payload["top_k"]) == (3, 0.0, 5)
    assert payload["tenant"] == "acme"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["submit", "x", "--model", "m", "--field", "max_tokens=0"], "max_tokens"),
        (["submit", "x", "--model", "m", "--field", "color=1"], "color"),
        (["submit", "x", "--model", "m", "--field", "nonsense"], "NAME=JSON"),
        (["submit", "x", "--model", "m", "--wait", "--stream"], "exclude each other"),
        (["submit", "x", "--model", "m", "--queue", "a b"], "queue"),
        (["submit", "x", "--redis-url", "localhost"], "not a Redis URL"),
        (["status", "not an id"], "id"),
        *(
            (["run", __file__, "--template", "x", "--out", out], "--out: should name")
            for out in (".", "/", "")
        ),
        (["run", __file__, "--template", "x", "--out", "o.jsonl", "--report", "."], "--report: should name"),
        (["batch", "run", __file__, "--out", "."], "--out: should name"),
        (["nonsense"], "nonsense"),
    ],
)
def test_usage_errors_are_exit_code_2(pagemill: Pagemill, arguments: list[str], complaint: str) -> None:
    refused = pagemill(*arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert complaint in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["submit", "x", "--model", "m"], ["status", "x"], ["workers"], ["queue", "stats"]]
)
def test_no_server_is_exit_code_3_with_the_command_to_type(
    pagemill: Pagemill, monkeypatch: pytest.MonkeyPatch, tmp_path: object, arguments: list[str]
) -> None:
    refused = pagemill(*arguments, "--redis-url", NOBODY)
    assert (refused.exit_code, refused.stdout) == (3, "")
    assert "pagemill worker --model smollm2" in refused.stderr
    monkeypatch.delenv(URL_VARIABLE)
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path))
    nowhere = pagemill(*arguments)
    assert nowhere.exit_code == 3
    assert "pagemill worker --model smollm2" in nowhere.stderr


def test_an_unknown_job_is_exit_code_1(pagemill: Pagemill) -> None:
    for command in ("status", "result", "cancel"):
        unknown = pagemill(command, "nobody")
        assert (unknown.exit_code, unknown.stdout) == (1, "")
        assert "no job nobody" in unknown.stderr


def test_a_result_that_does_not_come_in_time_is_exit_code_1(pagemill: Pagemill, queue: Queue) -> None:
    queue.submit("slow")
    late = pagemill("result", "slow", "--timeout", "0")
    assert late.exit_code == 1
    assert "pagemill cancel" in late.stderr
    assert queue.state("slow") == "queued"


def test_cancel_says_whether_it_came_in_time(pagemill: Pagemill, queue: Queue) -> None:
    queue.submit("one")
    assert pagemill("cancel", "one").exit_code == 0
    assert queue.state("one") == "cancelled"
    assert pagemill("cancel", "one").exit_code == 1


def test_pause_and_resume(pagemill: Pagemill, queue: Queue) -> None:
    queue.submit("one", "two")
    assert pagemill("queue", "pause").exit_code == 0
    stats = json.loads(pagemill("queue", "stats", "--json").stdout)
    assert stats["paused"] is True
    assert stats["counts"]["queued"] == 2
    assert [(lane["model"], lane["jobs"]) for lane in stats["waiting"]] == [("m", 2)]
    assert queue.pull() == []
    assert pagemill("queue", "resume").exit_code == 0
    assert "paused\tno" in pagemill("queue", "stats").stdout
    assert len(queue.pull()) == 2


def test_workers_lists_who_is_alive(pagemill: Pagemill, queue: Queue) -> None:
    nobody = pagemill("workers")
    assert (nobody.exit_code, nobody.stdout) == (0, "")
    assert "no worker is alive" in nobody.stderr
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w1", models=("m",), url="http://h:9790")))
    listed = json.loads(pagemill("workers", "--json").stdout)
    assert [(worker["id"], worker["models"]) for worker in listed] == [("w1", ["m"])]
    assert "http://h:9790" in pagemill("workers").stdout


@pytest.mark.slow
def test_the_commands_import_no_torch() -> None:
    probe = "import sys, pagemill.__main__; sys.exit(any(m in sys.modules for m in ('torch', 'triton')))"
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=120)


def test_a_server_that_rejects_writes_is_not_called_unreachable(
    pagemill: Pagemill, own_valkey: RedisServer
) -> None:
    with redis.Redis.from_url(own_valkey.url) as admin:
        admin.config_set("min-replicas-to-write", 1)
    rejected = pagemill("submit", "x", "--model", "m", "--redis-url", own_valkey.url)
    assert rejected.exit_code == 3
    assert "NOREPLICAS" in rejected.stderr
    assert "The server is running" in rejected.stderr
    assert "is the address right" not in rejected.stderr


def test_variables_of_kubernetes_services_are_not_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_GATEWAY_PORT", "tcp://10.0.0.7:8000")
    monkeypatch.setenv("PAGEMILL_HTTP_PORT", "9790")
    drop_service_links()
    assert "PAGEMILL_GATEWAY_PORT" not in os.environ
    assert os.environ["PAGEMILL_HTTP_PORT"] == "9790"


@pytest.mark.parametrize("command", [("status", "a"), ("dead", "list"), ("queue", "stats")], ids=" ".join)
def test_commands_say_that_they_wait_for_redis(
    own_valkey: RedisServer, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a server that accepts connections and does not reply."""
    monkeypatch.setattr(cli_app, "SILENT_S", 0.1)
    process = own_valkey.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    resumed = threading.Timer(0.3, process.send_signal, [signal.SIGCONT])
    resumed.start()
    done = CliRunner().invoke(app, [*command, "--redis-url", own_valkey.url])
    resumed.join()
    assert done.stderr.count("waiting for Redis") == 1, done.output


@pytest.mark.parametrize(
    ("target", "reason"),
    [("/dev/full", "No space left on device"), ("&-", "Bad file descriptor")],
    ids=["full", "closed"],
)
@pytest.mark.parametrize("command", ["queue stats", "--version"])
def test_an_unusable_stdout_is_one_line(
    valkey_url: str, queue_name: str, command: str, target: str, reason: str
) -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m pagemill {command} >{target}"],
        env=os.environ | {URL_VARIABLE: valkey_url, "PAGEMILL_QUEUE": queue_name},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, f"standard output cannot be written: {reason}\n")


def test_a_refused_password_names_the_variables(pagemill: Pagemill, valkey_url: str) -> None:
    wrong = pagemill("queue", "stats", "--redis-url", valkey_url.replace("://", "://nobody:hunter2@"))
    assert wrong.exit_code == 3
    assert "Set PAGEMILL_REDIS_USERNAME and PAGEMILL_REDIS_PASSWORD" in wrong.stderr
    assert "Is the server running" not in wrong.stderr


def test_a_closed_stderr_is_replaced_under_its_number() -> None:
    """A worker without it does not log, and none of its sockets receives the output of libraries."""
    script = (
        "import sys; from pagemill.__main__ import fill_closed_streams; fill_closed_streams();"
        "from pagemill.monitoring.logging import configure_logging; configure_logging();"
        "import logging; logging.warning('dropped'); print(sys.stderr.fileno())"
    )
    arguments = ["sh", "-c", '"$0" -c "$1" 2>&-', sys.executable, script]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout == "2\n"
