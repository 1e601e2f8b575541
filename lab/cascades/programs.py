"""Runs the lab's trainings as programs under torchrun, and judges how their jobs end."""

import json
from pathlib import Path
from typing import Any

from firstfault.layout import is_bundle
from firstfault.strategies import get_strategy, run_strategy
from firstfault.wire.documents import unpack
from lab.cascades.cases import NCCL, Case
from lab.cascades.injecting import clock_variables
from lab.cascades.replay import Files, build_job, is_decided_right, judge, on_own_machines
from tests.torchrun.nodes import Job, run_job

HERE = Path(__file__).parent
_KILLED_AGENTS = ("agent-killed", "store-killed", "node-killed")


def run_program(case: Case, folder: Path, common: str = "") -> Job:
    """Run a case with a program as its training; its files are in a folder. ValueError:
    nothing was injected.
    """
    assert case.way is not None
    environments = {}
    if case.clock is not None:
        node, seconds = case.clock
        (folder / "marks").mkdir()
        clock = clock_variables(seconds, str(faketime()), folder / "marks" / "clock")
        environments[node] = {**clock, "LAB_CLOCK": f"-{node} {seconds:+g}"}
    inputs = {"kind": case.fault.removeprefix(NCCL), "culprit": case.culprit, **case.inputs}
    program = HERE / ("nccl_training.py" if case.is_nccl else "training.py")
    options = [
        f"--nproc-per-node={case.per_node}",
        *["--max-restarts=1"] * (case.task == "restarted"),
    ]
    job = run_job(
        folder,
        [str(program), json.dumps(inputs)],
        case.way,
        nodes=case.nodes,
        options=options,
        environments=environments,
        common=common,
    )
    if not job.truths:
        raise ValueError(f"nothing was injected: {job.nodes}")
    return job


def files_of(job: Job) -> Files:
    """Return all files of a job in local folders; if each node has its own,
    those of the node with the most.
    """
    return max((_with_copies(Path(prefix)) for prefix in job.prefixes), key=len)


def in_folder(prefix: Path) -> Files:
    """Return the documents and roster entries below an output prefix."""
    return {
        str(path.relative_to(prefix)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted((prefix / "firstfault").glob("*/*.pb"))
    }


def _with_copies(prefix: Path) -> Files:
    """Return also what other nodes have handed over."""
    copies: Files = {}
    for path in (prefix / "firstfault" / "roster").iterdir():
        if is_bundle(path.name):
            found = unpack(path.read_bytes())
            copies |= {
                f"firstfault/{name}": (data, None)
                for name, data in found.items()
                if name.endswith(".pb")
            }
    return copies | in_folder(prefix)


def complaints_of(case: Case, job: Job, files: Files) -> list[str]:
    """Return what is wrong with the end of a job, and with the verdict that its nodes print."""
    if case.scope == "none":
        return [f"exit code {node.code}" for node in job.nodes if node.code] + job.left
    found = job.find_problems(killed=int(case.fault.removeprefix(NCCL) in _KILLED_AGENTS))
    truth = truth_of(case, job.truths)
    read = build_job(files, case.nodes)
    verdicts = [
        run_strategy(get_strategy("evidence"), seen) for seen in (read, on_own_machines(read))
    ]
    for verdict in verdicts:
        if judge(truth, verdict) != "right" or not is_decided_right(truth, verdict):
            found.append(f"wrong: {verdict.headline}, {verdict.why}; {truth}")
    if verdicts[0].headline != job.alive[0].headline:
        found.append(f"printed {job.alive[0].headline}, read {verdicts[0].headline}")
    return found


def truth_of(case: Case, told: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "fault": case.fault,
        "scope": case.scope,
        "ranks": [item["rank"] for item in told],
        "nodes": sorted({item["node"] for item in told}),
        "nodes_of_job": case.nodes,
    }


def faketime() -> Path:
    """Return Debian's `faketime`, which makes one process's clock wrong. ValueError:
    it isn't installed.
    """
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not found:
        raise ValueError("needs libfaketime; apt-get install faketime")
    return found[0]
