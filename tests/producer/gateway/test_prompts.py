"""One request of many prompts: how many requests it counts as, and how much it may store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from pagemill.producer.gateway.config import MIB
from tests.producer.driving import Queue, open_queue
from tests.producer.gateway.serving import Served, gateway, write_keys
from tests.worker.harness import PATIENCE_S

ENTRIES: dict[str, dict[str, Any]] = {
    "slow": {"tenant": "slow", "rate": 0.01, "burst": 10},
    "free": {"tenant": "free"},
}


@pytest.fixture
def made(tmp_path: Path, valkey_url: str, queue_name: str) -> Iterator[tuple[Served, dict[str, str], Queue]]:
    """No worker serves the model: admitted requests wait until they time out."""
    path = tmp_path / "keys.json"
    keys = write_keys(path, **ENTRIES)
    with (
        open_queue(valkey_url, queue_name) as queue,
        gateway(valkey_url, queue_name, keys_path=path, models=("m",), timeout_s=0.4) as served,
    ):
        yield served, keys, queue


def post(served: Served, key: str, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{served.base_url}/completions",
        json={"model": "m"} | fields,
        headers={"authorization": f"Bearer {key}"},
        timeout=PATIENCE_S,
    )


def stored(queue: Queue) -> int:
    """Number of jobs."""
    return len(payload_sizes(queue))


def code(answer: httpx.Response) -> str:
    found: str = answer.json()["error"]["code"]
    return found


@pytest.mark.slow
def test_each_prompt_counts_as_a_request(made: tuple[Served, dict[str, str], Queue]) -> None:
    served, keys, queue = made
    for prompts, status in ((["a"] * 6, 504), (["a"] * 5, 429), ([[1, 2]] * 5, 429)):
        answer = post(served, keys["slow"], prompt=prompts)
        assert answer.status_code == status, answer.text
    assert code(answer) == "rate_limit_exceeded"
    assert 80 <= int(answer.headers["retry-after"]) <= 101, "one is missing, and comes in 100 s"
    assert answer.headers["x-ratelimit-remaining-requests"] == "4"
    assert stored(queue) == 6, "a request is let in as a whole or not at all"
    assert post(served, keys["slow"], prompt=["a"] * 4, stream=True).status_code == 504
    assert post(served, keys["slow"], prompt="a").status_code == 429
    assert stored(queue) == 10


@pytest.mark.slow
def test_samples_and_token_ids_are_of_one_prompt(made: tuple[Served, dict[str, str], Queue]) -> None:
    served, keys, _ = made
    for fields in ({"prompt": "a", "n": 100}, {"prompt": list(range(100))}, {"prompt": ["a"]}):
        assert post(served, keys["slow"], **fields).status_code == 504
    assert post(served, keys["slow"], prompt=["a"] * 7).status_code == 504
    assert post(served, keys["slow"], prompt="a").status_code == 429


@pytest.mark.slow
def test_more_prompts_than_the_bucket_ever_holds(made: tuple[Served, dict[str, str], Queue]) -> None:
    """Waiting would not help, so the response does not suggest it."""
    served, keys, queue = made
    answer = post(served, keys["slow"], prompt=["a"] * 11)
    assert (answer.status_code, code(answer)) == (400, "too_many_prompts")
    assert answer.json()["error"]["param"] == "prompt"
    assert "10" in answer.json()["error"]["message"]
    assert "retry-after" not in answer.headers
    assert stored(queue) == 0
    assert post(served, keys["slow"], prompt=["a"] * 9).status_code == 504, "it counted as one"


@pytest.mark.slow
def test_a_key_without_a_rate_asks_for_many(made: tuple[Served, dict[str, str], Queue]) -> None:
    served, keys, queue = made
    assert post(served, keys["free"], prompt=["a"] * 128).status_code == 504
    assert stored(queue) == 128
    assert post(served, keys["free"], prompt=["a"] * 129).status_code == 400


def settings(size: int, letter: str = "c") -> dict[str, Any]:
    """Return a prompt of about this many bytes."""
    width = len(letter.encode())
    return {"structured_outputs": {"choice": [letter * (1000 // width) for _ in range(size // 1003)]}}


@pytest.mark.parametrize("letter", ["c", "\u4e2d", '"'])
@pytest.mark.parametrize("stream", [False, True])
def test_settings_are_counted_with_each_prompt(
    made: tuple[Served, dict[str, str], Queue], letter: str, stream: bool
) -> None:
    served, keys, queue = made
    answer = post(served, keys["free"], prompt=["x"] * 128, stream=stream, **settings(MIB // 2, letter))
    assert (answer.status_code, code(answer)) == (413, "request_too_large"), answer.text
    assert answer.json()["error"]["param"] == "prompt"
    assert stored(queue) == 0


def schema(text: str) -> dict[str, Any]:
    """A prompt that is stored as text, in which quotes and non-ASCII characters need more space."""
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [text]}}}
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "letter"),
    [
        (["x" * 10] * 128, '"'),
        (["x" * 7000] * 128, "c"),
        ([[1] * 3000] * 100, "\x01"),
        (["\u4e2d"] * 50, "\u4e2d"),
    ],
    ids=["quotes", "prompts", "ids", "letters"],
)
def test_what_is_let_in_is_no_larger_than_that(
    made: tuple[Served, dict[str, str], Queue], prompts: list[Any], letter: str
) -> None:
    """A size just below the limit is admitted, and one slightly above it is not."""
    served, keys, queue = made
    assert post(served, keys["free"], prompt=prompts[0], **schema(letter * 1000)).status_code == 504
    assert post(served, keys["free"], prompt=prompts[0], **schema(letter * 2000)).status_code == 504
    one, other = sorted(payload_sizes(queue))
    fits = int(1000 * (4 * MIB / len(prompts) - one) / (other - one)) + 1000 - 100
    clear(queue)
    assert post(served, keys["free"], prompt=prompts, **schema(letter * fits)).status_code == 504
    assert 3.5 * MIB < sum(payload_sizes(queue)) <= 4 * MIB
    clear(queue)
    answer = post(served, keys["free"], prompt=prompts, **schema(letter * (fits + 200)))
    assert (answer.status_code, code(answer)) == (413, "request_too_large")
    assert stored(queue) == 0


def payload_sizes(queue: Queue) -> list[int]:
    return [queue.client.strlen(queue.prefix + name) for name in queue.names() if name.startswith("in:")]


def clear(queue: Queue) -> None:
    for name in queue.names():
        queue.client.delete(queue.prefix + name)


@pytest.mark.slow
def test_one_prompt_may_have_large_settings(made: tuple[Served, dict[str, str], Queue]) -> None:
    served, keys, _ = made
    assert post(served, keys["free"], prompt=["x"], **settings(900_000)).status_code == 504
    large = post(served, keys["free"], prompt="x" * 500_000, **settings(700_000))
    assert (large.status_code, code(large)) == (413, "payload_too_large")


@pytest.mark.slow
def test_the_idempotency_key_is_counted_with_each_prompt(
    made: tuple[Served, dict[str, str], Queue],
) -> None:
    served, keys, _ = made
    choices = ["c" * 1000] * 32 + ["c" * 400]
    body = {"model": "m", "prompt": ["x"] * 128, "structured_outputs": {"choice": choices}}
    for key, status in (("k", 504), ("k" * 250, 413)):
        headers = {"authorization": f"Bearer {keys['free']}", "idempotency-key": key}
        answer = httpx.post(f"{served.base_url}/completions", json=body, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == status, answer.text


@pytest.mark.slow
def test_the_client_waits_as_it_is_told(tmp_path: Path, valkey_queue: Queue) -> None:
    """openai's client repeats a request after `retry-after`, and is then admitted."""
    path = tmp_path / "keys.json"
    keys = write_keys(path, brisk={"rate": 2, "burst": 4})
    with (
        gateway(valkey_queue.url, valkey_queue.name, keys_path=path, models=("m",), timeout_s=0.2) as served,
        OpenAI(base_url=served.base_url, api_key=keys["brisk"], max_retries=0) as client,
    ):
        with pytest.raises(Exception, match="deadline"):
            client.completions.create(model="m", prompt=["a"] * 4)
        patient = client.with_options(max_retries=1)
        with pytest.raises(Exception, match="deadline"):
            patient.completions.create(model="m", prompt=["a"] * 4, timeout=PATIENCE_S)
        assert stored(valkey_queue) == 8
