"""The jobs page in a browser: headless Chromium, a gateway with keys, and hostile jobs."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagemill.producer.wire.calls import registry, transitions
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.schema.outputs import ErrorInfo
from tests.producer.driving import DECODE, Queue, delta, open_queue
from tests.producer.gateway.serving import Served, gateway, write_keys
from tests.worker.browser import DESKTOP, PHONE, Browser, missing, open_browser
from tests.worker.harness import eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

MARKUP = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
LONG_ID = "j" * 64


@dataclass
class Scene:
    browser: Browser
    queue: Queue
    served: Served
    keys: dict[str, str]

    def type(self, field: str, text: str) -> None:
        from selenium.webdriver.common.by import By

        found = self.browser.driver.find_element(By.ID, field)
        found.clear()
        found.send_keys(text)

    def click(self, css: str) -> None:
        from selenium.webdriver.common.by import By

        self.browser.driver.find_element(By.CSS_SELECTOR, css).click()

    def go(self, fragment: str) -> None:
        self.browser.run(f"location.hash = {fragment!r}")

    def ids(self) -> list[str]:
        return [row[0] for row in self.browser.rows("jobs")]


def fill(queue: Queue) -> None:
    """Jobs whose keys, metadata, batches, workers and errors all contain markup."""
    for worker in (
        WorkerInfo(id="w-good", models=(MARKUP,), url="http://0.0.0.0:9790", host="gpu1"),
        WorkerInfo(id="w-evil", models=("m",), url="javascript:document.title='owned'", host="x"),
    ):
        queue.run(registry.heartbeat(queue.name, worker, ttl_ms=300_000))
    queue.submit("dead-1", "failed-1", tenant="acme")
    dead, failed = queue.pull(worker=MARKUP)
    error = ErrorInfo(code="engine_error", message=MARKUP).model_dump_json()
    for job, state in ((dead, "dead"), (failed, "failed")):
        queue.run(transitions.commit(queue.name, job.job_id, job.token, state, error_json=error))  # type: ignore[arg-type]
    queue.submit("runs-1", batch_id="b-1", key=MARKUP, metadata={MARKUP: MARKUP}, tenant="acme")
    queue.checkpoint(queue.pull_one(worker="w-good"), delta(0, 1, 2), progress=DECODE)
    queue.submit(LONG_ID, tenant="acme", metadata={"of": MARKUP})
    queue.submit(*(f"w-{i:03d}" for i in range(120)), batch_id="b-1", tenant="other")
    queue.submit("gone-1", tenant="acme")
    queue.cancel("gone-1")


@pytest.fixture(scope="module")
def scene(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    queue = open_queue(valkey_url, f"q-{uuid.uuid4().hex[:12]}")
    fill(queue)
    path: Path = tmp_path_factory.mktemp("gateway") / "keys.json"
    keys = write_keys(path, boss={"operator": True}, acme={"tenant": "acme"})
    with gateway(valkey_url, queue.name, keys_path=path) as served, open_browser() as browser:
        browser.view(DESKTOP)
        scene = Scene(browser, queue, served, keys)
        browser.open(f"{served.url}/jobs")
        eventually(lambda: browser.text("#login"), "the page to ask for a key")
        sign_in(scene, "boss")
        yield scene
    queue.transport.close()


def sign_in(scene: Scene, name: str) -> None:
    scene.type("key", scene.keys[name])
    scene.click("#login button")
    eventually(lambda: scene.browser.text("#tiles"), "the figures")


def test_it_opens_with_what_runs_and_the_queue_s_figures(scene: Scene) -> None:
    scene.go("")
    eventually(lambda: scene.ids() == ["runs-1"], "the running job")
    tiles = scene.browser.text("#tiles").split()
    assert tiles[tiles.index("waiting") + 1] == "121"
    assert tiles[tiles.index("running") + 1] == "1"
    assert scene.browser.text("#tenant") == "all"
    lanes = {row[0]: row[3] for row in scene.browser.rows("lanes")}
    assert lanes == {"acme": "1", "other": "120"}
    # The page requests jobs, metrics and batches sequentially.
    (batch,) = eventually(lambda: scene.browser.rows("batches"), "the batch")
    assert (batch[0], batch[3]) == ("b-1", "0 of 121")


def test_jobs_are_found_by_state_tenant_key_batch_and_id(scene: Scene) -> None:
    def find(**fields: str) -> None:
        scene.go("list?")
        eventually(
            lambda: scene.browser.run("return document.getElementById('f-key').value") == "", "the form"
        )
        for name, text in fields.items():
            if name == "state":
                scene.browser.run(f"document.getElementById('f-state').value = {text!r}")
            else:
                scene.type(f"f-{name}", text)
        scene.click("#filter button")

    find(state="failed")
    eventually(lambda: scene.ids() == ["failed-1"], "the failed job")
    find(state="queued", tenant="acme")
    eventually(lambda: scene.ids() == [LONG_ID], "the tenant's job, its whole id")
    find(key=MARKUP)
    eventually(lambda: scene.ids() == ["runs-1"], "the job of that key")
    find(batch="b-1")
    eventually(lambda: len(scene.ids()) == 50, "a page of the batch")
    scene.click("#more")
    eventually(lambda: len(scene.ids()) == 100, "the next page")
    find(key="dead-1")
    eventually(lambda: scene.browser.text("#job-title") == "dead-1", "the job of that id")
    find(tenant="nobody")
    eventually(lambda: scene.browser.text("#jobs-empty"), "no job at all")


HOLD_THE_LIST = """
const original = window.fetch;
window.held = new Promise((release) => { window.release = release; });
window.state = "";
window.fetch = async (url, options) => {
  const answer = await original(url, options);
  if (!String(url).includes("/list?") || String(url).includes("after=") || window.state) return answer;
  window.state = "held";
  await window.held;
  setTimeout(() => { window.fetch = original; window.state = "seen"; }, 100);
  return answer;
};
document.dispatchEvent(new Event("visibilitychange"));
"""


def test_an_answer_that_was_on_its_way_takes_no_page_away(scene: Scene) -> None:
    def state() -> object:
        return scene.browser.run("return window.state")

    scene.go("list?batch=b-1")
    eventually(lambda: len(scene.ids()) == 50, "a page of the batch")
    scene.browser.run(HOLD_THE_LIST)
    eventually(lambda: state() == "held", "the periodic refresh")
    scene.click("#more")
    eventually(lambda: len(scene.ids()) == 100, "the next page")
    scene.browser.run("window.release()")
    eventually(lambda: state() == "seen", "the answer of the refresh")
    assert len(scene.ids()) == 100


def test_a_job_s_timeline_metadata_and_errors_are_text(scene: Scene) -> None:
    scene.go("job/runs-1")
    eventually(lambda: scene.browser.text("#job-title") == "runs-1", "the job")
    assert [row[2] for row in scene.browser.rows("timeline")] == ["submitted", "started"]
    assert "running" in scene.browser.text("#parts")
    widths = scene.browser.run(
        "return [...document.querySelectorAll('#parts-bar i')].map(part => parseFloat(part.style.width))"
    )
    assert sum(widths) == pytest.approx(100)
    assert MARKUP in scene.browser.text("#metadata").replace('\\"', '"')
    assert MARKUP in scene.browser.text("#job-facts")
    scene.go("job/failed-1")
    eventually(lambda: scene.browser.text("#job-title") == "failed-1", "the other job")
    last = scene.browser.rows("timeline")[-1]
    assert last[2] == "failed"
    assert MARKUP in last[3]
    assert MARKUP in last[4]
    scene.go("job/<img src=x onerror=document.title=1>")
    eventually(lambda: "no job" in scene.browser.text("#notice"), "an id that can be none")
    assert (
        scene.browser.run("return document.querySelectorAll('main img, main script, main iframe').length")
        == 0
    )
    assert scene.browser.run("return document.title") not in ("1", "owned")


def test_only_web_addresses_become_links_to_workers(scene: Scene) -> None:
    eventually(lambda: len(scene.browser.rows("workers")) == 2, "both workers")
    links = scene.browser.run("return [...document.querySelectorAll('#workers a')].map(link => link.href)")
    assert links == ["http://gpu1:9790/"]
    assert {row[0] for row in scene.browser.rows("workers")} == {"w-good", "w-evil"}


def test_cancel_asks_twice_and_ends_the_job(scene: Scene) -> None:
    scene.queue.submit("cancel-me", tenant="acme")
    scene.go("job/cancel-me")
    eventually(lambda: scene.browser.text("#job-actions button") == "cancel", "the button")
    scene.click("#job-actions button")
    assert scene.browser.text("#job-actions button") == "really cancel?"
    assert scene.queue.state("cancel-me") == "queued"
    scene.click("#job-actions button")
    eventually(lambda: scene.queue.state("cancel-me") == "cancelled", "the end")
    eventually(lambda: scene.browser.text("#job-state") == "cancelled", "the page to show it")
    eventually(lambda: not scene.browser.text("#job-actions button"), "no button for what has ended")


def test_a_dead_letter_is_replayed_and_the_replay_shown(scene: Scene) -> None:
    scene.go("list?state=dead")
    eventually(lambda: scene.ids() == ["dead-1"], "the dead job")
    scene.click("#jobs tbody button")
    scene.click("#jobs tbody button")
    eventually(lambda: "replay of" in scene.browser.text("#job-facts"), "the new job")
    new = scene.browser.text("#job-title")
    assert scene.queue.status(new).replay_of == "dead-1"
    scene.go("job/dead-1")
    eventually(lambda: new in scene.browser.text("#job-facts"), "what it was replayed as")
    scene.queue.cancel(new)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("fragment", ["list?state=queued", "job/runs-1"])
def test_it_fits_desk_and_phone_in_light_and_dark(
    scene: Scene, fragment: str, size: tuple[int, int], dark: bool
) -> None:
    browser = scene.browser
    browser.view(size, dark=dark)
    scene.go(fragment)
    shown = "#job-title" if fragment.startswith("job") else "#jobs tbody tr"
    eventually(lambda: browser.text(shown), "the view")
    browser.check_fits(dark=dark)
    browser.view(DESKTOP)


def test_the_key_is_in_no_address_no_cookie_and_no_log(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    key = scene.keys["boss"]
    with caplog.at_level(logging.DEBUG):
        scene.go("list?state=running")
        eventually(lambda: scene.ids() == ["runs-1"], "the list")
    asked = scene.browser.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert asked
    assert all(address.startswith(f"{scene.served.url}/jobs") for address in asked), "nothing from elsewhere"
    assert key not in " ".join([*asked, scene.browser.run("return location.href + document.cookie")])
    assert scene.browser.run("return document.documentElement.outerHTML").count(key) == 0
    assert key not in "".join(str(record.__dict__) for record in caplog.records)


def test_the_browser_had_nothing_to_complain_of_but_what_was_not_there(scene: Scene) -> None:
    """The responses 401 and 404 are on its console; script errors and policy violations are not."""
    others = [
        text
        for text in scene.browser.complaints()
        if "status of 401" not in text and "status of 404" not in text
    ]
    assert others == []


def test_a_forgotten_key_is_gone_and_a_tenant_s_key_sees_its_own(scene: Scene) -> None:
    scene.click("#leave")
    eventually(lambda: scene.browser.text("#login"), "the page to ask again")
    assert scene.browser.run("return sessionStorage.length") == 0
    scene.type("key", "pm-guess")
    scene.click("#login button")
    eventually(lambda: "not known" in scene.browser.text("#notice"), "the refusal")
    sign_in(scene, "acme")
    eventually(lambda: scene.browser.text("#tenant") == "acme", "whose jobs")
    assert {row[0] for row in scene.browser.rows("lanes")} == {"acme"}
    assert not scene.browser.text("#workers-card")
    assert not scene.browser.text("#f-tenant-label")
    scene.go("list?state=queued")
    eventually(lambda: scene.ids() == [LONG_ID], "its one waiting job")
