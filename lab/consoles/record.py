"""Records what jobs without firstfault show on their console, with the injector's truth:
``make consoles``.

The lab's programs run under the launchers of ``plans.toml``. What each node printed, and when,
becomes some logs, in which the nodes' streams are merged as schedulers merge them. Logs that exist
are not recorded again. All are scored.
"""

import datetime as dt
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import tomllib
from torch.distributed.elastic.utils.distributed import get_free_port

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

from lab.consoles import score  # noqa: E402 - only now it is found
from tests.processes import find_running_processes, kill  # noqa: E402

Stream: TypeAlias = "list[tuple[float, bytes]]"
"""What a node printed, and when."""
HERE = Path(__file__).parent
PLANS: dict[str, Any] = tomllib.loads((HERE / "plans.toml").read_text(encoding="utf-8"))
GROUPS: dict[str, list[str]] = PLANS["groups"]
LONGEST_S, OTHERS_S = 150.0, 45.0
"""How long a job may take, and how long a node may live on after the first one has ended."""
STYLES = ("plain", "ranks", "logging", "json", "bar", "rich", "quiet")
VERSIONS = ("2.7", "2.13", "2.4", "2.1")


class Run(NamedTuple):
    """A training of which one or more logs are made; `faults` are those of its attempts."""

    name: str
    launcher: str
    faults: list[str]
    shapes: list[str]
    inputs: dict[str, Any]


def _listed(names: str) -> list[str]:
    return [name for word in names.split() for name in PLANS["lists"].get(word, word).split()]


def runs() -> Iterator[Run]:
    """Yield all runs, those of each launcher in turn;
    what varies without a plan depends on the name.
    """
    plans = PLANS["launchers"]
    faults = {launcher: _listed(plan["faults"]) for launcher, plan in plans.items()}
    for number in range(max(map(len, faults.values()))):
        for place, (launcher, plan) in enumerate(plans.items()):
            if number < len(faults[launcher]):
                attempts = faults[launcher][number].split(">")
                culprit = (3, 1, 2, 0)[(number + place) % 4]
                name = f"{launcher}-{'-then-'.join(attempts)}-rank{culprit}"
                shapes = _listed(plan["shapes"])
                count = plan["logs"]
                chance = zlib.crc32(name.encode())
                decoys = (
                    (culprit + 1) % 4
                    if attempts[-1].startswith("success") or chance % 4 == 0
                    else -1
                )
                nccl = VERSIONS[number % len(VERSIONS)] if launcher.endswith("nccl") else ""
                inputs = {
                    "culprit": culprit,
                    "style": STYLES[chance % len(STYLES)],
                    "decoys": decoys,
                    "nccl": nccl,
                }
                chosen = [shapes[(number * count + step) % len(shapes)] for step in range(count)]
                yield Run(name, launcher, attempts, chosen, inputs)


def truth_of(run: Run, told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is right to say of a run, from what the injector wrote in its last attempt;
    see `score.judge`.
    """
    fault = run.faults[-1]
    category, also, word = PLANS["faults"][fault]
    ranks = [] if fault in GROUPS["no_rank"] else sorted(item["rank"] for item in told)
    node = told[0]["node"] if told and fault not in {"deadlock", *GROUPS["several"]} else None
    truth = {
        "launcher": run.launcher,
        "fault": fault,
        "ranks": None if fault.startswith("success") else ranks,
        "node": node,
    }
    truth |= {"category": category, "also": also.split(), "word": word}
    # Slurm doesn't requeue what a user cancelled; a SIGTERM that reaches torchrun may be a drain
    is_retried = fault in GROUPS["retried"] and not (
        fault == "cancel" and run.launcher.startswith("srun")
    )
    return truth | {"any": fault in GROUPS["several"], "retry": is_retried}


def main(wanted: list[str]) -> int:
    """Record the missing logs whose names begin with one of `wanted`, or all, then score these."""
    starts = tuple(name for name in wanted if name != "-v") or ("",)
    for run in runs():
        missing = [shape for shape in run.shapes if f"{run.name}-{shape}" not in score.index()]
        if not missing or not run.name.startswith(starts):
            continue
        try:
            streams, told = record(run)
        except (OSError, ValueError) as error:
            print(f"{run.name}: NOT RECORDED: {error}", flush=True)
            continue
        for shape in missing:
            name = f"{run.name}-{shape}"
            (score.RECORDED / f"{name}.log.gz").write_bytes(
                gzip.compress(shaped(shape, streams), 9, mtime=0)
            )
            with score.INDEX.open("a") as index:
                index.write(json.dumps({"name": name, **truth_of(run, told)}) + "\n")
        print(f"{run.name}: {len(missing)} logs", flush=True)
    return score.main(wanted)


def record(run: Run) -> tuple[list[Stream], list[dict[str, Any]]]:
    """Run a job's attempts to their ends; return what each node printed, and the injector's truth.

    Raises:
        ValueError: nothing was injected, or the job did not end as it should.
    """
    streams: list[Stream] = [[] for _ in PLANS["launchers"][run.launcher]["nodes"]]
    then = {"then": run.faults[1]} if run.launcher == "torchrun-restart" else {}
    last = run.faults[-1]
    for fault in run.faults[: len(run.faults) - len(then)]:
        inputs = {**run.inputs, **then, "kind": "endless" if fault in GROUPS["external"] else fault}
        with tempfile.TemporaryDirectory(prefix="console-", ignore_cleanup_errors=True) as folder:
            printed, codes = run_job(run.launcher, fault, inputs, Path(folder))
            told = [
                json.loads(path.read_text()) for path in sorted(Path(folder).glob("truth-*.json"))
            ]
        streams = [before + after for before, after in zip(streams, printed, strict=True)]
    is_success = last.startswith("success")
    if any(codes) == is_success or not (told or is_success or last in GROUPS["external"]):
        text = shaped("node", streams)[-2000:].decode(errors="replace")
        raise ValueError(f"exit codes {codes}, truth {told}: {text}")
    return streams, told


def run_job(
    launcher: str,
    fault: str,
    inputs: dict[str, Any],
    folder: Path,
) -> tuple[list[Stream], list[int]]:
    """Start the launcher on each node, strike from outside if the fault does so,
    and wait for the end.
    """
    given = {
        "python": sys.executable,
        "root": ROOT,
        "here": HERE,
        "marks": folder,
        "port": get_free_port(),
    }
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FIRSTFAULT", "SLURM"))
    }
    environment |= {name: value.format(**given) for name, value in PLANS["environment"].items()}
    # not among the arguments, because some launchers print these
    environment |= {"LAB_INPUTS": json.dumps(inputs), "LAB_LAUNCHER": launcher}
    environment["MINUTES"] = "1" if fault == "time-limit" else "10"
    plan, jobs, readers, streams = PLANS["launchers"][launcher], [], [], []
    for number, node in enumerate(plan["nodes"]):
        job = subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", f"hostname {node}; exec {plan['command']}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**environment, "NODE": str(number), "IS_HOST": str(int(number == 0))},
            start_new_session=True,
        )
        jobs.append(job)
        streams.append([])
        readers.append(threading.Thread(target=_read, args=(job, streams[-1], folder)))
        readers[-1].start()
    try:
        if fault in GROUPS["external"]:
            _strike(fault, launcher, jobs, folder)
        deadline = time.monotonic() + LONGEST_S
        while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
            if any(job.poll() is not None for job in jobs):
                deadline = min(deadline, time.monotonic() + OTHERS_S)
            time.sleep(0.1)
    finally:
        kill(find_running_processes(variable=f"MARKS={folder}"))
        for reader in readers:
            reader.join()
    if (folder / "slurm.out").exists():
        streams = [[(time.time(), neutral((folder / "slurm.out").read_bytes(), folder))]]
    return streams, [job.wait() for job in jobs]


def _read(job: subprocess.Popen[bytes], stream: Stream, folder: Path) -> None:
    with job.stdout:
        while data := os.read(job.stdout.fileno(), 1 << 16):
            stream.append((time.time(), neutral(data, folder)))


def neutral(data: bytes, folder: Path) -> bytes:
    """Return bytes without the recording machine's paths."""
    for path, name in ((folder, b"/tmp/job"), (ROOT, b"/app"), (sys.base_prefix, b"/usr")):
        data = data.replace(str(path).encode(), name)
    return data


def _strike(fault: str, launcher: str, jobs: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """End a job from outside once it trains; Slurm knows the time limit itself."""
    deadline = time.monotonic() + LONGEST_S / 2
    while not (folder / "step-0-4").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if launcher.startswith("srun"):
        signalled = {"ctrl-c": ["--signal=INT"], "cancel": [], "time-limit": ["--state=PENDING"]}[
            fault
        ]
        configured = {
            **os.environ,
            "SLURM_CONF": PLANS["environment"]["SLURM_CONF"].format(root=ROOT),
        }
        subprocess.run(["scancel", "--name=train", *signalled], env=configured, check=True)
        return
    for job in jobs:
        if fault == "ctrl-c":
            os.killpg(job.pid, signal.SIGINT)
        else:
            job.terminate()


def shaped(shape: str, streams: list[Stream]) -> bytes:
    """Return a log: the nodes' streams, merged as `shape` says; see plans.toml."""
    pieces: Stream = []
    for number, stream in enumerate(streams):
        if shape in {"time", "node"}:
            pieces += stream
        elif shape == "buffer":
            pieces += _cut(stream, rb"(?s).{4096}")
        else:
            pieces += [
                (when, _line(shape, number, when, line))
                for when, line in _cut(stream, rb"[^\n]*\n")
            ]
    return b"".join(
        data for _, data in (pieces if shape == "node" else sorted(pieces, key=itemgetter(0)))
    )


def _cut(stream: Stream, into: bytes) -> Iterator[tuple[float, bytes]]:
    """Yield pieces that match a pattern, each when its last byte came, and the rest."""
    held = b""
    for when, data in stream:
        held += data
        for piece in re.findall(into, held):
            yield when, piece
            held = held[len(piece) :]
    if held:
        yield stream[-1][0], held


def _line(shape: str, number: int, when: float, line: bytes) -> bytes:
    stamp = dt.datetime.fromtimestamp(when, tz=dt.timezone.utc).isoformat()
    line = line.rstrip(b"\n") + b"\n"
    if shape == "json":
        pod = {"pod_name": f"llama-worker-{number}", "container_name": "pytorch"}
        found = {
            "log": line.decode(errors="replace"),
            "stream": "stderr",
            "time": stamp,
            "kubernetes": pod,
        }
        return json.dumps(found).encode() + b"\n"
    node = "gpu-a" if number == 0 else "gpu-b"
    return (
        PLANS["shapes"][shape]
        .format(number=number, next=number + 1, node=node, stamp=stamp)
        .encode()
        + line
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
