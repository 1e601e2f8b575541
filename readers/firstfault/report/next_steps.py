"""What to do next: advice, and commands to copy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from firstfault.evidence.certain_bugs import find_advice_on_bug, find_missing_program
from firstfault.evidence.library_calls import is_about_loader_process
from firstfault.evidence.texts import find_message, has_reached_end, is_unsendable_result
from firstfault.exceptions.stack_position import PositionKind, locate_main_thread
from firstfault.model import JobErrors, Scope
from firstfault.model.failure import (
    CANCELLED,
    CTRL_C,
    FROM_OUTSIDE,
    HANGUP,
    PREEMPTED,
    REQUEUED,
    TEARDOWN,
)
from firstfault.report.case import Case, find_machine
from firstfault.report.fault_owner import describe_fault_owner
from firstfault.report.formatting import shorten_list
from firstfault.strategies.headlines import NO_PROGRESS
from firstfault.utils.text import one_line

_MAX_LOG_COMMANDS = 4
"""Maximum number of nodes with a command for their logs, if the root cause is unknown."""
_MACHINE_CATEGORIES = {"signal", "gpu_hardware", "host_oom", "node_lost"}
"""Categories that the machine may cause."""
_EVENT_CATEGORIES = {"node_lost", *FROM_OUTSIDE, "host_oom", "infrastructure"}
"""Categories that the platform's events explain better than the log."""
_UNDETERMINED_ADVICE = "compare the stacks and logs of all ranks"


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do next."""

    text: str
    command: str = ""
    """A shell command; empty if there is none."""


def find_next_steps(case: Case, code: str) -> Iterator[Step]:
    """Yield the advice, then commands that show more; `code` is the place in the program,
    "train.py:41 in step".
    """
    job, verdict, engine = case.job, case.verdict, case.engine
    advice = _give_advice(case, code)
    # an advice that ends in "all were at" continues with the place: "... all were at train.py:41 in
    # step"
    yield Step(f"{advice}{'' if advice.endswith(' at') else ':'} {code}" if code else advice)
    # the pods of a job share their namespace
    places = [*([verdict.root.place] if verdict.root is not None else []), *job.places]
    namespace = next((place.namespace for place in places if place.namespace), "")
    engine = engine if _may_be_on_kubernetes(job) else replace(engine, has_kubectl=False)
    machine = find_machine(job, verdict) if verdict.category in _MACHINE_CATEGORIES else ""
    if command := engine.kubectl("describe node {}", machine):
        yield Step("its machine's events", command)
    # the root cause's node, else the suspects' nodes, else the nodes that failed
    named = [verdict.node] if verdict.node else [suspect.node for suspect in verdict.suspects]
    nodes = dict.fromkeys(
        named or sorted((failure.node for failure in job.failures), key=_split_numbers)
    )
    # the names come from documents, and people paste these commands into a shell: paths are quoted,
    # and `kubectl` refuses what isn't the name of a pod
    for node in [node for node in nodes if node][:_MAX_LOG_COMMANDS]:
        if node in case.logs:
            yield Step(engine.log, f"less {shlex.quote(case.logs[node])}")
        elif log := engine.kubectl("logs {}", node, namespace):
            if verdict.category in _EVENT_CATEGORIES:
                events = "get events --field-selector involvedObject.name={}"
                yield Step(engine.events, engine.kubectl(events, node, namespace))
            yield Step(engine.log, log)
    if case.uri:
        yield Step("more", f"firstfault show {shlex.quote(case.uri)}")


def _split_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "worker-2" before "worker-10"."""
    return [
        (int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d{1,9})", name)
    ]


def _may_be_on_kubernetes(job: JobErrors) -> bool:
    """Whether nothing shows that the nodes are no pods: one with its host's name, and no namespace,
    is a machine.
    """
    known = [place for place in job.places if place.host]
    # in a cluster, Flyte 1's pods have a namespace
    return not known or any(
        place.namespace
        or place.machine
        or (place.host != place.node and place.engine not in {"", "flyte"})
        for place in known
    )


_ADVICE_BY_CODE = {
    CANCELLED: "resume from a checkpoint",
    CTRL_C: "resume from a checkpoint",
    HANGUP: "start the job in tmux or with setsid (torchrun handles SIGHUP itself, despite nohup)",
    PREEMPTED: "check the queue: the scheduler may have requeued the job already",
    REQUEUED: "wait for the scheduler, which has requeued the job",
}
"""What to do after a job was ended from outside, by the verdict's code."""


_VENDOR_TOOLS = (
    (
        re.compile(r"\b(?:HIP|ROCm|RCCL|amdgpu|HSA_STATUS_\w+|hip[A-Z]\w+)\b"),
        {"CUDA_LAUNCH_BLOCKING=1": "AMD_SERIALIZE_KERNEL=3", "Xid errors": "amdgpu's errors"},
    ),
    (
        re.compile(r"\b(?:HCCL|Ascend|torch_npu|npu:\d|ACL stream)\b"),
        {
            "CUDA_LAUNCH_BLOCKING=1": "ASCEND_LAUNCH_BLOCKING=1",
            "Xid errors": "errors of the NPU (npu-smi info)",
        },
    ),
    (
        re.compile(r"\b(?:HPU|hpu:\d|Gaudi|habana\w*)\b", re.IGNORECASE),
        {
            "CUDA_LAUNCH_BLOCKING=1": "ENABLE_CONSOLE=true LOG_LEVEL_ALL=4",
            "Xid errors": "errors of habanalabs (hl-smi)",
        },
    ),
)
"""Patterns of other vendors' texts, each with replacements for NVIDIA's names in advice."""


def _give_advice(case: Case, code: str) -> str:
    verdict, root = case.verdict, case.verdict.root
    _, advice = describe_fault_owner(verdict.category, case.engine)
    # from the special case to the general one; the advice of the category is the last resort
    if verdict.category == TEARDOWN:
        return advice
    if verdict.is_at_time_limit:
        return (
            "find out why the job made no progress before you raise the time limit"
            if NO_PROGRESS in verdict.headline
            else "raise the time limit, or resume from a checkpoint"
        )
    if verdict.code in _ADVICE_BY_CODE:
        return _ADVICE_BY_CODE[verdict.code]
    if case.is_alone:
        return f"read the text below: {advice}"
    if verdict.scope is Scope.UNDETERMINED:
        if code:
            # a log may not show all ranks
            number = len(case.job.failures)
            size = case.job.size
            is_of_all = not case.engine.cites or (
                size is not None and size.ranks == number and not size.at_least
            )
            return f"{_UNDETERMINED_ADVICE}: {'all' if is_of_all else f'{number} of them'} were at"
        return ": ".join(filter(None, [_UNDETERMINED_ADVICE, ", ".join(_list_positions(case.job))]))
    if special_advice := _advise_on_end(case, code) or (find_advice_on_bug(root) if root else ""):
        return special_advice
    if verdict.category == "hang" and not code:
        return "check its node, its GPU and the storage that it reads from: it didn't respond"
    if root is not None and root.signal == "SIGKILL" and verdict.category == "signal":
        return "find out what killed it: check the node's events and the kernel log"
    return (
        advice if root is None else _name_tool_of_vendor(advice, f"{root.message}\n{root.printed}")
    )


def _advise_on_end(case: Case, code: str) -> str:
    """Return the advice about a rank that ended on its own, without an error, or an empty string
    for any other failure.
    """
    root = case.verdict.root
    if root is not None and (program := find_missing_program(root)) is not None:
        what = "the name of the module" if program.is_module else "the path of the script"
        return f"correct {what}: {one_line(program.name)} doesn't exist"
    # this rank had left the training while its peers still waited for it
    if root is not None and (locate_main_thread(root).exit_stage or has_reached_end(root)):
        return (
            "find out why this rank ran fewer steps than its peers: fewer batches, or an early"
            " return"
        )
    raised = root.exception if root is not None else None
    if case.verdict.category == "signal" and raised is not None and is_about_loader_process(raised):
        return (
            "check the memory and /dev/shm of its node, which a killed data loader process has often"
            " used up"
        )
    if root is not None and is_unsendable_result(root):
        return "return a value that pickle can write, such as the path of a file"
    if case.verdict.category != "exit":
        return ""
    # the line that called sys.exit is known, and no log has more
    if code:
        return "open the code that exited"
    # the last line of its output
    return (
        "find where the program prints this" if root is not None and find_message(root).text else ""
    )


def _name_tool_of_vendor(advice: str, text: str) -> str:
    """Return advice about a GPU with the names that its vendor uses."""
    for vendor, replacements in _VENDOR_TOOLS:
        if vendor.search(text):
            for nvidia, other in replacements.items():
                advice = advice.replace(nvidia, other)
            break
    return advice


def _list_positions(job: JobErrors) -> list[str]:
    """Return the positions of ranks outside of collectives: "rank 0 was at train.py:12 in load"."""
    positions = (
        (failure.rank, locate_main_thread(failure))
        for failure in job.failures
        if failure.rank is not None
    )
    away = [
        (rank, position.description)
        for rank, position in positions
        if position.kind is PositionKind.ELSEWHERE and position.frame
    ]
    return shorten_list(
        [f"rank {rank} {doing.removeprefix('it ')}" for rank, doing in sorted(away)],
        _MAX_LOG_COMMANDS,
    )
