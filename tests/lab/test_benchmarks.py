"""The benchmarks on small numbers."""

from xml.etree import ElementTree as ET

import pytest

from lab.benchmarks import reading
from tests.s3_server import S3

pytestmark = pytest.mark.slow


def test_every_way_to_read_is_measured(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways read the same 140 documents; each has a time and its requests, and is drawn."""
    monkeypatch.setattr(reading, "DELAYS_MS", (0,))
    rows = list(reading.rows(s3, 1, (140,)))
    ways = {row.way for row in rows}
    assert len(ways) == 7
    assert len(rows) == 7 * len(reading.DELAYS_MS)
    of_140 = {row.way: row.requests for row in rows}
    assert of_140["floor"] == 2
    assert of_140["earliest"] == 4
    assert of_140["evidence, copies beside"] < 6 < of_140["evidence"]
    assert of_140["everything, obstore"] == 141
    assert of_140["everything, s3fs"] == 281, "s3fs asks HEAD before each GET"
    assert of_140["upstream's pattern, boto3"] == round(302 * 1.4)

    picture = ET.fromstring(reading.drawing(rows))  # noqa: S314 - our own
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert ways <= texts
