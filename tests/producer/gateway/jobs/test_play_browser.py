"""The playground in a browser: headless Chromium, a gateway with keys, and an echo worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.producer.gateway.serving import Served, gateway, write_keys
from tests.worker.browser import DESKTOP, PHONE, Browser, missing, open_browser
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=missing() or "")]


@dataclass
class Playground:
    browser: Browser
    served: Served
    client: QueueClient
    key: str

    def type(self, field: str, text: str) -> None:
        """Like typed input: listeners are notified."""
        script = (
            f"const node = document.getElementById({json.dumps(field)}); node.value = {json.dumps(text)};"
            "node.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        self.browser.run(script)

    def click(self, css: str) -> None:
        self.browser.run(f"document.querySelector({json.dumps(css)}).click()")

    def choose(self, mode: str) -> None:
        self.click(f"input[value={mode}]")

    def run(self) -> None:
        """Send the request, and wait until its job has finished."""
        self.click("#run")
        self.ended()

    def ended(self) -> None:
        idle = "return document.getElementById('stop').hidden"
        eventually(lambda: self.browser.run(idle), "the answer's end")

    def source(self, language: str) -> str:
        self.click(f"input[value={language}]")
        return self.browser.text("#source")


@pytest.fixture(scope="module")
def play(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    queue = f"q-{uuid.uuid4().hex[:12]}"
    path: Path = tmp_path_factory.mktemp("gateway") / "keys.json"
    keys = write_keys(path, acme={"tenant": "acme"})
    with (
        running_worker(worker_config(valkey_url, queue, model="echo:5")),
        gateway(valkey_url, queue, keys_path=path) as served,
        open_browser() as browser,
    ):
        browser.view(DESKTOP)
        browser.open(f"{served.url}/play")
        eventually(lambda: browser.text("#login"), "the page to ask for a key")
        browser.complaints()  # of the request without a key
        playground = Playground(browser, served, QueueClient(valkey_url, queue), keys["acme"])
        playground.type("key", keys["acme"])
        playground.click("#login button")
        eventually(lambda: browser.text("#request"), "the form")
        yield playground


def test_a_chat_is_streamed_with_its_job_below(play: Playground) -> None:
    play.choose("chat")
    play.type("prompt", "<b>who is there?</b>")
    play.run()
    assert play.browser.text("#output").strip() == "<b>who is there?</b>"
    assert "generated" in play.browser.text("#figures")
    eventually(lambda: play.browser.text("#job-state") == "succeeded", "the job's end")
    events = [row[2] for row in play.browser.rows("timeline")]
    assert events[0] == "submitted"
    assert events[-1] == "succeeded"
    assert "tenant acme" in play.browser.text("#job-facts")


def test_a_prompt_without_a_chat(play: Playground) -> None:
    play.choose("prompt")
    play.type("prompt", "as it is")
    play.run()
    assert play.browser.text("#output") == "as it is"


def test_labels_have_bars(play: Playground) -> None:
    play.choose("labels")
    play.type("prompt", "bad or good?")
    play.type("labels", "good, bad")
    play.run()
    assert play.browser.text("#output") == "bad"
    rows = play.browser.rows("bars")
    assert [row[0] for row in rows] == ["good", "bad"]
    assert sum(float(row[2].removesuffix(" %")) for row in rows) == pytest.approx(100, abs=0.2)
    widths = "return [...document.querySelectorAll('#bars .meter i')].map(bar => parseFloat(bar.style.width))"
    assert sum(play.browser.run(widths)) == pytest.approx(100, abs=0.2)


def test_json_follows_the_schema(play: Playground) -> None:
    play.choose("json")
    play.type("schema", '{"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}')
    play.type("prompt", "count")
    play.run()
    assert json.loads(play.browser.text("#output"))["n"] == 7
    play.type("schema", "{")
    play.click("#run")
    eventually(lambda: "JSON schema" in play.browser.text("#notice"), "the error")
    play.type("schema", '{"type": "objekt"}')
    play.run()
    assert "objekt" in play.browser.text("#notice")
    assert all("/v1/chat/completions" in line for line in play.browser.complaints()), "of the bad request"


def test_a_stopped_request_is_a_cancelled_job(play: Playground) -> None:
    play.choose("chat")
    play.type("prompt", str(uuid.uuid4()) * 100)
    play.type("max-tokens", "2000")
    play.click("#run")
    eventually(lambda: play.browser.text("#output"), "the first text")
    eventually(lambda: "KV blocks" in play.browser.text("#job-facts"), "its blocks")
    play.click("#stop")
    play.ended()
    job_id = play.browser.text("#job-id")
    eventually(lambda: play.client.outcome(job_id).state == "cancelled", "the job's end")
    assert "cancelled" in play.browser.text("#notice")
    play.type("max-tokens", "128")


@pytest.mark.parametrize(
    ("mode", "expected"), [("chat", 'it\'s $HOME "and" more'), ("prompt", "it's $HOME"), ("labels", "bad")]
)
def test_the_sources_make_the_same_request(play: Playground, mode: str, expected: str) -> None:
    """A shell and Python run the code on the page. A quote, a dollar sign and a backslash stay unchanged."""
    play.choose(mode)
    play.type("prompt", 'it\'s $HOME "and" more \\ bad or good?')
    play.type("system", "")
    environment = os.environ | {"PAGEMILL_API_KEY": play.key}

    def output(*command: str) -> str:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    lines = output("sh", "-c", play.source("curl")).splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: {", "{"))]
    pieces = [
        choice.get("text") or choice.get("delta", choice.get("message", {})).get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert expected in "".join(pieces)
    assert expected in output(sys.executable, "-c", play.source("python"))
    typescript = play.source("typescript")
    assert f'baseURL: "{play.served.url}/v1"' in typescript
    assert json.dumps('it\'s $HOME "and" more \\ bad or good?') in typescript


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_each_window(play: Playground, size: tuple[int, int], dark: bool) -> None:
    play.browser.view(size, dark=dark)
    play.choose("json")
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert play.browser.run(wide) <= 0
    background = play.browser.run("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(14, 18, 22)" if dark else "rgb(244, 246, 248)")
    play.browser.view(DESKTOP)


def test_the_key_is_in_no_address_and_can_be_forgotten(play: Playground) -> None:
    assert play.key not in play.browser.run("return location.href + document.documentElement.outerHTML")
    assert play.browser.complaints() == []
    play.click("#leave")
    eventually(lambda: play.browser.text("#login"), "the page to ask for a key")
    assert not play.browser.text("#request")
