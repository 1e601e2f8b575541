"""A TCP proxy on the loopback that delays every request, counts them by method,
and refuses those above a limit.

Run as a process of its own, so that it does not share an interpreter with what is measured. Answers
are not held back, and connections overlap freely: a client with many requests on their way waits
once, one that asks in turn waits each time. Above a limit a request is answered 503 SlowDown, as S3
answers above its limits for a prefix.
"""

import asyncio
import collections
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator

Limits = tuple[int, int]
"""The most requests in one second that read (GET, HEAD, LIST) and that write (PUT, POST, DELETE);
0 is no limit.
"""
S3_LIMITS: Limits = (5500, 3500)
"""Of one prefix, as S3 documents them."""

_CHUNK = 1 << 18
_METHODS = (b"GET ", b"PUT ", b"HEAD ", b"POST ", b"DELETE ")


class LatencyProxy:
    def __init__(self, process: subprocess.Popen[str], endpoint: str) -> None:
        self._process = process
        self.endpoint = endpoint
        self.refused = 0
        """Of the requests that were last counted."""
        self.busiest_second = 0
        """Of the requests that were last counted: how many came in the second that had most."""

    def requests(self) -> dict[str, int]:
        """Return the number of requests since the last call, by method;
        LIST is a GET of a bucket.
        """
        assert self._process.stdout is not None
        self._process.stdin.write("count\n")
        self._process.stdin.flush()
        counts: dict[str, int]
        counts, self.refused, self.busiest_second = json.loads(self._process.stdout.readline())
        return counts


@contextlib.contextmanager
def latency_proxy(
    endpoint: str, delay_ms: float, limits: Limits = (0, 0)
) -> Iterator[LatencyProxy]:
    """Run a proxy to the server at `endpoint` (http://host:port) that adds `delay_ms`
    milliseconds to each request.
    """
    command = [
        sys.executable,
        __file__,
        endpoint.rsplit(":", 1)[1],
        str(delay_ms),
        *map(str, limits),
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            port = int(process.stdout.readline())
            yield LatencyProxy(process, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()


_WRITES = {"PUT", "POST", "DELETE"}
_SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_REFUSAL = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n"
    % len(_SLOW_DOWN)
) + _SLOW_DOWN


class _Proxy:
    def __init__(self, target: int, delay: float, limits: Limits) -> None:
        self._target = target
        self._delay = delay
        self._limits = limits
        self._counts: collections.Counter[str] = collections.Counter()
        self._refused = 0
        self._busiest = 0
        self._second = 0
        self._in_second: collections.Counter[bool] = collections.Counter()
        """Requests of the present second, by whether they write."""

    async def run(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps([self._counts, self._refused, self._busiest]), flush=True)
            self._counts.clear()
            self._refused = self._busiest = 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        for stream in (writer, up_writer):
            stream.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(
            self._copy(reader, up_writer, self._delay, refuse=writer),
            self._copy(up_reader, writer, 0.0),
        )

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        delay: float,
        refuse: asyncio.StreamWriter | None = None,
    ) -> None:
        """Copy a stream. Requests are counted, and refused on `refuse`, where that is given."""
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
        left = 0  # bytes of a refused request's body
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if left > 0:
                    left -= len(data)
                elif refuse is not None and self._is_refused(data):
                    left = _body(data)
                else:
                    await chunks.put((loop.time() + delay, data))
                    continue
                if left <= 0 and refuse is not None:
                    await asyncio.sleep(delay)
                    refuse.write(_REFUSAL)
        await chunks.put((0.0, b""))
        with contextlib.suppress(OSError):
            await sender
        writer.close()

    def _is_refused(self, data: bytes) -> bool:
        """Count a request; return whether it is above the limit."""
        if not data.startswith(_METHODS):
            return False
        method, path = data.split(b"\r\n", 1)[0].split(b" ")[:2]
        is_listing = b"list-type=2" in path or b"prefix=" in path
        self._counts["LIST" if is_listing else method.decode()] += 1
        second = int(asyncio.get_running_loop().time())
        is_write = method.decode() in _WRITES
        if second != self._second:
            self._second = second
            self._in_second.clear()
        self._in_second[is_write] += 1
        self._busiest = max(self._busiest, sum(self._in_second.values()))
        is_refused = 0 < self._limits[is_write] < self._in_second[is_write]
        self._refused += is_refused
        return is_refused


def _body(data: bytes) -> int:
    """Return how many bytes of a request's body are still to come."""
    head, _, begun = data.partition(b"\r\n\r\n")
    lengths = [
        line.partition(b":")[2]
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    ]
    return int(lengths[0]) - len(begun) if lengths else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            _Proxy(
                int(sys.argv[1]), float(sys.argv[2]) / 1000, (int(sys.argv[3]), int(sys.argv[4]))
            ).run()
        )
