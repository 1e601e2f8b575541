"""A proxy before the real S3 server that makes requests fail by a plan,
also those of other processes.

Each request takes the first fault of the plan that matches it. A fault is a status (301, 403, 500,
503), or:

| Fault | Means |
|---|---|
| pass | nothing: the request is served |
| drop | the connection closes without an answer |
| reset | the connection is reset in the middle of a body: the request's, else the answer's |
| truncate | the connection closes in the middle of the answer |
| half | half of the answer's body, as if that were all |
| stall | no answer for some seconds, or until the plan changes; then the request is served |
| twice | the request is executed twice, and both answers are sent |
| trickle | the answer comes byte by byte, one a second if nothing else is asked for |

`FaultyProxy.refuse` closes the port, so that connections are refused.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import io
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from tests.s3_server import S3

FAULTS = (
    "500",
    "503",
    "403",
    "refused",
    "drop",
    "reset",
    "truncate",
    "half",
    "stall",
    "trickle",
    "twice",
)
"""What `FaultyProxy.fail` can let happen."""
_CODES = {
    "301": "PermanentRedirect",
    "403": "AccessDenied",
    "500": "InternalError",
    "503": "SlowDown",
}
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing the socket resets the connection."""
_HOP_HEADERS = {"content-length", "transfer-encoding", "connection"}
_TRICKLE_S = 1.0
_LONGEST_S = 60.0
"""Longest wait for a request that a test expects."""

Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers and body."""


@dataclass
class Fault:
    """What happens to the requests that match."""

    what: str
    method: str = ""
    """Empty: any."""
    path: str = ""
    """A part of the path with its query; empty: any."""
    client: str = ""
    """A part of the client's name; empty: any."""
    times: int | None = None
    """How many requests; None: all."""
    seconds: float | None = None
    """How long a stall lasts; None: until the plan changes. How long a trickle
    pauses after each byte.
    """

    def takes(self, method: str, path: str, client: str) -> bool:
        """Whether this request gets the fault; count it."""
        if (
            self.method not in {"", method}
            or self.path not in path
            or self.client not in client
            or self.times == 0
        ):
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass
class FaultyProxy:
    server: S3
    """As its clients see it: with the proxy's endpoint."""
    requests: list[str] = field(default_factory=list)
    """Method and path of every request."""
    moments: list[float] = field(default_factory=list)
    """When each came, by the monotonic clock."""
    _faults: list[Fault] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _version: int = 0
    """Of the plan: a stall without a limit ends with it."""
    _listener: _Listener | None = None

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    def plan(self, *faults: Fault | str) -> None:
        """Replace the plan, which ends stalls; a text is a fault of the next request alone."""
        with self._changed:
            self._faults = [
                Fault(fault, times=1) if isinstance(fault, str) else fault for fault in faults
            ]
            self._version += 1
            self._changed.notify_all()

    def mend(self) -> None:
        """Serve all further requests, and accept connections;
        requests that stall or trickle still do.
        """
        with self._changed:
            self._faults = []
        self.accept()

    def fail(self, what: str, **fields: Any) -> None:
        """Let one fault happen to all requests that match its other fields;
        "refused" closes the port.
        """
        if what == "refused":
            self.refuse()
        else:
            self.plan(Fault(what, **fields))

    @property
    def is_used_up(self) -> bool:
        """Whether every fault of the plan has had all of its requests."""
        return all(fault.times == 0 for fault in self._faults)

    def refuse(self) -> None:
        """Refuse connections until `accept`; close those that are open."""
        if self._listener is not None:
            self._listener.close()

    def accept(self) -> None:
        """Accept connections again, on the same port."""
        if self._listener is not None:
            self._listener.open()

    def await_request(
        self,
        method: str,
        path: str,
        *,
        since: int = 0,
        seconds: float = _LONGEST_S,
    ) -> float:
        """Wait for a request whose path contains `path`; return the moment at which it came.

        The first `since` requests do not count.
        """

        def found() -> float | None:
            for line, moment in list(zip(self.requests, self.moments, strict=True))[since:]:
                if line.startswith(f"{method} ") and path in line:
                    return moment
            return None

        with self._changed:
            moment = self._changed.wait_for(found, seconds)
        assert moment is not None, (
            f"no {method} of {path} within {seconds:g} s: {self.requests[since:]}"
        )
        return moment

    def next_fault(self, method: str, path: str, client: str) -> Fault:
        """Keep a record of the current request and return its fault; wait while it stalls."""
        with self._changed:
            self.requests.append(f"{method} {path}")
            self.moments.append(time.monotonic())
            self._changed.notify_all()
            fault = next(
                (fault for fault in self._faults if fault.takes(method, path, client)),
                Fault("pass"),
            )
            if fault.what == "stall":
                version = self._version
                self._changed.wait_for(lambda: self._version != version, fault.seconds)
            return fault

    def pause(self, seconds: float) -> None:
        """Wait for so long, or until the plan changes."""
        with self._changed:
            version = self._version
            self._changed.wait_for(lambda: self._version != version, seconds)


@contextlib.contextmanager
def faulty_proxy_before(server: S3) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(server)
    listener = _Listener(proxy, urlsplit(server.endpoint).netloc)
    proxy._listener = listener
    proxy.server = replace(server, endpoint=f"http://127.0.0.1:{listener.port}")
    listener.open()
    try:
        yield proxy
    finally:
        listener.close()
        proxy.plan()
        listener.free()


class _Listener:
    """The proxy's port. One socket holds it all the time:
    the kernel gives a free port to any process.
    """

    def __init__(self, proxy: FaultyProxy, target: str) -> None:
        self._proxy = proxy
        self._target = target
        self._held = _bound(0)
        self.port: int = self._held.getsockname()[1]
        self._running: tuple[_Server, threading.Thread] | None = None

    def open(self) -> None:
        if self._running is not None:
            return
        server = _Server(_bound(self.port), self._proxy, self._target)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="faulty-proxy")
        thread.start()
        self._running = server, thread

    def close(self) -> None:
        if self._running is None:
            return
        server, thread = self._running
        self._running = None
        server.shutdown()
        thread.join()
        server.server_close()
        server.close_connections()

    def free(self) -> None:
        self._held.close()


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
    bound.bind(("127.0.0.1", port))
    return bound


class _Server(http.server.ThreadingHTTPServer):
    block_on_close = False
    request_queue_size = 128

    def __init__(self, bound: socket.socket, proxy: FaultyProxy, target: str) -> None:
        super().__init__(bound.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.server_activate()
        self.proxy = proxy
        self.target = target
        self._connections: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override] - TCP
        self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Close the open connections; each handler's thread ends with its own."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client may have gone, or the connection was reset."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    connection: socket.socket
    rfile: io.BufferedReader

    def handle_any(self) -> None:
        proxy = self.server.proxy
        length = int(self.headers.get("Content-Length", 0))
        fault = proxy.next_fault(self.command, self.path, self.headers.get("User-Agent", ""))
        if fault.what == "reset" and length:
            self.rfile.read(length // 2)
            self.reset()
            return
        body = self.rfile.read(length)
        if fault.what == "drop":
            self.close_connection = True
        elif fault.what.isdigit():
            text = f"<Error><Code>{_CODES[fault.what]}</Code></Error>"
            self.send(self.packed((int(fault.what), [], text.encode())))
        else:
            self.answer(fault, body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815 - http.server's names

    def answer(self, fault: Fault, body: bytes) -> None:
        """Forward the request, and send the answer as the fault wants it."""
        what = fault.what
        answer = self.forward(body)
        status, headers, content = answer
        if what == "half":
            answer = status, headers, content[: len(content) // 2]
        data = self.packed(answer)
        if what in {"reset", "truncate"}:
            self.send(data[: -(len(content) + 1) // 2] if content else data[: len(data) // 2])
            self.close_connection = True
            if what == "reset":
                self.reset()
        elif what == "trickle":
            for place in range(len(data)):
                self.send(data[place : place + 1])
                self.server.proxy.pause(_TRICKLE_S if fault.seconds is None else fault.seconds)
        elif what == "twice":
            self.send(data + self.packed(self.forward(body)))
        else:
            self.send(data)

    def forward(self, body: bytes) -> Answer:
        connection = http.client.HTTPConnection(self.server.target, timeout=10)
        with contextlib.closing(connection):
            # the host is part of the signature, so it stays the proxy's
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def packed(self, answer: Answer) -> bytes:
        status, headers, body = answer
        kept = [(name, value) for name, value in headers if name.lower() not in _HOP_HEADERS]
        length = str(len(body))
        # whose answer has no body; the next one on the connection would begin with it
        if self.command == "HEAD":
            length = next(
                (value for name, value in headers if name.lower() == "content-length"), length
            )
            body = b""
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in (*kept, ("Content-Length", length))]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.connection.close()

    def log_message(self, *args: object) -> None:
        """Log nothing."""
