"""A write that the storage answers with 404: not the object is missing, but its place."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from firstfault.errors import StoreError
from firstfault.store import open_store
from firstfault.utils.run_sync import run_sync

pytest.importorskip("obstore")


class _NotFound(BaseHTTPRequestHandler):
    """Answers each request with 404, as a web server at a wrong endpoint does."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _NotFound)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_404_to_a_write_names_the_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the bucket and what to check."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    async def write() -> None:
        async with open_store("s3://bucket/runs", attempts=1) as store:
            await store.put("firstfault-doctor/probe", b"text")

    with pytest.raises(StoreError) as caught:
        run_sync(write())
    advice = "the storage answered 404; check the bucket's name and the endpoint"
    assert str(caught.value) == f"cannot write s3://bucket/runs/firstfault-doctor/probe: {advice}"
