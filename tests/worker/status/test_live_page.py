"""The live page over HTTP: its access rules, and the data that leaves the worker."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from pagemill.monitoring.live.feed import MAX_WATCHERS
from pagemill.worker.worker import Worker
from tests.worker.harness import QueueClient, eventually, get_json, running_worker, worker_config

pytestmark = pytest.mark.slow

SECRET = "the-prompt-nobody-may-see"


@pytest.fixture
def worker(client: QueueClient, valkey_url: str) -> Iterator[Worker]:
    with running_worker(
        worker_config(valkey_url, client.queue, model="echo:10", num_kv_blocks=200)
    ) as worker:
        yield worker


def ask(worker: Worker, path: str, host: str | None = None, method: str = "GET") -> http.client.HTTPResponse:
    address = str(worker.http_url).removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path, headers={"Host": host or address})
    return connection.getresponse()


def events(worker: Worker, wanted: int) -> list[tuple[str, dict[str, Any]]]:
    """The first events of a stream."""
    found: list[tuple[str, dict[str, Any]]] = []
    with urllib.request.urlopen(f"{worker.http_url}/live/events", timeout=60) as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        while len(found) < wanted:
            name, data, blank = (stream.readline().decode().rstrip("\n") for _ in range(3))
            assert (name[:7], data[:6], blank) == ("event: ", "data: ", "")
            found.append((name[7:], json.loads(data[6:])))
    return found


def test_the_page_and_all_it_needs_come_from_here_under_a_strict_policy(worker: Worker) -> None:
    for path in ("/", "/live/page.css", "/live/page.js", "/live/icon.svg", "/live/events", "/live.json"):
        with ask(worker, path, method="HEAD") as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert (answer.status, "default-src 'none'" in policy, "unsafe" in policy) == (
                200,
                True,
                False,
            ), path
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
    with ask(worker, "/") as answer:
        page = answer.read().decode()
    assert "http" not in page.replace('http-equiv="', ""), "it names no other place"
    assert "<script>" not in page


@pytest.mark.parametrize(
    "path", ["/live/../worker.py", "/live/%2e%2e/logging.py", "/live/", "/live/nothing.js"]
)
def test_only_the_page_s_own_files_are_served(worker: Worker, path: str) -> None:
    assert ask(worker, path).status == 404


@pytest.mark.parametrize("path", ["/", "/live.json", "/live/events", "/live/page.js"])
def test_a_stranger_s_host_name_gets_nothing(worker: Worker, path: str) -> None:
    """An attacker's page could have its name resolve to the worker's address, and read the live page."""
    for host in ("evil.example", "evil.example:9790", "127.0.0.1.evil.example", "localhost.evil.example"):
        assert ask(worker, path, host).status == 403
    for host in ("localhost", "LOCALHOST:9790", "127.0.0.1", "[::1]:9790"):
        with ask(worker, path, host, "HEAD") as answer:
            assert answer.status == 200
    assert ask(worker, "/metrics", "evil.example").status == 200, "metrics are for everybody"


def test_off_loopback_the_page_must_be_asked_for_and_its_names_be_told(client: QueueClient) -> None:
    with running_worker(worker_config(client.url, client.queue, http_host="0.0.0.0")) as worker:
        assert [ask(worker, path).status for path in ("/", "/live.json", "/live/events")] == [403] * 3
        assert [ask(worker, path).status for path in ("/metrics", "/healthz", "/readyz", "/startupz")] == [
            200
        ] * 4
        assert b"--live-page" in ask(worker, "/").read()
    shown = worker_config(
        client.url,
        client.queue,
        http_host="0.0.0.0",
        live_page=True,
        live_page_hosts="gpu1.example, gpu2.example",
    )
    with running_worker(shown) as worker:
        assert ask(worker, "/").status == 200
        assert ask(worker, "/", "GPU2.example:9790").status == 200
        assert ask(worker, "/", "gpu3.example").status == 403


def test_a_stream_begins_with_the_history_and_goes_on_with_states(
    client: QueueClient, worker: Worker
) -> None:
    client.submit({"prompt": "x" * 1500, "max_tokens": 1500})
    eventually(lambda: get_json(f"{worker.http_url}/live.json")[1]["jobs"]["total"], "the job to run")
    time.sleep(1.2)  # the point of one second, so that the history is not empty
    (first, history), *states = events(worker, 4)
    assert first == "history"
    assert len({len(column) for column in history.values()}) == 1
    assert history["time"], "the past is there from the first moment"
    assert [name for name, _ in states] == ["state"] * 3
    last = states[-1][1]
    assert last["point"]["time"] > history["time"][-1]
    assert last["jobs"]["shown"][0]["generated_tokens"] > states[0][1]["jobs"]["shown"][0]["generated_tokens"]


def test_the_block_map_shows_every_block_and_agrees_with_the_pool(
    client: QueueClient, worker: Worker
) -> None:
    prompt = "shared " * 40
    client.submit(*({"prompt": f"{prompt}{number}", "max_tokens": 200} for number in range(3)))

    def mapped() -> dict[str, Any] | None:
        document = get_json(f"{worker.http_url}/live.json")[1]
        return document if document["blocks"] and "s" in document["blocks"]["runs"] else None

    document = eventually(mapped, "a map with shared blocks")
    states = unpack(document["blocks"]["runs"])
    assert len(states) == document["kv"]["capacity"] == 200
    assert states[0] == "r", "the null block"
    client.wait([job["id"] for job in document["jobs"]["shown"]])

    def settled() -> bool:
        now = get_json(f"{worker.http_url}/live.json")[1]
        states, kv = unpack(now["blocks"]["runs"]), now["kv"]
        counted = [states.count(letter) for letter in "fcar"]
        return counted == [kv["free"], kv["cached"], 0, kv["reserved"]] and "s" not in states

    eventually(settled, "the map to show an idle pool")


def test_nobody_watching_means_no_map(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    eventually(lambda: get_json(f"{worker.http_url}/live.json")[1]["blocks"], "a map")
    monkeypatch.setattr("pagemill.engine.block_watch.time.monotonic", lambda: time.perf_counter() + 1e9)
    worker.engine.watch_blocks(-1.0)
    eventually(
        lambda: worker.engine.stats is not None and worker.engine.stats.blocks is None, "the map to go"
    )


def test_ends_and_errors_are_told_without_a_word_of_the_prompt(client: QueueClient, worker: Worker) -> None:
    good, bad = client.submit({"prompt": SECRET, "max_tokens": 3}, {"prompt": SECRET * 400})
    client.wait([good, bad])
    document = get_json(f"{worker.http_url}/live.json")[1]
    assert {end["id"]: end["outcome"] for end in document["ends"]} == {good: "succeeded", bad: "failed"}
    (error,) = document["errors"]
    assert (error["id"], error["code"]) == (bad, "prompt_too_long")
    assert document["totals"]["succeeded"] == 1
    client.submit({"prompt": SECRET * 20})
    eventually(lambda: get_json(f"{worker.http_url}/live.json")[1]["jobs"]["total"], "the job to run")
    assert SECRET not in json.dumps(get_json(f"{worker.http_url}/live.json")[1])


def test_prompts_are_shown_to_who_asked_for_them(client: QueueClient, valkey_url: str) -> None:
    settings = worker_config(valkey_url, client.queue, model="echo:20", show_prompts=True)
    with running_worker(settings) as worker:
        client.submit({"prompt": SECRET * 20}, {"messages": [{"role": "user", "content": "hello " * 40}]})

        def prompts() -> list[str]:
            shown = get_json(f"{worker.http_url}/live.json")[1]["jobs"]["shown"]
            return sorted(job["prompt"][:6] for job in shown)

        eventually(lambda: prompts() == ["hello ", SECRET[:6]], "both jobs to run")
        shown = get_json(f"{worker.http_url}/live.json")[1]["jobs"]["shown"]
        assert all(len(job["prompt"]) == 160 for job in shown)


def test_pixels_are_not_shown(client: QueueClient, valkey_url: str) -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hello " * 20}]
    with running_worker(
        worker_config(valkey_url, client.queue, model="echo:20", show_prompts=True)
    ) as worker:
        client.submit({"messages": [{"role": "user", "content": parts}]})

        def prompts() -> list[str]:
            return [
                job["prompt"][:22] for job in get_json(f"{worker.http_url}/live.json")[1]["jobs"]["shown"]
            ]

        eventually(prompts, "the job to run")
        assert prompts() == ["[image/png, 8 bytes]he"]


def test_only_so_many_pages_may_be_open(worker: Worker) -> None:
    streams = [ask(worker, "/live/events") for _ in range(MAX_WATCHERS)]
    assert {stream.status for stream in streams} == {200}
    assert ask(worker, "/live/events").status == 503
    assert ask(worker, "/healthz").status == 200
    for stream in streams:
        stream.close()
    eventually(
        lambda: ask(worker, "/live/events", method="HEAD").status == 200, "the closed ones to be noticed"
    )


def test_open_streams_end_with_the_worker(client: QueueClient, valkey_url: str) -> None:
    with running_worker(worker_config(valkey_url, client.queue)) as worker:
        stream = ask(worker, "/live/events")
        assert stream.readline() == b"event: history\n"
        reader = threading.Thread(target=stream.read)
        reader.start()
    reader.join(timeout=60)
    assert not reader.is_alive()
    stream.close()


def unpack(runs: str) -> str:
    states, digits = "", ""
    for letter in runs:
        if letter.isdigit():
            digits += letter
        else:
            states, digits = states + letter * int(digits or 1), ""
    return states
