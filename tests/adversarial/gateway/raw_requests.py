"""Requests as bytes, and random damage to them: headers, bodies, chunks, JSON and forms."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/batches", "/v1/files", "/v1/models", "/healthz",
    "/metrics",
)  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "echo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0.5,
        "stream": False, "n": 1, "top_logprobs": 2, "stop": ["z"], "logprobs": True,
        "response_format": {"type": "text"},
    },
    "/v1/completions": {"model": "echo", "prompt": "hello", "max_tokens": 4, "stream": True, "logit_bias": {"65": 1}},
    "/v1/batches": {
        "input_file_id": "file-" + "0" * 24, "endpoint": "/v1/completions", "completion_window": "24h",
        "metadata": {"a": "b"},
    },
}  # fmt: skip
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**70, 10**400, 0.5, -0.0, 1e308, 5e-324, "", "x", "\x00", "\ud800",
    "\u202e", "a" * 5000, [], [[]], [None], ["x"] * 200, {}, {"$ne": 1}, {"": ""}, [{"role": "user"}],
    {"type": "json_schema"}, [{"type": "text", "text": "x"}], "file-" + "f" * 24,
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
)  # fmt: skip
METHODS = (
    "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PATCH", "post", "G E T", "\x00",
    "PRI", "A" * 300,
)  # fmt: skip
TARGETS = (
    "*", "", "//", "/%00", "/%", "/../../etc/passwd", "http://127.0.0.1/v1/models",
    "https://evil.example:99999/", "/v1/models?x=" + "y" * 9000, "/v1//models", "/v1/models#f", "/\u00e9",
    "evil.example:443", "/v1/files/%2e%2e%2f", "/v1/completions\t", "/ HTTP/1.1\r\nx: y",
)  # fmt: skip
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "HTTP/1.1 ", "http/1.1", "", "HTTP/1.1\x00")
HEADERS = (
    "content-length: 5",
    "content-length: 5\r\ncontent-length: 5",
    "content-length: 0x5",
    "content-length: +5",
    "content-length: 99999999999999999999",
    "content-length: -1",
    "content-length: 5, 5",
    "content-length:",
    "content-length : 3",
    "transfer-encoding: chunked",
    "transfer-encoding: gzip, chunked",
    "transfer-encoding: chunked\r\ncontent-length: 3",
    "transfer-encoding: xchunked",
    "transfer-encoding:\x0bchunked",
    "Transfer-Encoding: identity",
    "expect: 100-continue",
    "expect: 200-ok",
    "connection: upgrade\r\nupgrade: websocket",
    "upgrade: h2c\r\nhttp2-settings: AAMAAABk",
    "host: evil.example",
    "host: localhost\r\nhost: evil",
    "x: " + "y" * 40_000,
    " folded: x",
    "x: a\r\n b",
    "x\x00: y",
    "x: \x00",
    "x: \x7f",
    "x:\xff\xfe",
    ": y",
    "novalue",
    "x-request-timeout: nan",
    "x-request-timeout: 0.3",
    "idempotency-key: " + "k" * 2000,
    "idempotency-key: k",
    "authorization: Bearer " + "z" * 3000,
    "content-type: application/json; charset=utf-16",
    "content-type: text/plain",
    "content-type: multipart/form-data",
    "content-encoding: gzip",
    "accept-encoding: gzip;q=0",
    "range: bytes=0-",
    "cookie: " + "c" * 4000,
    "\r\n".join(f"h{i}: {i}" for i in range(3000)),
    "content-type: application/json\r\n" * 30 + "a: b",
)
CHUNK_HEADS = (
    "5", "0", "00000000000000005", "FFFFFFFFFFFFFFFF", "7fffffff", "-5", "0x5", "5;ext=1",
    "5;" + "e" * 40_000, " 5", "5 ", "", "g", "5\n", "\x005",
)  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """Bytes in pieces, and whether the client then disconnects without waiting for a response."""

    pieces: list[bytes]
    hangs_up: bool = False

    @property
    def raw(self) -> bytes:
        return b"".join(self.pieces)


def head(method: str, target: str, version: str, headers: list[str]) -> bytes:
    lines = [f"{method} {target} {version}".rstrip(), *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def post(path: str, body: bytes, kind: str = "application/json", *more: str) -> bytes:
    headers = ["host: localhost", f"content-type: {kind}", f"content-length: {len(body)}", *more]
    return head("POST", path, "HTTP/1.1", headers) + body


def mutated_json(rng: random.Random, path: str) -> bytes:
    """A valid body with one to three errors, as values or as bytes."""
    body: Any = json.loads(json.dumps(BODIES[path]))
    for _ in range(rng.randint(0, 3)):
        name = rng.choice([*body, "tools", "user", "seed", "structured_outputs", "x" * 300])
        if rng.random() < 0.2:
            body.pop(name, None)
        else:
            body[name] = rng.choice(STRANGE)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    match rng.randint(0, 9):
        case 0:
            raw = raw[: rng.randint(0, len(raw))]
        case 1:
            at = rng.randrange(len(raw))
            raw = raw[:at] + rng.randbytes(rng.randint(1, 4)) + raw[at + 1 :]
        case 2:
            raw = raw.replace(b":", b":" + b"[" * rng.choice([3, 70, 100_000]), 1)
        case 3:
            raw = raw[:-1] + b"," + raw[1:]
        case 4:
            raw = rng.choice([b"\xef\xbb\xbf", b"\x00", b"  " * 1000]) + raw
    return raw


def form(rng: random.Random) -> tuple[bytes, str]:
    """An upload, and its content type; most often with an error."""
    boundary = rng.choice(["b", "x" * 70, "x" * 3000, "a b", "--", "'", ""])
    said = rng.choice([boundary] * 6 + ["other", f'"{boundary}"', ""])
    newline = rng.choice([b"\r\n"] * 6 + [b"\n", b"\r"])
    names = rng.choices(
        ["file", "purpose", "file", "expires_after[seconds]", "", "x" * 5000], k=rng.randint(0, 5)
    )
    if rng.random() < 0.6:
        names = ["purpose", "file"]
    if rng.random() < 0.05:
        names = ["x"] * 3000
    parts = []
    for name in names:
        filename = rng.choice(
            ['; filename="a.jsonl"', "", '; filename="../../x"', '; filename=""', "; filename*=utf-8''%00"]
        )
        filename = "" if name == "purpose" else filename
        extra = rng.choice(
            [b""] * 6
            + [
                newline + b"content-transfer-encoding: base64",
                newline + b"x: " + b"y" * 70_000,
                newline + b"nocolon",
            ]
        )
        content = (
            b"batch"
            if name == "purpose"
            else rng.choice(
                [b"{}", b"", rng.randbytes(3000), f"--{boundary}".encode(), b"\r\n--", b"z" * 300_000]
            )
        )
        disposition = f'content-disposition: form-data; name="{name}"{filename}'.encode()
        parts.append(
            b"--" + boundary.encode() + newline + disposition + extra + newline * 2 + content + newline
        )
    end = rng.choice(
        [b"--" + boundary.encode() + b"--" + newline] * 5 + [b"", b"--" + boundary.encode(), b"--"]
    )
    return rng.choice([b"", b"preamble\r\n"]) + b"".join(parts) + end, f"multipart/form-data; boundary={said}"


def chunked(rng: random.Random, body: bytes) -> bytes:
    """A body in chunks, one of which may have a wrong size."""
    raw, rest = b"", body
    while rest:
        size = rng.randint(1, max(1, len(body) // 3))
        raw += b"%x\r\n" % len(rest[:size]) + rest[:size] + b"\r\n"
        rest = rest[size:]
    raw += rng.choice(
        [b"0\r\n\r\n"] * 4
        + [b"0\r\ntrailer: x\r\n\r\n", b"", b"0\r\n", b"0\r\n" + b"t: x\r\n" * 9000 + b"\r\n"]
    )
    if rng.random() < 0.4:
        lie = rng.choice(CHUNK_HEADS).encode("latin-1") + b"\r\n"
        raw = lie + raw.partition(b"\r\n")[2]
    return raw


def any_body(rng: random.Random) -> bytes:
    path = rng.choice(sorted(BODIES))
    return post(path, mutated_json(rng, path))


def any_form(rng: random.Random) -> bytes:
    body, kind = form(rng)
    return post("/v1/files", body, kind)


def any_chunks(rng: random.Random) -> bytes:
    path = rng.choice(sorted(BODIES))
    headers = ["host: localhost", "content-type: application/json", "transfer-encoding: chunked"]
    if rng.random() < 0.2:
        headers.append("content-length: 10")
    return head("POST", path, "HTTP/1.1", headers) + chunked(rng, mutated_json(rng, path))


def any_head(rng: random.Random) -> bytes:
    method = rng.choice([*METHODS, "GET", "POST", "POST"])
    target = rng.choice(TARGETS) if rng.random() < 0.3 else rng.choice(PATHS)
    version = rng.choice(VERSIONS) if rng.random() < 0.3 else "HTTP/1.1"
    headers = [] if rng.random() < 0.1 else ["host: localhost"]
    headers += rng.choices(HEADERS, k=rng.randint(0, 3))
    raw = head(method, target, version, headers) + rng.choice([b"", b"", b"hello", b"{}" * 50])
    if rng.random() < 0.15:
        raw = raw.replace(b"\r\n", rng.choice([b"\n", b"\r", b"\r\r\n", b"\n\n"]))
    return raw


def any_noise(rng: random.Random) -> bytes:
    good = post("/v1/completions", json.dumps(BODIES["/v1/completions"]).encode())
    if rng.random() < 0.3:
        return rng.randbytes(rng.randint(1, 3000))
    at = rng.randrange(len(good))
    return good[:at] + rng.randbytes(rng.randint(1, 3)) + good[at + rng.randint(0, 3) :]


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    any_body, any_body, any_form, any_chunks, any_head, any_head, any_noise,
)  # fmt: skip


def conversation(rng: random.Random) -> Conversation:
    """One to four requests on a connection, split anywhere; some clients disconnect in the middle, or at the end."""
    raw = b"".join(rng.choice(KINDS)(rng) for _ in range(rng.choice([1, 1, 1, 2, 4])))
    hangs_up = rng.random() < 0.25
    if hangs_up and rng.random() < 0.7:
        raw = raw[: rng.randint(0, len(raw))]
    match rng.randint(0, 3):
        case 0 if len(raw) < 600:
            pieces = [raw[i : i + 1] for i in range(len(raw))]
        case 1:
            cuts = sorted(rng.sample(range(len(raw) + 1), min(len(raw), 5)))
            pieces = [raw[i:j] for i, j in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        case _:
            pieces = [raw]
    return Conversation([piece for piece in pieces if piece], hangs_up)
