"""A TCP proxy with configurable faults: resets, silence in either direction, slowness, refused connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Literal

Mode = Literal["pass", "silent", "deaf", "refuse"]
"""silent: data is not forwarded, connections stay open (a partition). deaf: requests arrive, replies do not
(half open). refuse: new connections are closed immediately."""


class TcpProxy:
    """Listens on `port` of 127.0.0.1 and forwards to `target`. Runs on a thread; every method is safe to call."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._mode: Mode = "pass"
        self._delay_s = 0.0
        self._open: dict[asyncio.Task[None], list[socket.socket]] = {}
        """The forwarded connections: a client's socket, and one to the target."""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="tcp-proxy", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def set_mode(self, mode: Mode, delay_s: float = 0.0) -> None:
        self._mode, self._delay_s = mode, delay_s

    def set_target(self, port: int) -> None:
        """Forward new connections to another port. Open ones stay where they are."""
        self._target = port

    def reset_all(self) -> None:
        """Drop every connection, by RST."""
        self._loop.call_soon_threadsafe(self._reset)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, self._listener:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop.add_reader(self._listener, self._accept)
        await self._stop.wait()
        self._loop.remove_reader(self._listener)
        self._reset()
        if self._open:
            await asyncio.wait(self._open)

    def _reset(self) -> None:
        for task, sockets in self._open.items():
            for sock in sockets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            task.cancel()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self._mode == "refuse":
            client.close()
            return
        sockets = [client, socket.socket()]
        for sock in sockets:
            sock.setblocking(False)
        task = self._loop.create_task(self._forward(*sockets))
        self._open[task] = sockets
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Close the sockets, also those of a task that was canceled before it started."""
        for sock in self._open.pop(task):
            sock.close()

    async def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await self._loop.sock_connect(server, ("127.0.0.1", self._target))
            pumps = [
                asyncio.create_task(self._pump(client, server, is_answer=False)),
                asyncio.create_task(self._pump(server, client, is_answer=True)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, source: socket.socket, sink: socket.socket, *, is_answer: bool) -> None:
        while data := await self._loop.sock_recv(source, 65536):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            while self._mode == "silent" or (self._mode == "deaf" and is_answer):
                await asyncio.sleep(0.02)
            await self._loop.sock_sendall(sink, data)
