"""A client at the level of bytes: sends its pieces, and checks responses against the grammar of HTTP/1.1."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct

from tests.adversarial.gateway.raw_requests import Conversation

QUIET_S = 0.8
"""After a complete response: no more bytes arrive."""
PATIENCE_S = 45.0
"""The time in which a gateway with a pending response sends it or closes."""
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [ -~]*")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*)")


class NoHttp(AssertionError):
    """The received bytes are not a response."""


def split_answers(raw: bytes, methods: list[bytes]) -> tuple[list[int], bytes]:
    """The statuses of the complete responses in these bytes, and the rest. Raises NoHttp.

    `methods` are those of the requests, as far as known: a response to HEAD does not have a body.
    """
    statuses: list[int] = []
    while raw:
        head, end, rest = raw.partition(b"\r\n\r\n")
        if not end:
            return statuses, raw
        line, *lines = head.split(b"\r\n")
        status = _STATUS.fullmatch(line)
        if status is None:
            raise NoHttp(f"no status line: {line[:100]!r}")
        headers: dict[bytes, bytes] = {}
        for text in lines:
            header = _HEADER.fullmatch(text)
            if header is None:
                raise NoHttp(f"no header: {text[:100]!r}")
            headers[header[1].lower()] = header[2]
        code = int(status[1])
        has_no_body = code < 200 or code in (204, 304) or methods[len(statuses) :][:1] == [b"HEAD"]
        body_end = 0 if has_no_body else _end_of_body(headers, rest)
        if body_end is None:
            return statuses, raw
        if code >= 200:
            statuses.append(code)
        raw = rest[body_end:]
    return statuses, b""


def _end_of_body(headers: dict[bytes, bytes], rest: bytes) -> int | None:
    if headers.get(b"transfer-encoding") == b"chunked":
        at = 0
        while True:
            line = rest.find(b"\r\n", at)
            if line < 0:
                return None
            size = int(rest[at:line], 16)
            at = line + 2 + size + 2
            if len(rest) < at:
                return None
            if rest[at - 2 : at] != b"\r\n":
                raise NoHttp("a chunk does not end where it said")
            if size == 0:
                return at
    if b"content-length" not in headers:
        raise NoHttp(f"an answer without a length: {headers}")
    length = int(headers[b"content-length"])
    return length if len(rest) >= length else None


async def talk(port: int, said: Conversation) -> list[int]:
    """The received statuses. Raises NoHttp if there is neither a complete response nor an end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    try:
        with contextlib.suppress(OSError):
            for piece in said.pieces:
                writer.write(piece)
                await writer.drain()
                if len(said.pieces) > 1:
                    await asyncio.sleep(0)
        if said.hangs_up:
            _reset(writer)
            return []
        return await _listen(reader, said, found)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _listen(reader: asyncio.StreamReader, said: Conversation, found: bytes) -> list[int]:
    methods = [b"HEAD"] * 9 if b"HEAD " in said.raw else []
    statuses: list[int] = []
    left = b""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        is_whole = bool(statuses) and not left
        try:
            piece = await asyncio.wait_for(reader.read(1 << 16), QUIET_S)
        except TimeoutError:
            if is_whole:
                return statuses
            if asyncio.get_running_loop().time() > deadline:
                raise NoHttp(
                    f"neither an answer nor an end after {PATIENCE_S} s, only {left[:200]!r}"
                ) from None
            continue
        except OSError:
            return statuses
        if not piece:
            return statuses
        found += piece
        if not methods:
            statuses, left = split_answers(found, methods)
        else:
            # Only the gateway knows which of several responses is the one without a body.
            if not found.startswith(b"HTTP/1.1 "[: len(found)]):
                raise NoHttp(f"no status line: {found[:100]!r}")
            statuses = [int(code) for code in re.findall(rb"(?:\A|\n)HTTP/1\.1 (\d{3}) ", found)]


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closed without a response."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
