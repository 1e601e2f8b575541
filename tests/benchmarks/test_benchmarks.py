"""The benchmarks on small numbers."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from firstfault.store import open_store
from tests.benchmarks import reading
from tests.benchmarks.latency_proxy import latency_proxy
from tests.s3_server import S3


def test_the_proxy_adds_its_delay_and_counts(s3: S3) -> None:
    """Each request is delayed once, and counted by its method."""

    def ask(endpoint: str) -> float:
        began = time.perf_counter()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{endpoint}/{s3.bucket}/nothing", timeout=10)  # noqa: S310 - on the loopback
        return time.perf_counter() - began

    with latency_proxy(s3.endpoint, 1_500) as slow, latency_proxy(s3.endpoint, 0) as quick:
        assert ask(slow.endpoint) > 1.5
        assert min(ask(quick.endpoint) for _ in range(5)) < 1.5
        assert slow.requests() == {"GET": 1}
        assert slow.requests() == {}
        assert slow.refused == 0


def test_requests_above_the_limit_are_refused_and_sent_again(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy answers as S3 does above its limits: a store waits, asks again, and loses nothing."""
    with latency_proxy(s3.endpoint, 0, limits=(5, 5)) as proxy:
        for name, value in replace(s3, endpoint=proxy.endpoint).environment().items():
            monkeypatch.setenv(name, value)
        names = [f"{number}" for number in range(8)]

        async def write_and_read() -> list[bytes]:
            async with open_store(s3.uri("limits")) as store:
                await asyncio.gather(*(store.put(name, name.encode() * 100_000) for name in names))
                return list(await asyncio.gather(*map(store.get, names)))

        assert asyncio.run(write_and_read()) == [name.encode() * 100_000 for name in names]
        sent = proxy.requests()
        assert proxy.refused > 0
        assert sum(sent.values()) == 16 + proxy.refused


def test_every_way_to_read_is_measured(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways read the same 140 documents; each has a time and its requests, and is drawn."""
    monkeypatch.setattr(reading, "DELAYS_MS", (0,))
    rows = list(reading.rows(s3, 1, (140,)))
    ways = {row.way for row in rows}
    assert len(ways) == 7
    assert len(rows) == 7 * len(reading.DELAYS_MS)
    of_140 = {row.way: row.requests for row in rows}
    assert of_140["floor"] == 2
    assert of_140["earliest"] == 3
    assert of_140["evidence, copies beside"] < 6 < of_140["evidence"]
    assert of_140["everything, obstore"] == 141
    assert of_140["everything, s3fs"] == 281, "s3fs asks HEAD before each GET"
    assert of_140["upstream's pattern, boto3"] == round(302 * 1.4)

    picture = ET.fromstring(reading.drawing(rows))  # noqa: S314 - our own
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert ways <= texts
