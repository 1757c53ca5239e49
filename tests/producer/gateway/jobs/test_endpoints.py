"""The jobs page over HTTP: permissions to see and stop jobs, and the responses to pages of other origins."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagemill.producer.wire.calls import batches as batch_calls
from pagemill.producer.wire.calls.job_lists import jobs_page
from tests.producer.driving import Queue, open_queue
from tests.producer.gateway.serving import Served, gateway, write_keys
from tests.worker.harness import eventually

SECRET = "the-prompt-nobody-may-see"
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def jobs(valkey_url: str) -> Iterator[Queue]:
    """Two tenants with a job of each kind, and no worker."""
    queue = open_queue(valkey_url, f"q-{uuid.uuid4().hex[:12]}")
    for tenant in ("acme", "other"):
        fields: dict[str, Any] = {"tenant": tenant, "prompt": SECRET}
        queue.submit(f"{tenant}-dead", f"{tenant}-failed", **fields)
        dead, failed = queue.pull()
        queue.fail(dead, "dead")
        queue.fail(failed)
        queue.submit(f"{tenant}-runs", **fields)
        queue.pull_one()
    for tenant in ("acme", "other"):
        fields = {"tenant": tenant, "prompt": SECRET}
        queue.submit(f"{tenant}-waits", **fields, idempotency_key="order-1", metadata={"note": MARKUP})
        queue.submit(*(f"{tenant}-b{i}" for i in range(3)), batch_id=f"{tenant}-batch", **fields)
    yield queue
    queue.transport.close()


@pytest.fixture(scope="module")
def keyed(
    jobs: Queue, valkey_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, dict[str, str]]]:
    path: Path = tmp_path_factory.mktemp("gateway") / "keys.json"
    keys = write_keys(
        path,
        acme={"tenant": "acme"},
        boss={"tenant": "boss", "operator": True},
        slow={"tenant": "acme", "rate": 0.001, "burst": 2},
        third={"tenant": "third"},
        narrow={"tenant": "acme", "models": ("else",)},
    )
    with gateway(valkey_url, jobs.name, keys_path=path) as served:
        yield served, keys


class Asker:
    def __init__(self, keyed: tuple[Served, dict[str, str]], name: str) -> None:
        served, keys = keyed
        self.url = f"{served.url}/jobs/api"
        self.headers = {"authorization": f"Bearer {keys[name]}"}

    def get(self, path: str, **query: str) -> httpx.Response:
        return httpx.get(f"{self.url}/{path}", params=query, headers=self.headers, timeout=60)

    def post(self, path: str) -> httpx.Response:
        return httpx.post(f"{self.url}/{path}", headers=self.headers, timeout=60)

    def ids(self, **query: str) -> set[str]:
        return {job["id"] for job in self.get("list", **query).json()["jobs"]}


@pytest.fixture
def acme(keyed: tuple[Served, dict[str, str]]) -> Asker:
    return Asker(keyed, "acme")


@pytest.fixture
def boss(keyed: tuple[Served, dict[str, str]]) -> Asker:
    return Asker(keyed, "boss")


PATHS = ["queue", "list", "batches", "job/acme-waits"]
ACTS = ["job/acme-waits/cancel", "job/acme-dead/replay", "batches/acme-batch/cancel"]


@pytest.mark.slow
def test_nothing_is_told_without_a_key(keyed: tuple[Served, dict[str, str]]) -> None:
    for method, paths in (("GET", PATHS), ("POST", ACTS)):
        for path in paths:
            for headers in ({}, {"authorization": "Bearer pm-guess"}, {"cookie": f"key={keyed[1]['boss']}"}):
                answer = httpx.request(method, f"{keyed[0].url}/jobs/api/{path}", headers=headers, timeout=60)
                assert answer.status_code == 401, path
                assert "acme" not in answer.text
    key = keyed[1]["boss"]
    assert httpx.get(f"{keyed[0].url}/jobs/api/queue", params={"key": key, "api_key": key}).status_code == 401


@pytest.mark.slow
def test_a_key_sees_its_own_tenant_s_jobs_alone(acme: Asker, boss: Asker) -> None:
    for state in ("", "queued", "running", "dead", "failed"):
        ids = acme.ids(state=state)
        assert ids, state
        assert all(job_id.startswith("acme-") for job_id in ids), (
            "and no wish for another tenant changes that"
        )
        assert acme.ids(state=state, tenant="other") == ids
        assert {job_id.partition("-")[0] for job_id in boss.ids(state=state)} >= {"acme", "other"}
    assert acme.ids(batch="other-batch") == set()
    assert acme.ids(key="order-1") == {"acme-waits"}
    assert boss.ids(key="order-1") >= {"acme-waits", "other-waits"}
    assert boss.ids(tenant="other", state="running") == {"other-runs"}
    assert [batch["id"] for batch in acme.get("batches").json()["batches"]] == ["acme-batch"]
    assert len(boss.get("batches").json()["batches"]) == 2
    shown = acme.get("queue").json()
    assert {lane["tenant"] for lane in shown["waiting"]} == {"acme"}
    assert not {"counts", "dead", "workers"} & shown.keys()
    assert boss.get("queue").json()["counts"]["running"] >= 2


def test_another_tenant_s_job_is_no_job(acme: Asker, boss: Asker) -> None:
    assert boss.get("job/other-waits").status_code == 200
    for answer in (
        acme.get("job/other-waits"),
        acme.post("job/other-waits/cancel"),
        acme.post("job/other-dead/replay"),
        acme.post("batches/other-batch/cancel"),
    ):
        assert answer.status_code == 404
    nobody, strangers = acme.get("job/nobody").json(), acme.get("job/other-waits").json()
    assert nobody["error"]["message"].replace("nobody", "other-waits") == strangers["error"]["message"]
    assert boss.get("job/other-waits").json()["job"]["state"] == "queued"
    assert boss.get("job/other-dead").json()["job"]["replayed_as"] is None


def test_a_job_is_told_without_its_prompt(acme: Asker) -> None:
    answer = acme.get("job/acme-failed")
    assert answer.headers["cache-control"] == "no-store"
    assert [event["event"] for event in answer.json()["timeline"]] == ["submitted", "started", "failed"]
    job, parts = answer.json()["job"], answer.json()["parts"]
    assert sum(part["seconds"] for part in parts) == pytest.approx(
        job["finished_at"] - job["created_at"], abs=2e-3
    )
    assert all(part["meaning"] for part in parts)
    waits = acme.get("job/acme-waits").json()
    assert waits["metadata"] == {"note": MARKUP}
    assert "no live worker" in waits["note"]
    for path in (*PATHS, "job/acme-dead", "job/acme-runs"):
        assert SECRET not in acme.get(path).text


def test_what_waits_is_cancelled_and_what_died_replayed_once(acme: Asker, jobs: Queue) -> None:
    jobs.submit("acme-extra", tenant="acme")
    assert acme.post("job/acme-extra/cancel").json()["outcome"] == "cancelled"
    assert acme.post("job/acme-extra/cancel").json()["outcome"] == "done"
    assert jobs.state("acme-extra") == "cancelled"
    first, again = (acme.post("job/acme-dead/replay").json() for _ in range(2))
    assert (first["is_new"], again["is_new"]) == (True, False)
    assert first["job"] == again["job"]
    assert acme.get("job/acme-dead").json()["job"]["replayed_as"] == first["job"]
    assert acme.get(f"job/{first['job']}").json()["job"]["tenant"] == "acme"
    refused = acme.post("job/acme-waits/replay")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_replayed")
    jobs.submit("acme-c1", "acme-c2", tenant="acme", batch_id="acme-to-go")
    assert acme.post("batches/acme-to-go/cancel").json()["stopped"] == 2


@pytest.fixture
def mixed(acme: Asker, jobs: Queue) -> Iterator[str]:
    """A batch of both tenants, longer than a page of the cancel; the first job is of `acme`."""
    batch_id = f"mixed-{uuid.uuid4().hex[:8]}"
    for tenant, count in (("acme", 1), ("other", 150), ("acme", 2)):
        ids = [f"{batch_id}-{tenant}-{count}-{number}" for number in range(count)]
        jobs.submit(*ids, batch_id=batch_id, tenant=tenant)
    yield batch_id
    jobs.run(batch_calls.cancel(jobs.name, batch_id, 0))


def test_a_tenant_key_cancels_only_its_own_jobs_of_a_mixed_batch(
    acme: Asker, boss: Asker, jobs: Queue, mixed: str
) -> None:
    assert acme.post(f"batches/{mixed}/cancel").json() == {"id": mixed, "stopped": 3}
    counts = jobs.run(batch_calls.counts(jobs.name, mixed))
    assert counts is not None
    assert (counts.cancelled, counts.queued) == (3, 150)
    assert acme.post(f"batches/{mixed}/cancel").json()["stopped"] == 0
    assert boss.post(f"batches/{mixed}/cancel").json()["stopped"] == 150


def test_a_tenant_key_without_jobs_in_a_mixed_batch_gets_404(
    keyed: tuple[Served, dict[str, str]], jobs: Queue, mixed: str
) -> None:
    third = Asker(keyed, "third")
    assert third.post(f"batches/{mixed}/cancel").status_code == 404
    assert third.post("batches/no-such-batch/cancel").status_code == 404
    counts = jobs.run(batch_calls.counts(jobs.name, mixed))
    assert counts is not None
    assert counts.cancelled == 0


def test_counts_of_a_mixed_batch_are_shown_to_operators_only(acme: Asker, boss: Asker, mixed: str) -> None:
    assert mixed not in {batch["id"] for batch in acme.get("batches").json()["batches"]}
    (shown,) = (batch for batch in boss.get("batches").json()["batches"] if batch["id"] == mixed)
    assert (shown["counts"]["total"], shown["tenant"]) == (153, None)
    assert len(acme.ids(batch=mixed)) == 3


def test_a_key_s_models_and_rate_hold_here_too(keyed: tuple[Served, dict[str, str]]) -> None:
    assert Asker(keyed, "narrow").post("job/acme-dead/replay").json()["error"]["code"] == "model_not_allowed"
    slow = Asker(keyed, "slow")
    assert [slow.get("queue").status_code for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize(
    "query",
    [{"state": MARKUP}, {"tenant": "a:b"}, {"model": "\n"}, {"batch": "a b"}, {"key": "x" * 1025}, {"after": "x"},
     {"state": "queued", "after": "x~y"}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(acme: Asker, query: dict[str, str]) -> None:
    assert acme.get("list", **query).status_code == 400


@pytest.mark.parametrize("job_id", [MARKUP, "%00", "a" * 65, "..%2f..", "*", "\u00e9"])
def test_an_id_that_can_be_none_is_no_job(acme: Asker, job_id: str) -> None:
    answer = acme.get(f"job/{job_id}")
    assert answer.status_code in (400, 404)
    assert answer.headers["content-type"] == "application/json"


def test_actions_are_logged_with_the_key_s_name_and_no_key(
    keyed: tuple[Served, dict[str, str]], acme: Asker, jobs: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.submit("acme-logged", tenant="acme")
    with caplog.at_level(logging.DEBUG):
        acme.post("job/acme-logged/cancel")
        acme.get("list", key="order-1")
    (line,) = [record for record in caplog.records if record.msg == "page of jobs"]
    assert (line.__dict__["action"], line.__dict__["key_name"], line.__dict__["id"]) == (
        "cancel",
        "acme",
        "acme-logged",
    )
    written = "".join(str(record.__dict__) for record in caplog.records)
    assert keyed[1]["acme"] not in written
    assert SECRET not in written


@pytest.mark.slow
def test_the_page_and_its_files_hold_no_data_and_a_strict_policy(
    keyed: tuple[Served, dict[str, str]],
) -> None:
    served, _ = keyed
    names = (
        "index", "page.css", "jobs.css", "jobs.js", "asking.js", "tables.js", "rows.js", "theme.js",
        "icon.svg",
    )  # fmt: skip
    for name in names:
        url = f"{served.url}/jobs" if name == "index" else f"{served.url}/jobs/files/{name}"
        answer = httpx.get(url)
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200, name
        assert "default-src 'none'" in policy
        assert "form-action 'none'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "innerHTML" not in answer.text
        assert "acme" not in answer.text
    page = httpx.get(f"{served.url}/jobs").text
    assert "//" not in page, "it names no other place"
    assert "<script>" not in page
    for name in ("page.js", "..%2fapp", "endpoints.py", "index.html.bak", ""):
        assert httpx.get(f"{served.url}/jobs/files/{name}").status_code == 404


@pytest.mark.slow
def test_without_keys_it_is_this_machine_s_and_no_other_page_acts_on_it(valkey_url: str, jobs: Queue) -> None:
    jobs.submit("acme-mine", tenant="acme")
    with gateway(valkey_url, jobs.name) as served:
        cancel = f"{served.url}/jobs/api/job/acme-mine/cancel"
        assert httpx.get(f"{served.url}/jobs/api/queue").json()["tenant"] == ""
        for headers in (
            {"origin": "https://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            assert httpx.post(cancel, headers=headers).json()["error"]["code"] == "cross_origin"
        rebound = httpx.get(f"{served.url}/jobs/api/list", headers={"host": "evil.example"})
        assert rebound.json()["error"]["code"] == "host_not_allowed"
        assert "access-control-allow-origin" not in httpx.get(f"{served.url}/jobs/api/queue").headers
        assert httpx.get(cancel).status_code == 405, "nothing happens by a link or an image"
        assert jobs.state("acme-mine") == "queued"
        assert httpx.post(cancel, headers={"sec-fetch-site": "same-origin"}).json()["outcome"] == "cancelled"
    with gateway(valkey_url, jobs.name, host="0.0.0.0") as served:
        for path in PATHS:
            refused = httpx.get(f"{served.url}/jobs/api/{path}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "keys_needed")


def test_live_pages_are_told_where_the_page_is(valkey_url: str, jobs: Queue) -> None:
    assert jobs.run(jobs_page(jobs.name)) == ""
    with gateway(valkey_url, jobs.name, public_url="https://jobs.example/llm/"):
        eventually(lambda: jobs.run(jobs_page(jobs.name)) == "https://jobs.example/llm/jobs", "the address")
    assert jobs.client.pttl(f"{jobs.prefix}jobs_page") > 0, "it is forgotten when no gateway renews it"


def test_where_the_server_denies_scan_the_page_says_so(own_valkey: Any, tmp_path: Path) -> None:
    queue = open_queue(own_valkey.url, "q")
    queue.submit("a")
    queue.client.execute_command("ACL", "SETUSER", "default", "-scan")
    try:
        with gateway(own_valkey.url, "q") as served:
            denied = httpx.get(f"{served.url}/jobs/api/list", params={"state": "failed"})
            assert (denied.status_code, denied.json()["error"]["code"]) == (403, "scan_denied")
            listed = httpx.get(f"{served.url}/jobs/api/list", params={"state": "queued"}).json()
            assert [job["id"] for job in listed["jobs"]] == ["a"]
    finally:
        queue.client.execute_command("ACL", "SETUSER", "default", "+scan")
        queue.transport.close()
    assert json.dumps(listed)
