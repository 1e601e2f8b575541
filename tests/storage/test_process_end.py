"""A process that ends right after a request ends as it meant to: obstore's threads are not cut off."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.s3_server import S3

_WRITES = """
import asyncio, sys
from firstfault.store import open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        await asyncio.gather(*(store.put(f"{number}", b"data") for number in range(8)))

asyncio.run(main())
"""
_GIVES_UP = """
import asyncio, sys
from firstfault.store import open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        await store.put("first", b"data")
        puts = asyncio.gather(*(store.put(f"{number}", bytes(200_000)) for number in range(8)))
        try:
            await asyncio.wait_for(puts, 0.004)
        except asyncio.TimeoutError:
            pass

asyncio.run(main())
"""


@pytest.mark.parametrize("code", [_WRITES, _GIVES_UP], ids=["writes", "gives up"])
def test_a_process_ends_right_after_its_requests(s3: S3, code: str) -> None:
    """Of 8 processes, four at a time, none is aborted: without the wait at their end about one in eight was."""
    environment = {**os.environ, **s3.environment()}
    ended = []
    for _ in range(2):
        four = [
            subprocess.Popen([sys.executable, "-c", code, s3.uri()], env=environment, stderr=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        ended += [(process.communicate()[1], process.returncode) for process in four]
    assert ended == [("", 0)] * 8
