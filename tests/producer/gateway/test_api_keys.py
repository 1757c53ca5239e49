"""API keys: their jobs, limits and priorities; and the errors for unknown clients."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from typer.testing import CliRunner

from pagemill import Producer
from pagemill.__main__ import app
from pagemill.producer.gateway.api_keys import ApiKeys, KeyFileError, read_keys
from pagemill.producer.wire.calls.metering.quotas import Quota, set_quotas
from tests.producer.driving import Queue
from tests.producer.gateway.serving import Served, gateway, write_keys
from tests.worker.harness import eventually, running_worker, worker_config

ENTRIES: dict[str, dict[str, Any]] = {
    "shop": {"tenant": "shop", "priority": "high"},
    "slow": {"tenant": "slow", "rate": 0.01, "burst": 2},
    "narrow": {"tenant": "narrow", "models": ("other",)},
    "shut": {"tenant": "shut", "disabled": True},
}
ASK = {"model": "m", "prompt": "x"}


@pytest.fixture
def made(
    tmp_path: Path, valkey_url: str, queue_name: str
) -> Iterator[tuple[Served, Served, dict[str, str], Path]]:
    """Two gateways with the same file of keys."""
    path = tmp_path / "keys.json"
    keys = write_keys(path, **ENTRIES)
    with (
        gateway(valkey_url, queue_name, keys_path=path, models=("m",), timeout_s=0.4) as one,
        gateway(valkey_url, queue_name, keys_path=path, models=("m",), timeout_s=0.4) as other,
    ):
        yield one, other, keys, path


def post(served: Served, key: str | None, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(f"{served.base_url}/completions", json=ASK | fields, headers=headers, timeout=60)


def test_probes_and_metrics_need_no_key(tmp_path: Path, valkey_url: str, queue_name: str) -> None:
    write_keys(path := tmp_path / "keys.json", **ENTRIES)
    with gateway(valkey_url, queue_name, keys_path=path) as served:
        for probe in ("healthz", "health", "readyz", "metrics"):
            assert httpx.get(f"{served.url}/{probe}", timeout=60).status_code == 200
        assert httpx.post(f"{served.url}/health", timeout=60).status_code == 405
        assert httpx.get(f"{served.base_url}/models", timeout=60).status_code == 401


@pytest.mark.slow
def test_a_key_decides_whose_job_it_is(
    made: tuple[Served, Served, dict[str, str], Path], valkey_url: str, queue_name: str
) -> None:
    one, other, keys, path = made
    assert post(one, None).json()["error"]["code"] == "missing_api_key"
    assert post(one, "pm-guess").status_code == 401
    assert post(one, "pm-guess").headers["www-authenticate"] == "Bearer"
    assert post(one, keys["shut"]).status_code == 403
    assert post(one, keys["narrow"]).json()["error"]["code"] == "model_not_allowed"
    assert httpx.get(f"{one.base_url}/files").status_code == 401
    assert post(one, keys["shop"]).status_code == 504  # admitted without a worker, and waiting

    with Producer(valkey_url, queue=queue_name) as producer:
        found = producer._connected().transport.client.keys(f"pagemill:{{{queue_name}}}:job:*")
        (status,) = producer.statuses([key.decode().rpartition(":")[2] for key in found])
        assert (status.tenant, status.priority, status.state) == ("shop", "high", "expired")

    # The bucket belongs to the queue: two requests together, on either gateway.
    statuses = [post(served, keys["slow"]).status_code for served in (one, other, one, other)]
    assert statuses == [504, 504, 429, 429]
    refused = post(other, keys["slow"])
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 101
    client = OpenAI(base_url=one.base_url, api_key=keys["slow"], max_retries=0)
    with client, pytest.raises(openai.RateLimitError):
        client.models.list()

    # A new file is read at runtime; a broken one changes nothing.
    path.write_text("{torn")
    assert post(one, keys["shut"]).status_code == 403
    rows = json.loads(json.dumps({"keys": [row.model_dump(mode="json") for row in _entries(path, keys)]}))
    path.write_text(json.dumps(rows))
    eventually(lambda: post(one, keys["shut"]).status_code == 504, "the key that is open again")


def _entries(path: Path, keys: dict[str, str]) -> list[Any]:
    write_keys(path, **(ENTRIES | {"shut": {"tenant": "shut"}}))
    found = {key.name: key for key in read_keys(path).values()}
    from pagemill.producer.gateway.api_keys import digest

    return [found[name].model_copy(update={"sha256": digest(keys[name])}) for name in found]


NO_HASH = "0" * 64


@pytest.mark.parametrize(
    "rows",
    [
        "torn",
        [{"name": "a", "sha256": "short"}],
        [{"name": "a b", "sha256": NO_HASH}],
        [{"name": "a", "sha256": NO_HASH, "rate": 0}],
        [{"name": "a", "sha256": NO_HASH}, {"name": "b", "sha256": NO_HASH}],
    ],
)
def test_a_file_that_makes_no_sense_is_refused_at_start(tmp_path: Path, rows: Any) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": rows}))
    with pytest.raises(KeyFileError, match=r"keys\.json"):
        ApiKeys(path)


def test_the_command_makes_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = CliRunner().invoke(app, ["gateway-key", "shop", "--rate", "5", "--keys", str(path)])
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = ApiKeys(path).identify(f"Bearer {key}")
    assert (found.name, found.tenant, found.rate) == ("shop", "shop", 5.0)
    assert CliRunner().invoke(app, ["gateway-key", "shop", "--keys", str(path)]).exit_code == 2


def test_beyond_this_machine_keys_are_asked_for() -> None:
    refused = CliRunner().invoke(app, ["gateway", "--host", "0.0.0.0", "--redis-url", "redis://127.0.0.1:1"])
    assert refused.exit_code == 2
    assert "--keys" in refused.stderr


@pytest.mark.slow
def test_what_is_left_of_a_quota_is_in_the_answer_and_the_ledger_knows_the_key(
    tmp_path: Path, valkey_queue: Queue
) -> None:
    path = tmp_path / "keys.json"
    keys = write_keys(path, web={"tenant": "shop"}, other={"tenant": "free"})
    valkey_queue.run(set_quotas(valkey_queue.name, {"shop": Quota(jobs_per_day=5, tokens_per_minute=10**6)}))
    ask = {"model": "echo", "prompt": "hello", "max_tokens": 5}
    with (
        running_worker(worker_config(valkey_queue.url, valkey_queue.name, model="echo")),
        gateway(valkey_queue.url, valkey_queue.name, keys_path=path, models=("echo",)) as served,
        OpenAI(base_url=served.base_url, api_key=keys["web"], max_retries=0) as client,
    ):
        told = [client.completions.with_raw_response.create(**ask).headers for _ in range(2)]
        streamed = post(served, keys["web"], **ask, stream=True)
        without = post(served, keys["other"], **ask)
        lines = [{"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": ask}]
        file = client.files.create(file=("in.jsonl", json.dumps(lines[0]).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch's end")
    assert [headers["x-ratelimit-limit-requests"] for headers in told] == ["5", "5"]
    assert [headers["x-ratelimit-remaining-requests"] for headers in told] == ["5", "4"]
    assert float(told[1]["x-ratelimit-reset-requests"].removesuffix("s")) <= 86_400
    assert told[1]["x-ratelimit-limit-tokens"] == "1000000"
    assert 0 < int(told[1]["x-ratelimit-remaining-tokens"]) <= 10**6
    assert streamed.headers["x-ratelimit-remaining-requests"] == "3"
    assert not [name for name in without.headers if name.startswith("x-ratelimit")]
    with Producer(valkey_queue.url, queue=valkey_queue.name) as producer:
        rows = [(row.tenant, row.api_key, row.jobs, row.completion_tokens) for row in producer.usage()]
    assert rows == [("free", "other", 1, 5), ("shop", "web", 4, 20)]
