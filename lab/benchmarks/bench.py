"""Everything that firstfault claims about speed, measured side by side in one run: ``make bench``.

    python lab/benchmarks/bench.py [--repeat N] [--seconds N] [--out FOLDER] [PART...]

Prints a table for each part; figures go to bench.json in the folder, the growth of reading to
growth.svg.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

from lab.benchmarks import (  # noqa: E402 - only now all is found
    failing,
    launching,
    reading,
    write_ahead,
)
from tests.s3_server import S3, serving  # noqa: E402

_RAISES = 34
"""Rounds of each of the three ways to raise."""
_SPAWNED = 5
_KEYS = 100_000
_IMPORTS = {
    "flytekit": "import flytekit",
    "ours": "from flytekitplugins.firstfault import Elastic",
    "kfpytorch": "from flytekitplugins.kfpytorch import Elastic",
}


def read(s3: S3, repeat: int, out: Path) -> list[dict[str, Any]]:
    """Read cascades of 1 to 10,000 documents in several ways."""
    rows = []
    print(f"\nread: medians of {repeat}, roster included for ours; requests of one read")
    print(
        f"{'documents':>9} {'delay':>6}  {'way':26} {'seconds':>8} {'x floor':>8} {'requests':>9}"
    )
    for row in reading.rows(s3, repeat):
        rows.append(row)
        floor = next(
            item.seconds
            for item in reversed(rows)
            if item.way == "floor"
            and (item.documents, item.delay_ms) == (row.documents, row.delay_ms)
        )
        mark = "  (scaled from 100 documents)" if row.scaled else ""
        print(
            f"{row.documents:9,} {row.delay_ms:4.0f}ms  {row.way:26} {row.seconds:8.3f}"
            f" {row.seconds / floor:8.1f} {row.requests:9,}{mark}",
            flush=True,
        )
    (out / "growth.svg").write_text(reading.drawing(rows))
    return [asdict(row) for row in rows]


def memory(s3: S3, _repeat: int, _out: Path) -> list[dict[str, Any]]:
    """Judge a cascade of 100,000 workers, each strategy in its own process."""
    found = reading.memory(s3, _KEYS)
    print("\nmemory: one run each, the whole process at its highest")
    for item in found:
        print(
            f"{item['documents']:,} documents, {item['strategy']}: {item['megabytes']:.0f} MB,"
            f" {item['seconds']:.1f} s"
        )
    return found


def ahead(s3: S3, _repeat: int, _out: Path) -> list[dict[str, Any]]:
    """Raise in many rounds, and record which comes first: the durable document or a victim."""
    found = []
    print("\nwrite-ahead, S3: milliseconds after the raise, medians")
    print(
        f"{'task':12} {'started':8} {'delay':>6} {'raises':>7} {'durable':>8} {'slowest':>8}"
        f" {'victim':>8}  before it"
    )
    plan = [
        ("fork", 0, _RAISES),
        ("fork", 20, _SPAWNED),
        ("spawn", 0, _SPAWNED),
        ("spawn", 20, _SPAWNED),
    ]
    for method, delay, count in plan:
        for task in write_ahead.TASKS:
            taken = write_ahead.raises(s3, task, count, delay_ms=delay, start_method=method)
            durable, victim = (
                [1000 * item.durable for item in taken],
                [1000 * item.first_victim for item in taken],
            )
            before = sum(item.durable < item.first_victim for item in taken)
            row = {
                "task": task,
                "method": method,
                "delay_ms": delay,
                "durable_ms": durable,
                "victim_ms": victim,
            }
            found.append({**row, "before": before, "raises": len(taken)})
            usual = statistics.median(durable)
            print(
                f"{task:12} {method:8} {delay:4}ms {len(taken):7} {usual:8.1f} {max(durable):8.1f} "
                f"{statistics.median(victim):8.1f}  {before} of {len(taken)}",
                flush=True,
            )
    return found


def fail(s3: S3, repeat: int, _out: Path) -> list[dict[str, Any]]:
    """Let rank 3 of 2 x 2 raise, with firstfault and with kfpytorch in turn."""
    found = []
    print(f"\nfail: 2 x 2, gloo, seconds after the raise, medians of {repeat}")
    print(
        f"{'task':14} {'store':7} {'started':8} {'durable':>8} {'verdict':>8} {'pods ended':>11} "
        " right"
    )
    for method in ("spawn", "fork"):
        for store in ("s3", "folder"):
            samples = _in_turn(failing.FAILING, s3, store, method, repeat)
            for name, taken in samples.items():
                durable, verdict, ended = (
                    statistics.median(getattr(sample, what) for sample in taken)
                    for what in ("durable", "verdict", "ended")
                )
                right = sum(sample.right for sample in taken)
                found += [{"store": store, "method": method, **asdict(sample)} for sample in taken]
                line = f"{name:14} {store:7} {method:8} {durable:8.3f} {verdict:8.2f} {ended:11.2f}"
                print(f"{line}  {right} of {len(taken)}", flush=True)
    return found


def succeed(s3: S3, repeat: int, _out: Path) -> list[dict[str, Any]]:
    """Let 2 x 2 succeed, with firstfault and kfpytorch in pairs."""
    samples = _in_turn(failing.SUCCEEDING, s3, "s3", "spawn", repeat)
    ours, stock = (samples[name] for name in failing.SUCCEEDING)
    walls = [one.ended / other.ended for one, other in zip(ours, stock, strict=True)]
    cpus = [one.cpu / other.cpu for one, other in zip(ours, stock, strict=True)]
    print(f"\nsucceed: 2 x 2, S3, {repeat} pairs, ours to kfpytorch")
    for what, ratios, field in (("wall", walls, "ended"), ("CPU", cpus, "cpu")):
        one, other = (
            statistics.median(getattr(sample, field) for sample in taken) for taken in (ours, stock)
        )
        print(
            f"{what:5} median ratio {statistics.median(ratios):.3f} ({one:.2f} s to {other:.2f} s)"
        )
    return [asdict(sample) for taken in samples.values() for sample in taken]


def imports(_s3: S3, repeat: int, _out: Path) -> list[dict[str, Any]]:
    """Time the import of each plugin, and ``firstfault show`` of a small attempt,
    in new processes.
    """
    taken: dict[str, list[float]] = defaultdict(list)
    commands = {name: [sys.executable, "-c", code] for name, code in _IMPORTS.items()}
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/run"
        reading.put_all(prefix, reading.Cascade(4))
        commands["firstfault show"] = [sys.executable, "-m", "firstfault", "show", prefix]
        for _ in range(max(repeat, 5)):
            for name, command in commands.items():
                began = time.perf_counter()
                subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
                taken[name].append(time.perf_counter() - began)
    print(f"\nstart: whole processes, medians of {max(repeat, 5)}")
    for name, seconds in taken.items():
        ratios = [one / base for one, base in zip(seconds, taken["flytekit"], strict=True)]
        print(
            f"{name:18} {statistics.median(seconds):6.3f} s, {statistics.median(ratios):.2f} of"
            " importing flytekit"
        )
    return [{"what": name, "seconds": seconds} for name, seconds in taken.items()]


def torchrun(_s3: S3, repeat: int, _out: Path) -> list[dict[str, Any]]:
    """Let a job of torchrun succeed, with firstfault and without it in pairs."""
    samples: dict[str, list[launching.Sample]] = {way: [] for way in launching.WAYS}
    for number in range(repeat):
        for way in list(launching.WAYS)[:: 1 if number % 2 else -1]:
            samples[way].append(launching.run(way, 2.0))
    ours, plain = samples["firstfault"], samples["torchrun"]
    same = sum(one.output == other.output for one, other in zip(ours, plain, strict=True))
    print(f"\ntorchrun: 2 x 2, {repeat} pairs; output the same in {same}")
    for what in ("wall", "first_line"):
        pairs = [
            (getattr(one, what), getattr(other, what))
            for one, other in zip(ours, plain, strict=True)
        ]
        one, other = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratio, more = (
            statistics.median(f(*pair) for pair in pairs)
            for f in (float.__truediv__, float.__sub__)
        )
        print(
            f"{what:10} median ratio {ratio:.3f}, difference {more:+.3f} s ({one:.2f} s to"
            f" {other:.2f} s)"
        )
    return [sample.as_dict() for taken in samples.values() for sample in taken]


def healthy(_s3: S3, _repeat: int, _out: Path) -> list[dict[str, Any]]:
    """Train for a while with firstfault and without it at the same time;
    print what a node uses without its workers.
    """
    with ThreadPoolExecutor(2) as pool:
        samples = list(pool.map(launching.run, launching.WAYS, [launching.HEALTHY_S] * 2))
    print(f"\nhealthy: 2 x 2 for {launching.HEALTHY_S:g} s; a node without its workers")
    print(
        f"{'':12} {'RSS MB':>8} {'PSS MB':>8} {'CPU s start':>12} {'then':>8} {'threads':>8}"
        f" {'processes':>10}"
    )
    for sample in samples:
        for used in sample.used:
            figures = (
                f"{used.rss_mb:8.0f} {used.pss_mb:8.0f} {used.start_cpu_s:12.2f} {used.cpu_s:8.2f}"
            )
            print(f"{sample.way:12} {figures} {used.threads:8} {used.processes:10}")
    return [sample.as_dict() for sample in samples]


def _in_turn(
    names: tuple[str, ...],
    s3: S3,
    store: str,
    method: str,
    repeat: int,
) -> dict[str, list[failing.Sample]]:
    samples: dict[str, list[failing.Sample]] = {name: [] for name in names}
    for _ in range(repeat):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                prefix = s3.uri(name) if store == "s3" else f"{folder}/out"
                settings = s3.environment() if store == "s3" else {}
                samples[name].append(
                    failing.run(name, Path(folder), prefix, method=method, settings=settings)
                )
    return samples


PARTS: dict[str, Callable[[S3, int, Path], list[dict[str, Any]]]] = {
    "read": read,
    "memory": memory,
    "write-ahead": ahead,
    "fail": fail,
    "succeed": succeed,
    "imports": imports,
    "torchrun": torchrun,
    "healthy": healthy,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="all by default")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the part `healthy`")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench")
    options = parser.parse_args(arguments)
    launching.HEALTHY_S = options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python"
        f" {platform.python_version()}"
    )
    print(machine)
    file = options.out / "bench.json"
    figures = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as s3:
        for name in options.parts or PARTS:
            figures[name] = {
                "machine": machine,
                "repeat": options.repeat,
                "rows": PARTS[name](s3, options.repeat, options.out),
            }
            file.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\nfigures: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
