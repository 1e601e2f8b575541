"""Times of reading a cascade, by our reader and in other ways,
through a proxy that adds latency.
"""

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import botocore.session
import fsspec
import obstore
from botocore.config import Config
from obstore.store import S3Store

from firstfault import MultiErrorFileOutputReader
from firstfault.layout import ERRORS, ROSTER, bundle_name, get_path_in_bundle
from firstfault.wire.documents import pack
from firstfault_torch.node.document_writer import put_file
from lab.benchmarks.cascade import Cascade, put_all
from lab.benchmarks.growth import svg
from lab.benchmarks.latency_proxy import LatencyProxy, latency_proxy
from tests.s3_server import S3

COPIED = "evidence, copies beside"
COUNTS = (1, 64, 1_000, 10_000)
DELAYS_MS = (0, 5, 20)
_PARALLEL = 64
_IN_TURN = 100
"""Largest number of documents that are read one after the other; the time for more is extrapolated.
"""
_EVERYTHING = 1_000
"""As many documents are read by those ways that read them all through s3fs."""


@dataclass(frozen=True)
class Row:
    """The times of one way to read a number of documents."""

    documents: int
    delay_ms: float
    way: str
    seconds: float
    """Median."""
    requests: int
    scaled: bool = False
    """Whether it was extrapolated from a part."""


def rows(s3: S3, repeat: int, counts: tuple[int, ...] = COUNTS) -> Iterator[Row]:
    """Yield a row for each number of documents, delay and way; ways take turns."""
    for count in counts:
        uri = s3.uri("read")
        culprit = Cascade(count).culprit
        for way in ("", COPIED):
            with _environment(s3.environment()):
                put_all(uri, Cascade(count)) if way != COPIED else _leave_copies(uri)
            for delay in DELAYS_MS:
                with latency_proxy(s3.endpoint, delay) as proxy, _environment(s3.environment()):
                    os.environ.update(
                        FLYTE_AWS_ENDPOINT=proxy.endpoint, AWS_ENDPOINT_URL=proxy.endpoint
                    )
                    ways = (
                        {way: _ours(uri, "evidence", culprit)}
                        if way
                        else _ways(s3, proxy.endpoint, uri, count)
                    )
                    yield from _measured(ways, proxy, (count, delay), repeat)


def drawing(rows: Sequence[Row]) -> str:
    delay = max(row.delay_ms for row in rows)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.delay_ms == delay:
            lines.setdefault(row.way, []).append((row.documents, row.seconds))
    return svg(
        f"Seconds to the answer, {delay:g} ms added to each request",
        lines,
        "documents",
        "s",
    )


def _leave_copies(uri: str) -> None:
    """Leave copies of what a verdict rests on, as the node that concludes does."""
    reader = MultiErrorFileOutputReader(
        uri, strategy="evidence", copies={"firstfault/errors/none": b""}
    )
    reader.job()
    bundle = pack(
        {get_path_in_bundle(path): data for path, data in reader.read_files.items() if data}
    )
    put_file(uri, f"{ROSTER}/{bundle_name(bundle)}", bundle)


def _ours(uri: str, strategy: str, culprit: int) -> Callable[[], float]:
    def read() -> float:
        verdict = MultiErrorFileOutputReader(uri, strategy=strategy).verdict()
        assert verdict.ranks == (culprit,)
        return 1.0

    return read


def _measured(
    ways: dict[str, Callable[[], float]],
    proxy: LatencyProxy,
    place: tuple[int, float],
    repeat: int,
) -> Iterator[Row]:
    count, delay = place
    taken: dict[str, list[float]] = {name: [] for name in ways}
    asked: dict[str, int] = {}
    for _ in range(repeat):
        for name, read in ways.items():
            proxy.requests()
            began = time.perf_counter()
            times = read()
            taken[name].append((time.perf_counter() - began) * times)
            asked[name] = round(sum(proxy.requests().values()) * times)
    for name, seconds in taken.items():
        scaled = name.startswith("upstream") and count > _IN_TURN
        yield Row(count, delay, name, statistics.median(seconds), asked[name], scaled)


def _ways(s3: S3, endpoint: str, uri: str, count: int) -> dict[str, Callable[[], float]]:
    """Return each way to read, a function that returns the factor by which
    its time is multiplied.
    """
    culprit = Cascade(count).culprit

    prefix = f"{uri.removeprefix(f's3://{s3.bucket}/')}/{ERRORS}"
    bare = _client(s3, endpoint)
    found: dict[str, Callable[[], float]] = {
        "floor": lambda: asyncio.run(_floor(s3, endpoint, prefix)),
        "earliest": _ours(uri, "earliest", culprit),
        "evidence": _ours(uri, "evidence", culprit),
        "everything, obstore": lambda: asyncio.run(_everything(bare, prefix)),
        "upstream's pattern, boto3": lambda: _in_turn(s3, endpoint, prefix, count),
    }
    if count <= _EVERYTHING:
        # one client for all: the garbage of several disturbs the event loops of the others
        system = fsspec.filesystem(
            "s3",
            key=s3.access_key,
            secret=s3.secret_key,
            client_kwargs={"endpoint_url": endpoint},
            use_listings_cache=False,
        )
        found["everything, s3fs"] = lambda: _everything_s3fs(system, f"{s3.bucket}/{prefix}")
    return found


def _client(s3: S3, endpoint: str) -> S3Store:
    return S3Store(
        s3.bucket,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id=s3.access_key,
        secret_access_key=s3.secret_key,
        client_options={"allow_http": True},
    )


async def _floor(s3: S3, endpoint: str, prefix: str) -> float:
    """Read with one LIST page and one GET, by a bare client."""
    client = _client(s3, endpoint)
    async for chunk in obstore.list(client, prefix, chunk_size=1000):
        document = await obstore.get_async(client, chunk[0]["path"])
        await document.bytes_async()
        break
    return 1.0


def everything(s3: S3, endpoint: str, uri: str) -> None:
    """List all error documents of an attempt and get each, 64 at a time."""
    prefix = f"{uri.removeprefix(f's3://{s3.bucket}/')}/{ERRORS}"
    asyncio.run(_everything(_client(s3, endpoint), prefix))


async def _everything(client: S3Store, prefix: str) -> float:
    names = [
        item["path"]
        async for chunk in obstore.list(client, prefix, chunk_size=1000)
        for item in chunk
    ]
    gate = asyncio.Semaphore(_PARALLEL)

    async def get(name: str) -> None:
        async with gate:
            await (await obstore.get_async(client, name)).bytes_async()

    await asyncio.gather(*map(get, names))
    return 1.0


def _everything_s3fs(system: Any, folder: str) -> float:
    system.cat(system.ls(folder, detail=False))
    return 1.0


def _in_turn(s3: S3, endpoint: str, prefix: str, count: int) -> float:
    """Read as Flyte does: LIST and HEAD each to check for an error, then LIST,
    HEAD and GET each to read it.
    """
    client = botocore.session.get_session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=endpoint,
        aws_access_key_id=s3.access_key,
        aws_secret_access_key=s3.secret_key,
        config=Config(retries={"max_attempts": 0}),
    )
    with contextlib.closing(client):
        for is_reading in (False, True):
            listed = client.list_objects_v2(Bucket=s3.bucket, Prefix=f"{prefix}/")["Contents"]
            for item in listed[:_IN_TURN]:
                client.head_object(Bucket=s3.bucket, Key=item["Key"])
                if is_reading:
                    client.get_object(Bucket=s3.bucket, Key=item["Key"])["Body"].read()
    return max(count / _IN_TURN, 1.0)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    yield
    os.environ.clear()
    os.environ.update(before)


_JUDGE = """
import sys, time
from pathlib import Path
from firstfault import MultiErrorFileOutputReader
began = time.perf_counter()
verdict = MultiErrorFileOutputReader(sys.argv[1], strategy=sys.argv[2]).verdict()
seconds = time.perf_counter() - began
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
print(seconds, peak, *verdict.ranks)
"""


def memory(s3: S3, count: int) -> list[dict[str, Any]]:
    """Return the time and memory of verdicts on a number of keys, each in a new process."""
    uri = s3.uri("memory")
    found = []
    environment = {**os.environ, **s3.environment()}
    with _environment(s3.environment()):
        put_all(uri, Cascade(count))
    for strategy in ("earliest", "evidence", COPIED):
        if strategy == COPIED:
            with _environment(s3.environment()):
                _leave_copies(uri)
        command = [sys.executable, "-c", _JUDGE, uri, strategy.partition(",")[0]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        seconds, peak, *ranks = done.stdout.split()
        assert ranks == [str(Cascade(count).culprit)]
        found.append(
            {
                "documents": count,
                "strategy": strategy,
                "seconds": float(seconds),
                "megabytes": float(peak),
            }
        )
    return found
