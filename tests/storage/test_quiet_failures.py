"""What `firstfault show` prints where a storage cannot be used: one line in time that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ATTEMPT = "bucket/metadata/project-development-f3a9/n0/data/0"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
STATUS = {"PermanentRedirect": 301, "AuthorizationHeaderMalformed": 400}


@pytest.fixture(params=["obstore", "fsspec"])
def show(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    """Return a function that shows a URI in a process of its own, and returns its only line."""

    def run(uri: str, **settings: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FLYTE_", "AZURE_"))}
        # nothing on this machine gives credentials
        nowhere = {"AWS_EC2_METADATA_DISABLED": "true", "NO_GCE_CHECK": "true", "HOME": str(tmp_path)}
        environment = {**kept, **nowhere, "FIRSTFAULT_STORAGE_CLIENT": request.param, **settings}
        command = [sys.executable, "-m", "firstfault", "show", uri]
        # about 10 s on a machine that does nothing else; without our limits the clients take up to 60 s
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=45, env=environment)
        (line,) = (done.stdout + done.stderr).splitlines()
        assert done.returncode in {1, 2}
        return line

    return run


@pytest.fixture(params=STATUS)
def elsewhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a server that answers as S3 does for a bucket of another region; return its URL."""
    code = request.param

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            region = "<Region>eu-west-3</Region>" if STATUS[code] != 301 else ""
            body = f"<Error><Code>{code}</Code><Message>elsewhere</Message>{region}</Error>".encode()
            self.send_response(STATUS[code])
            self.send_header("x-amz-bucket-region", "eu-west-3")
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the name that the server calls

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_bucket_of_another_region(show: Callable[..., str], elsewhere: str) -> None:
    """The line names the region to set."""
    line = show(f"s3://{ATTEMPT}", AWS_ENDPOINT_URL=elsewhere, **KEYS)
    assert line.endswith("the bucket is in the region eu-west-3; set AWS_DEFAULT_REGION=eu-west-3")


@pytest.mark.parametrize(
    ("uri", "settings", "said"),
    [
        (f"s3://{ATTEMPT}", {}, "no credentials; set AWS_ACCESS_KEY_ID"),
        (f"az://{ATTEMPT}", {}, "no credentials; set AZURE_STORAGE_ACCOUNT_NAME"),
        (f"s3://{ATTEMPT}", {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "check the endpoint"),
        (f"gs://{ATTEMPT}", {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}, "check the"),
    ],
    ids=["s3 keys", "azure keys", "port", "google port"],
)
def test_one_line_in_time(show: Callable[..., str], uri: str, settings: dict[str, str], said: str) -> None:
    """Missing credentials, a wrong port."""
    assert said in show(uri, **settings)
