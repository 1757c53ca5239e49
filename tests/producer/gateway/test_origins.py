"""Pages of other origins, in a browser on the gateway's machine."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.producer.gateway.serving import Served, gateway, write_keys
from tests.worker.harness import PATIENCE_S, eventually

ASK = {"model": "echo", "prompt": "x", "max_tokens": 2}
FORM: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("x", b"{}")}}
BATCH = "batch_" + "0" * 24
CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/files", FORM),
    ("DELETE", "/files/file-" + "0" * 24, {}),
    ("POST", "/batches", {"json": {}}),
    ("POST", f"/batches/{BATCH}/cancel", {}),
    ("POST", "/completions", {"json": ASK}),
    (
        "POST",
        "/chat/completions",
        {"json": {"model": "echo", "messages": [{"role": "user", "content": "x"}]}},
    ),
]
"""Every route that changes state."""


def ask(served: Served, method: str, path: str, headers: dict[str, str], **body: Any) -> httpx.Response:
    with httpx.Client(base_url=served.base_url, timeout=PATIENCE_S) as client:
        return client.request(method, path, headers=headers, **body)


def code(answer: httpx.Response) -> Any:
    return answer.json().get("error", {}).get("code")


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://localhost:3000"},
        {"sec-fetch-site": ""},
        {"origin": "https://evil.example"},
        {"origin": "http://localhost"},
        {"origin": "http://localhost:1"},
        {"origin": "null"},
        {"origin": ""},
    ],
    ids=str,
)
def test_foreign_pages_change_nothing(
    served: Served, method: str, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    answer = ask(served, method, path, headers, **body)
    assert (answer.status_code, code(answer)) == (403, "cross_origin")


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
def test_our_own_pages_and_what_is_no_browser_are_served(
    served: Served, method: str, path: str, body: dict[str, Any]
) -> None:
    for name in (f"127.0.0.1:{served.port}", f"localhost:{served.port}", f"LOCALHOST:{served.port}"):
        for headers in (
            {"origin": f"http://{name.lower()}"},
            {"origin": f"http://{name.lower()}", "sec-fetch-site": "same-origin"},
            {"sec-fetch-site": "none"},
            {},
        ):
            answer = ask(served, method, path, {"host": name} | headers, **body)
            assert answer.status_code != 403, answer.text


def test_foreign_pages_may_read_what_they_cannot_see(served: Served) -> None:
    """The browser hides the response from them: no header permits access."""
    answer = ask(served, "GET", "/models", {"origin": "https://evil.example", "sec-fetch-site": "cross-site"})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    asked = ask(served, "OPTIONS", "/files", {"origin": "https://evil.example"})
    assert asked.status_code == 405
    assert not [name for name in asked.headers if name.startswith("access-control-")]


def test_with_a_key_the_origin_does_not_matter(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", web={"tenant": "web"})
    with gateway(valkey_url, queue_name, keys_path=tmp_path / "keys.json") as served:
        headers = {"origin": "https://shop.example", "sec-fetch-site": "cross-site"}
        assert ask(served, "POST", "/files", headers, **FORM).status_code == 401
        headers["authorization"] = f"Bearer {keys['web']}"
        assert ask(served, "POST", "/files", headers, **FORM).status_code == 200


def test_without_keys_but_for_everybody_foreign_pages_are_refused_too(
    valkey_url: str, queue_name: str
) -> None:
    with gateway(valkey_url, queue_name, host="0.0.0.0") as served:
        headers = {"host": "models.example", "origin": "https://evil.example"}
        assert code(ask(served, "POST", "/files", headers, **FORM)) == "cross_origin"
        headers["origin"] = "https://models.example"
        assert ask(served, "POST", "/files", headers, **FORM).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "text/json", "multipart/form-data"]
)
def test_what_a_form_can_send_is_no_json(served: Served, kind: str) -> None:
    for path in ("/completions", "/chat/completions", "/batches", f"/batches/{BATCH}/cancel"):
        answer = ask(
            served, "POST", path, {"content-type": kind}, content=b'{"model": "echo", "prompt": "x"}'
        )
        assert (answer.status_code, code(answer)) == (415, "unsupported_media_type"), path
    for kind in ("application/json", "text/plain"):
        assert ask(served, "POST", "/files", {"content-type": kind}, content=b"{}").status_code == 415
    assert ask(served, "POST", f"/batches/{BATCH}/cancel", {}).status_code == 404, "it needs no body"


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost", True), ("LOCALHOST:8000", True), ("127.0.0.1", True), ("127.0.0.1:1", True), ("[::1]", True),
        ("[::1]:1", True), ("localhost.", False), ("localhost.:8000", False), ("evil@localhost", False),
        ("localhost@evil", False), ("localhost:80@evil", False), ("127.0.0.1#@evil", False), ("localhost/evil", False),
        ("localhost?evil", False), ("localhost:evil", False), ("localhost:", False), ("localhost:999999", False),
        ("localhost evil", False), ("localhost,evil", False), ("localhost.evil.example", False), ("xlocalhost", False),
        ("127.0.0.1.nip.io", False), ("127.1", False), ("0.0.0.0", False), ("2130706433", False), ("::1", False),
        ("[::1", False), ("[::1]evil", False), ("[::ffff:127.0.0.1]", False), ("evil.example", False), ("", False),
    ],
)  # fmt: skip
def test_host_names(served: Served, host: str, is_ours: bool) -> None:
    answer = served.ask(f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    assert answer.split(b" ", 2)[1] == (b"200" if is_ours else b"403")


@pytest.fixture(autouse=True)
def serving(served: Served) -> None:
    eventually(lambda: ask(served, "POST", "/completions", {}, json=ASK).status_code == 200, "the gateway")


@pytest.mark.parametrize("path", ["/chat/completions", "/files"])
def test_a_compressed_body_is_named_as_such(valkey_url: str, queue_name: str, path: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    with gateway(valkey_url, queue_name, models=("m",)) as served:
        answer = ask(served, "POST", path, headers, content=gzip.compress(b"{}"))
        assert (answer.status_code, code(answer)) == (415, "unsupported_media_type")
        assert "gzip" in answer.json()["error"]["message"]
        identity = ask(
            served, "POST", "/chat/completions", headers | {"content-encoding": "identity"}, content=b"{}"
        )
        assert identity.status_code == 400
