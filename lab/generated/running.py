"""Runs a generated training on two nodes that a process which has imported torch forks,
and judges the verdict.
"""

import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.launcher.api import LaunchConfig

import firstfault_torch.failures.capture
from firstfault import MultiErrorFileOutputReader
from firstfault.model import Scope, Verdict
from firstfault_torch import NodeFailedError, PlainEngine, launch
from lab.generated import shapes
from lab.generated.faults import Fault
from lab.generated.program import NODES, TIMEOUT_S, WORKERS, Plan, plan_of, source_of
from tests.processes import find_leftover_processes, find_running_processes, kill

_CLOCK = Path(__file__).parent / "clock"
_LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How firstfault judged one program."""

    result: str
    """"right", "partial" (some of the guilty), "story" (right ranks, wrong words), "undetermined",
    "wrong", "stuck".
    """
    confidence: str = ""
    said: str = ""
    """The headline."""
    expected: str = ""
    rule: str = ""
    seconds: float = 0.0
    left: tuple[str, ...] = ()
    """Commands of processes that the agents left."""
    agree: bool = True
    """Whether both nodes said the same."""
    why: tuple[str, ...] = field(default=())


def run(seed: int, folder: Path, timeout_s: int = TIMEOUT_S) -> Outcome:
    """Run a program and judge what firstfault says of it. Program, logs,
    documents and outcome stay in `folder`.
    """
    plan = plan_of(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(source_of(plan, timeout_s))
    (folder / "plan.json").write_text(json.dumps(plan.as_dict(), indent=1))
    port = get_free_port()
    fork = multiprocessing.get_context("fork").Process
    nodes = [fork(target=_node, args=(plan, number, port, folder)) for number in range(NODES)]
    began = time.monotonic()
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(max(0.0, began + _LONGEST_S - time.monotonic()))
    is_stuck = any(node.is_alive() for node in nodes)
    seconds = time.monotonic() - began
    sessions = {node.pid for node in nodes}
    left = {} if is_stuck else find_leftover_processes(sessions)
    kill(find_running_processes(sessions))
    for node in nodes:
        node.join()
    commands = tuple(sorted(command[:100] for command in left.values()))
    outcome = replace(
        judged(plan, folder, is_stuck=is_stuck), seconds=round(seconds, 2), left=commands
    )
    (folder / "outcome.json").write_text(json.dumps(asdict(outcome), indent=1))
    return outcome


def _node(plan: Plan, number: int, port: int, folder: Path) -> None:
    """Run a node in a session of its own."""
    os.setsid()
    log = os.open(folder / f"worker-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, stream)
    shift = plan.clocks[number]
    os.environ["GENERATED_CLOCK_S"] = str(shift)  # for the recorder, which is a new process
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(_CLOCK), os.environ.get("PYTHONPATH", "")]
    ).rstrip(os.pathsep)
    _loaded("generated_clock", _CLOCK / "sitecustomize.py")
    firstfault_torch.failures.capture.read_boot_id = lambda: f"boot-of-worker-{number}"
    os.chdir(folder)
    endpoint: dict[str, Any] = {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": f"127.0.0.1:{port}",
        "run_id": "generated",
    }
    endpoint |= {
        "start_method": "fork",
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "local_addr": "127.0.0.1",
    }
    config = LaunchConfig(NODES, NODES, WORKERS, **endpoint)
    try:
        launch(
            config,
            _train,
            str(folder / "train.py"),
            engine=PlainEngine(str(folder), node=f"worker-{number}"),
        )
    except NodeFailedError as error:
        print(f"verdict: {error}", flush=True)


def _train(program: str) -> None:
    _loaded("train", program).main()


def _loaded(name: str, file: str | Path) -> Any:
    """Return a file's module; processes that it starts look its functions up by its name."""
    specification = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def judged(plan: Plan, folder: Path, *, is_stuck: bool = False) -> Outcome:
    """Return how firstfault judges the documents of a program that has run.

    A rank that was stopped before it met its fault is not guilty.
    """
    met = {
        rank: skew
        for rank, skew in zip(plan.guilty, plan.skew, strict=True)
        if (folder / f"met-{rank}").exists()
    }
    if met:
        plan = replace(plan, guilty=tuple(met), skew=tuple(met.values()))
    expected = f"ranks {list(plan.guilty)}: {plan.fault}" if plan.what is not None else "no failure"
    if is_stuck:
        return Outcome("stuck", expected=expected)
    # with its name, the current rules judge, not those that sealed the verdict
    reader = MultiErrorFileOutputReader(
        str(folder / "0"), strategy="evidence", expected_nodes=NODES
    )
    conclusion = reader.conclude()
    if conclusion is None:
        return Outcome(
            "right" if plan.what is None else "wrong", said="no failure", expected=expected
        )
    verdict = conclusion.verdict
    result, reason = _result(plan, verdict, reader.report(conclusion).answers.code, folder)
    if (
        result in {"right", "partial"}
        and plan.what is not None
        and plan.what.retry is not None
        and not plan.once
    ):
        is_sought = conclusion.decision.retry == plan.what.retry
        result, reason = (
            (result, reason) if is_sought else ("story", f"retry: {conclusion.decision.retry}")
        )
    return Outcome(
        result,
        verdict.confidence,
        f"{verdict.headline} ({verdict.category})",
        f"{expected}; {reason}".rstrip("; "),
        getattr(verdict, "rule", ""),
        agree=_agree(folder),
        why=verdict.why,
    )


def _result(plan: Plan, verdict: Verdict, code: str, folder: Path) -> tuple[str, str]:
    """Return the outcome, and what is wrong with it."""
    fault = plan.what
    if fault is None:
        return "wrong", "nothing failed"
    if verdict.scope is Scope.UNDETERMINED:
        return "undetermined", ""
    if fault.scope == "node":
        is_named = verdict.node in plan.nodes and not verdict.ranks
        return ("right" if is_named else "wrong"), ""
    if plan.fault == "mismatch":
        return _of_mismatch(plan, verdict)
    named = set(verdict.ranks)
    if not named or not named <= set(plan.guilty):
        return "wrong", ""
    if wrong := _wrong_words(plan, fault, verdict, code, folder):
        return "story", wrong
    if plan.fails_at_once and named != set(plan.guilty):
        # of exceptions on their way out the worker knows; processes that end within the same moment
        # are a race
        return (
            "story" if verdict.confidence == "high" and fault.raises else "partial"
        ), "failed at once"
    return ("right" if named == set(plan.guilty) else "partial"), ""


def _wrong_words(plan: Plan, fault: Fault, verdict: Verdict, code: str, folder: Path) -> str:
    """Return what is wrong with the words of a verdict whose ranks are right; empty: nothing."""
    if _diverges(plan):
        return ""
    shown = f"{verdict.headline}\n{verdict.message.splitlines()[0] if verdict.message else ''}"
    said = ("hang",) if fault.said and fault.hangs else fault.said
    if (plan.fault, plan.place) == ("chained", "save"):
        said = ("no index",)  # torch's checkpoint tells the other ranks only what was raised last
    if said and not any(text.lower() in shown.lower() for text in said):
        return f"headline without {said[0]!r}"
    if verdict.category not in (*fault.categories, *_more_categories(plan)):
        return f"category {verdict.category}"
    has_code = fault.hangs or (fault.raises and fault.has_code and not _more_categories(plan))
    if has_code and fault.said and not _is_in_fault(code, folder):
        return f"code {code!r}"
    return ""


def _diverges(plan: Plan) -> bool:
    """Whether a rank handles its fault and tries again alone: what fails then is true, too."""
    return plan.wrapper in shapes.TRIED_TRAININGS or (
        plan.loop in shapes.TRIED_STEPS and plan.place != "data"
    )


def _more_categories(plan: Plan) -> tuple[str, ...]:
    """Return what else is true of a fault: its thread died and the rank waits,
    or only a line was printed.
    """
    is_in_thread = plan.loop == "prefetch" and plan.place in {"data", "thread"}
    return ("hang",) * is_in_thread + ("exit",) * (plan.wrapper == "exits-with-word")


def _of_mismatch(plan: Plan, verdict: Verdict) -> tuple[str, str]:
    """Which of two ranks passed the wrong shape may be unknowable: then both are named,
    not with high confidence.
    """
    named = set(verdict.ranks) | {suspect.rank for suspect in verdict.suspects}
    if set(verdict.ranks) == set(plan.guilty):
        return "right", ""
    if set(plan.guilty) <= named and verdict.confidence != "high":
        return "partial", "one of two"
    return "wrong", ""


def _is_in_fault(code: str, folder: Path) -> bool:
    """Whether a place, "train.py:41 in fault", is in the function `fault`,
    or in one that it defines.
    """
    lines = (folder / "train.py").read_text().splitlines()
    first = lines.index("def fault():") + 1
    last = next(
        number
        for number, line in enumerate(lines, 1)
        if number > first and line and not line[0].isspace()
    )
    number = code.partition(":")[2].partition(" ")[0]
    return code.startswith("train.py:") and number.isdigit() and first < int(number) < last


def _agree(folder: Path) -> bool:
    said = set()
    for log in folder.glob("worker-*.log"):
        said |= {
            line
            for line in log.read_text(errors="replace").splitlines()
            if line.startswith("verdict: ")
        }
    return len(said) <= 1
