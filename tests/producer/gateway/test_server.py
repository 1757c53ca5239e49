"""The socket that serves clients."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.server import bind


async def test_an_answers_end_does_not_wait_for_an_acknowledgement() -> None:
    """Nagle's algorithm delays the second write of a response by 40 ms, unless the connection disables it."""
    loop = asyncio.get_running_loop()
    is_sent_at_once: asyncio.Future[int] = loop.create_future()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connection = cast(socket.socket, transport.get_extra_info("socket"))
            is_sent_at_once.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    with bind(GatewayConfig(port=0)) as listener:
        async with await loop.create_server(Protocol, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
    assert is_sent_at_once.result()
