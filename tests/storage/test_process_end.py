"""What processes print and how they end: firstfault show on a bad storage,
and programs right after a request.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.readers.commands import Ran
from tests.s3_server import S3

pytestmark = pytest.mark.slow

_WRITES = """
import asyncio, sys
from firstfault.store import open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        await store.put("first", b"data")
        puts = asyncio.gather(*(store.put(f"{number}", bytes(200_000)) for number in range(8)))
        try:
            await asyncio.wait_for(puts, float(sys.argv[2]))
        except asyncio.TimeoutError:
            pass

asyncio.run(main())
"""


@pytest.mark.parametrize("seconds", ["60", "0.004"], ids=["writes", "gives up"])
def test_processes_that_end_right_after_requests_are_not_aborted(s3: S3, seconds: str) -> None:
    """Of 8 processes, four at a time, none is aborted:
    without the wait at their end about one in eight was.
    """
    command = [sys.executable, "-c", _WRITES, s3.uri(), seconds]
    environment = {**os.environ, **s3.environment()}
    ended = []
    for _ in range(2):
        four = [
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        ended += [(process.communicate()[1], process.returncode) for process in four]
    assert ended == [("", 0)] * 8


_ATTEMPT = "bucket/metadata/project-development-f3a9/n0/data/0"
_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
_STATUS = {"PermanentRedirect": 301, "AuthorizationHeaderMalformed": 400}


@pytest.fixture
def remove_credentials(client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing on this machine give credentials."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(params=_STATUS)
def other_region(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a server that answers as S3 does for a bucket of another region; return its URL."""
    code = request.param

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            region = "<Region>eu-west-3</Region>" if _STATUS[code] != 301 else ""
            body = (
                f"<Error><Code>{code}</Code><Message>elsewhere</Message>{region}</Error>".encode()
            )
            self.send_response(_STATUS[code])
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


@pytest.mark.usefixtures("remove_credentials")
def test_a_bucket_of_another_region_is_one_line_with_that_region(
    run: Callable[..., Ran], other_region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the region to set."""
    for name, value in {**_KEYS, "AWS_ENDPOINT_URL": other_region}.items():
        monkeypatch.setenv(name, value)
    ran = run("show", f"s3://{_ATTEMPT}")
    (line,) = (ran.out + ran.err).splitlines()
    assert line.endswith("the bucket is in the region eu-west-3; set AWS_DEFAULT_REGION=eu-west-3")


_SHOWS = """
import os, sys
from firstfault.cli import main

for uri, settings in {cases}:
    os.environ.update(settings)
    try:
        main(["show", uri])
    except SystemExit as end:
        assert end.code in {{1, 2}}, end.code
    for name in settings:
        del os.environ[name]
"""


@pytest.mark.usefixtures("remove_credentials")
def test_missing_credentials_and_wrong_ports_are_one_line_each() -> None:
    """Missing credentials and wrong ports are one line each,
    and leave nothing that is printed at a process's end.
    """
    closed_port = "http://127.0.0.1:9"
    cases = [
        (f"s3://{_ATTEMPT}", {}, "no credentials; set AWS_ACCESS_KEY_ID"),
        (f"az://{_ATTEMPT}", {}, "no credentials; set AZURE_STORAGE_ACCOUNT_NAME"),
        (f"s3://{_ATTEMPT}", {**_KEYS, "AWS_ENDPOINT_URL": closed_port}, "check the endpoint"),
        (f"gs://{_ATTEMPT}", {"STORAGE_EMULATOR_HOST": closed_port}, "check the"),
    ]
    code = _SHOWS.format(cases=[(uri, settings) for uri, settings, _ in cases])
    # about 10 s for each on a machine that does nothing else; without our limits the clients take
    # up to 60 s
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    for line, (*_, said) in zip((done.stdout + done.stderr).splitlines(), cases, strict=True):
        assert said in line
