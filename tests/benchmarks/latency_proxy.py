"""A TCP proxy on the loopback that delays every request, and counts them by method.

Run as a process of its own, so that it does not share an interpreter with what is measured. Answers are not held back,
and connections overlap freely: a client with many requests on their way waits once, one that asks in turn waits each
time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LatencyProxy", "latency_proxy"]

_CHUNK = 1 << 18
_METHODS = (b"GET ", b"PUT ", b"HEAD ", b"POST ", b"DELETE ")


class LatencyProxy:
    """A running proxy."""

    def __init__(self, process: subprocess.Popen[str], endpoint: str) -> None:
        self._process = process
        self.endpoint = endpoint

    def requests(self) -> dict[str, int]:
        """Return the number of requests since the last call, by method; LIST is a GET of a bucket."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the proxy has no pipes")
        self._process.stdin.write("count\n")
        self._process.stdin.flush()
        counts: dict[str, int] = json.loads(self._process.stdout.readline())
        return counts


@contextlib.contextmanager
def latency_proxy(endpoint: str, delay_ms: float) -> Iterator[LatencyProxy]:
    """Run a proxy to the server at `endpoint` (http://host:port) that adds `delay_ms` milliseconds to each request."""
    command = [sys.executable, __file__, endpoint.rsplit(":", 1)[1], str(delay_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("the proxy has no pipes")
            port = int(process.stdout.readline())
            yield LatencyProxy(process, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()


# --- the process ----------------------------------------------------------------------------------------------------


class _Proxy:
    def __init__(self, target: int, delay: float) -> None:
        self._target = target
        self._delay = delay
        self._counts: collections.Counter[str] = collections.Counter()

    async def run(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(self._counts), flush=True)
            self._counts.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        for stream in (writer, up_writer):
            stream.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(
            self._copy(reader, up_writer, self._delay, count=True), self._copy(up_reader, writer, 0.0, count=False)
        )

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float, *, count: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

        async def send() -> None:
            while True:
                due, data = await chunks.get()
                if not data:
                    break
                await asyncio.sleep(max(due - loop.time(), 0))
                writer.write(data)
                await writer.drain()

        sender = asyncio.create_task(send())
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if count:
                    self._note(data)
                await chunks.put((loop.time() + delay, data))
        await chunks.put((0.0, b""))
        with contextlib.suppress(OSError):
            await sender
        writer.close()

    def _note(self, data: bytes) -> None:
        if data.startswith(_METHODS):
            method, path = data.split(b"\r\n", 1)[0].split(b" ")[:2]
            is_listing = b"list-type=2" in path or b"prefix=" in path
            self._counts["LIST" if is_listing else method.decode()] += 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_Proxy(int(sys.argv[1]), float(sys.argv[2]) / 1000).run())
