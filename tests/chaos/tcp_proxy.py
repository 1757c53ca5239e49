"""A TCP proxy that misbehaves on demand: resets, silence in either direction, slowness, refusal."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Literal

Mode = Literal["pass", "silent", "deaf", "refuse"]
"""silent: nothing is forwarded, connections stay open (a partition). deaf: requests arrive, answers don't (half
open). refuse: new connections are closed at once."""


class TcpProxy:
    """Listens on `port` of 127.0.0.1 and forwards to `target`. Runs on a thread; every method is safe to call."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._mode: Mode = "pass"
        self._delay_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, name="tcp-proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def set_mode(self, mode: Mode, delay_s: float = 0.0) -> None:
        self._mode, self._delay_s = mode, delay_s

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
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        self._reset()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # connections that are aborted close their sockets in the loop's next turn

    def _reset(self) -> None:
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "refuse":
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        self._writers |= {writer, server_writer}
        try:
            await asyncio.gather(
                self._pump(reader, server_writer, is_answer=False),
                self._pump(server_reader, writer, is_answer=True),
            )
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for end in (writer, server_writer):
                self._writers.discard(end)
                end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        while data := await reader.read(65536):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            while self._mode == "silent" or (self._mode == "deaf" and is_answer):
                await asyncio.sleep(0.02)
            writer.write(data)
            await writer.drain()
        raise OSError("closed")
