"""The live page in a browser: headless Chromium against a worker with jobs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pagemill.producer.wire.calls.job_lists import jobs_page
from pagemill.producer.wire.calls.registry import WorkerInfo, heartbeat
from pagemill.worker.worker import Worker
from tests.worker.browser import DESKTOP, PHONE, Browser, missing, open_browser
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

MARKUP = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


@dataclass
class Scene:
    browser: Browser
    client: QueueClient
    url: str
    worker: Worker


@pytest.fixture(scope="module")
def scene(valkey_url: str) -> Iterator[Scene]:
    """A worker with three finished jobs, one of them failed, and four jobs that run for minutes; its page is open."""
    client = QueueClient(valkey_url, f"q-{uuid.uuid4().hex[:12]}")
    config = worker_config(
        valkey_url, client.queue, model="echo:100", num_kv_blocks=1000, max_num_seqs=4, show_prompts=True
    )
    with running_worker(config) as worker, open_browser() as browser:
        client.wait(
            client.submit(
                {"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 1}, {"prompt": "x" * 5000}
            )
        )
        client.submit(*({"prompt": MARKUP * 20, "max_tokens": 1500} for _ in range(4)))
        client.submit(*({"prompt": "c", "priority": "low"} for _ in range(7)))
        browser.view(DESKTOP)
        browser.open(str(worker.http_url))
        eventually(lambda: len(browser.rows("jobs")) == 4, "the page to show the jobs")
        eventually(lambda: browser.text("#map-note"), "the block map, a second later")
        yield Scene(browser, client, str(worker.http_url), worker)
        client.cancel(*(job.job_id for job in worker.table.running()))
    client.redis.close()


def test_the_figures_are_there(scene: Scene) -> None:
    browser = scene.browser
    assert browser.text("#model") == "echo"
    assert browser.text("#state") == "ready"
    assert browser.text("#running") == "4"
    eventually(lambda: browser.text("#depth") == "7", "the queue's depth")
    eventually(lambda: browser.text("#rate").isdigit(), "tokens per second")
    assert browser.text("#done") == "2"
    assert "1 failed" in browser.text("#done-sub")


def test_the_legend_counts_every_block(scene: Scene) -> None:
    def counts() -> dict[str, int]:
        words = scene.browser.text("#legend").split()
        return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}

    eventually(lambda: counts()["shared"] > 0, "blocks that the four prompts share")
    assert set(counts()) == {"active", "shared", "cached", "free", "reserved"}
    assert sum(counts().values()) == 1000
    assert scene.browser.text("#map-note") == "1,000 blocks"


def test_every_block_is_a_cell_of_its_state_s_color(scene: Scene) -> None:
    """The first cell is the null block; its color is that of reserved ones, and the end of the pool is free."""
    color, reserved = scene.browser.run(
        "const canvas = document.getElementById('blocks'), pen = canvas.getContext('2d');"
        "const probe = document.createElement('canvas').getContext('2d');"
        "probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--reserved');"
        "probe.fillRect(0, 0, 4, 4);"
        "return [[...pen.getImageData(6, 6, 1, 1).data], [...probe.getImageData(1, 1, 1, 1).data]];"
    )
    assert color == reserved
    used = scene.browser.run(
        "const canvas = document.getElementById('blocks');"
        "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        "const seen = new Set();"
        "for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.add(data.slice(i, i + 3).join());"
        "return seen.size;"
    )
    assert used >= 4, "reserved, shared, active and free"


def test_jobs_move(scene: Scene) -> None:
    def generated() -> int:
        return int(scene.browser.rows("jobs")[0][3].split("/")[0].replace(",", ""))

    eventually(lambda: scene.browser.rows("jobs")[0][1] == "decode", "the first job to decode")
    before = generated()
    eventually(lambda: generated() > before, "progress")


def test_what_went_wrong_is_told_apart(scene: Scene) -> None:
    ends = [row[1] for row in scene.browser.rows("ends")]
    assert sorted(ends) == ["failed", "succeeded", "succeeded"]
    (error,) = scene.browser.rows("errors")
    assert "prompt_too_long" in error[2]


def test_markup_in_a_prompt_is_text(scene: Scene) -> None:
    assert MARKUP[:40] in scene.browser.rows("jobs")[0][2]
    assert scene.browser.run("return document.querySelectorAll('td img, td script').length") == 0
    assert "owned" not in scene.browser.run("return document.title")


def test_the_charts_are_drawn(scene: Scene) -> None:
    for name in ("kv", "rate", "seq", "depth"):
        inked = scene.browser.run(
            f"const canvas = document.getElementById('chart-{name}');"
            "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
            "return data.some((value, index) => index % 4 === 3 && value > 0);"
        )
        assert inked, name


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_it_fits_desk_and_phone_in_light_and_dark(scene: Scene, size: tuple[int, int], dark: bool) -> None:
    browser = scene.browser
    browser.view(size, dark=dark)
    browser.check_fits(dark=dark)
    assert all(len(row) == 6 for row in browser.rows("jobs"))


def test_the_theme_can_be_chosen_and_is_remembered(scene: Scene) -> None:
    browser = scene.browser
    browser.view(DESKTOP)
    for name in ("light", "dark"):
        browser.run("document.getElementById('theme').click()")
        assert browser.text("#theme") == name
    browser.open(scene.url)
    assert browser.run("return document.documentElement.dataset.theme") == "dark"
    browser.run("document.getElementById('theme').click()")


def test_a_cell_tells_its_block(scene: Scene) -> None:
    eventually(lambda: scene.browser.text("#map-note"), "the map")
    scene.browser.run(
        "document.getElementById('blocks').dispatchEvent("
        "new PointerEvent('pointermove', {bubbles: true, clientX: 0, clientY: 0}));"
        "const canvas = document.getElementById('blocks'), box = canvas.getBoundingClientRect();"
        "canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 4, clientY: box.top + 4}));"
    )
    assert scene.browser.text("#block-tip") == "block 0: reserved"


def test_a_pool_of_any_size_is_laid_out_whole(scene: Scene) -> None:
    """Smaller cells first; a cell represents several blocks only if there are more blocks than cells."""
    sizes = [2, 600, 20_000, 100_000, 300_000, 3_000_000]
    plans = scene.browser.driver.execute_async_script(
        "const [sizes, done] = arguments;"
        "import('/live/blocks.js').then(map => done(sizes.map(size => map.layout(size, 1300))));",
        sizes,
    )
    for blocks, plan in zip(sizes, plans, strict=True):
        assert plan["columns"] * plan["rows"] * plan["group"] >= blocks
        assert plan["columns"] * plan["size"] <= 1300
        assert plan["rows"] * plan["size"] <= 900
    assert [plan["group"] for plan in plans[:4]] == [1] * 4
    assert plans[-1]["group"] > 1


def test_ids_are_whole_and_lead_to_the_page_of_jobs(scene: Scene) -> None:
    ids = {job.job_id for job in scene.worker.table.running()}
    assert {row[0] for row in scene.browser.rows("jobs")} == ids
    assert not scene.browser.text("#jobs-link"), "there is no gateway"
    scene.client.run(jobs_page(scene.client.queue, "javascript:document.title='owned'//", 60_000))
    time.sleep(2.5)  # the states of two seconds
    assert scene.browser.run("return document.querySelectorAll('#jobs td a, #ends td a').length") == 0
    scene.client.run(jobs_page(scene.client.queue, "http://127.0.0.1:8000/jobs", 60_000))
    eventually(lambda: scene.browser.text("#jobs-link"), "the link to the page of jobs")
    links = scene.browser.run("return [...document.querySelectorAll('#jobs td a')].map(link => link.href)")
    assert set(links) == {f"http://127.0.0.1:8000/jobs#job/{job_id}" for job_id in ids}


def test_the_other_workers_are_linked_to(scene: Scene) -> None:
    assert not scene.browser.text("#workers-card"), "no other worker lives"
    for worker in (
        WorkerInfo(id=MARKUP[:60], models=("echo",), url="http://10.0.0.7:9790", running=3),
        WorkerInfo(id="w-evil", models=(), url="javascript:document.title='owned'"),
        WorkerInfo(id="w-broken", models=(), url="http://[:x", state="loading"),
    ):
        scene.client.run(heartbeat(scene.client.queue, worker, ttl_ms=300_000))
    eventually(lambda: len(scene.browser.rows("workers")) == 4, "the others")
    assert any("(this one)" in row[0] for row in scene.browser.rows("workers"))
    links = scene.browser.run("return [...document.querySelectorAll('#workers a')].map(link => link.href)")
    assert sorted(links) == sorted([f"{scene.url}/", "http://10.0.0.7:9790/"])


def test_the_browser_had_nothing_to_complain_of(scene: Scene) -> None:
    """Neither errors nor violations of the page's policy."""
    assert scene.browser.complaints() == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_what_went_wrong_stays_in_sight_beside_64_jobs(size: tuple[int, int], client: QueueClient) -> None:
    config = worker_config(client.url, client.queue, model="echo:200", num_kv_blocks=8000, max_num_seqs=64)
    with running_worker(config) as worker, open_browser() as browser:
        (bad,) = client.submit({"prompt": "x" * 5000})
        client.wait([bad])
        ids = client.submit(*({"prompt": "long " * 100, "max_tokens": 500} for _ in range(64)))
        browser.view(size)
        browser.open(str(worker.http_url))
        eventually(lambda: len(browser.rows("jobs")) == 64, "all the jobs")
        top = "document.getElementById('errors').getBoundingClientRect()"
        if size == PHONE:  # above the jobs
            assert browser.run(
                f"return {top}.bottom <= document.getElementById('jobs').getBoundingClientRect().top"
            )
        else:  # next to them, down to the last
            browser.run("document.querySelectorAll('#jobs tbody tr')[60].scrollIntoView({block: 'end'})")
            assert browser.run(f"return {top}.top >= 0 && {top}.bottom <= innerHeight")
        assert bad in browser.text("#errors").replace("\n", "")
        client.cancel(*ids)


def test_a_worker_that_goes_is_noticed_and_its_return_too(valkey_url: str, queue_name: str) -> None:
    config = worker_config(valkey_url, queue_name)
    with open_browser() as browser:
        with running_worker(config) as worker:
            port = int(str(worker.http_url).rpartition(":")[2])
            browser.view(DESKTOP)
            browser.open(str(worker.http_url))
            eventually(lambda: browser.text("#state") == "ready", "the page")
        eventually(lambda: "No news" in browser.text("#notice"), "the page to say that nobody answers")
        with running_worker(config.model_copy(update={"http_port": port})):
            eventually(lambda: not browser.text("#notice"), "the page to come back by itself")
