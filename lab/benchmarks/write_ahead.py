"""Times from a raise to its durable document and to the first victim,
in many rounds of real jobs on S3.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from firstfault.layout import ERRORS, ROSTER, ErrorKey, is_error_file
from firstfault.store import open_store
from firstfault.wire.documents import decode_presence
from lab.benchmarks.latency_proxy import latency_proxy
from tests.s3_server import S3

TASKS = ("plain", "in_finally", "in_with")
_RAISING = Path(__file__).with_name("raising.py")
_NS = 1e9
_RANK = 3


@dataclass(frozen=True)
class Raise:
    """One raise; times in seconds after it."""

    task: str
    durable: float
    """When the storage had acknowledged the document."""
    first_victim: float
    """When the first other rank's collective failed, or its process died."""


def raises(
    s3: S3,
    task: str,
    rounds: int,
    *,
    delay_ms: float = 0,
    start_method: str = "spawn",
) -> list[Raise]:
    """Run one job with this number of rounds, each of which ends with a raise."""
    with latency_proxy(s3.endpoint, delay_ms) as proxy, tempfile.TemporaryDirectory() as folder:
        uri = s3.uri("raises")
        environment = {
            **os.environ,
            **s3.environment(),
            "FLYTE_AWS_ENDPOINT": proxy.endpoint,
            "AWS_ENDPOINT_URL": proxy.endpoint,
            "BENCH_FOLDER": folder,
            "BENCH_ROUNDS": str(rounds),
            "BENCH_START_METHOD": start_method,
            # without this, gloo does not always connect again after a restart
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [
            sys.executable,
            "-m",
            "firstfault",
            "run",
            str(_RAISING),
            task,
            "--store",
            uri,
            "--json",
        ]
        done = subprocess.run(
            [*command, "--retries", "0"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        (attempt,) = json.loads(done.stdout.splitlines()[-1])["attempts"]
        told = asyncio.run(_told(attempt["errors"].removesuffix(f"/{ERRORS}"), s3))
        found = []
        for number in range(rounds):
            raised = Path(folder) / f"{number}-{_RANK}-raised"
            victims = [int(file.read_text()) for file in Path(folder).glob(f"{number}-*-victim")]
            durable, deaths = told.get(number, (None, []))
            if not raised.exists() or durable is None or not (victims or deaths):
                raise RuntimeError(
                    f"{task}: round {number} left"
                    f" nothing\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
                )
            at = int(raised.read_text())
            found.append(Raise(task, (durable - at) / _NS, (min([*victims, *deaths]) - at) / _NS))
        return found


async def _told(uri: str, s3: S3) -> dict[int, tuple[int | None, list[int]]]:
    """Return for each round when rank 3's first document was durable,
    and when other ranks failed or died.

    Nanoseconds since the Unix epoch.
    """
    durable: dict[int, int] = {}
    others: dict[int, list[int]] = defaultdict(list)
    options = {"key": s3.access_key, "secret": s3.secret_key, "endpoint_url": s3.endpoint}
    async with open_store(uri, options) as store:
        present = {item.name for item in await store.list(ERRORS)}
        for key in filter(None, map(ErrorKey.parse, present)):
            if key.rank != _RANK and key.timestamp_ns is not None:
                others[key.round].append(key.timestamp_ns)
        for item in [item for item in await store.list(ROSTER) if is_error_file(item.name)]:
            for receipt in decode_presence(
                await store.get(f"{ROSTER}/{item.name}"), item.name
            ).receipts:
                key = ErrorKey.parse(receipt.name)
                if key is None or receipt.rank != _RANK or receipt.fault_to_durable_ns is None:
                    continue
                assert receipt.name in present, "a receipt of what is not there"
                moment = (key.timestamp_ns or 0) + receipt.fault_to_durable_ns
                durable[key.round] = min(moment, durable.get(key.round, moment))
    return {number: (durable.get(number), others[number]) for number in durable}
