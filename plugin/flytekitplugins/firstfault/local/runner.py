"""Runs attempts: starts and watches the pods like the operator, reads, decides, and retries."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from firstfault.conclude import Conclusion
from firstfault.errors import StoreError, UsageError
from firstfault.model import Origin, Seal, WorkerError
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.retry import RetryContext, find_machine
from firstfault.run_folder import begin_run
from firstfault.store import is_remote, join
from firstfault.strategies import get_strategy
from firstfault.utils.text import counted
from firstfault_torch.agent.deaths import signal_name
from firstfault_torch.guard import try_call
from firstfault_torch.node.document_writer import put_file
from firstfault_torch.places import TIME_LIMIT_VARIABLE
from flytekitplugins.firstfault.config import (
    RETRIES_VARIABLE,
    STRATEGY_VARIABLE,
    PyTorch,
    parse_nnodes,
)
from flytekitplugins.firstfault.flyte_engine import writes_error_file_per_pod
from flytekitplugins.firstfault.local import loading, shown
from flytekitplugins.firstfault.local.pods import (
    JobState,
    Pod,
    elastic_environment,
    end_all,
    error_seen,
    free_port,
    job_state,
    start_pod,
)
from flytekitplugins.firstfault.local.stall_lines import StallLines

_PODS_POLL_SECONDS = 0.02
_ORPHANS_TIMEOUT_SECONDS = 5.0
"""How long processes of an ended pod may run."""
_LINGER_TIMEOUT_SECONDS = 20.0
"""How long other pods may run after the job has ended, in addition to `settle_seconds`, seconds."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The user's options. An option that is None has the task's own value."""

    file: Path
    task: str
    nodes: int | None = None
    inputs: str | None = None
    store: str = ".firstfault/runs"
    environment: Mapping[str, str] = field(default_factory=dict)
    retries: int | None = None
    system_retries: int = 3
    strategy: str | None = None
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """A running attempt."""

    number: int
    pods: tuple[Pod, ...]
    reader: MultiErrorFileOutputReader
    """Reads the attempt's output prefix, which may still be empty."""
    started: float
    """Seconds, by `time.monotonic`."""


Tell = Callable[[str], None]
"""Gets a line about each step."""
Look = Callable[[Running], AbstractContextManager[object]]
"""What it returns is open while the pods of an attempt run."""


@dataclass(frozen=True, slots=True)
class LocalAttempt:
    """One attempt and its result."""

    number: int
    status: str
    """"succeeded", "failed" or "timeout"."""
    prefix: str
    """The output prefix."""
    errors_uri: str
    conclusion: Conclusion | None
    job: JobState | None
    """The job's final state, or None if the job didn't end within the timeout."""
    seen: WorkerError | Seal | None
    """The error that stock Flyte read when the job ended."""
    total_seconds: float
    seconds_after_fault: dict[str, float | None]
    """Seconds from the fault until the root cause's document was "durable", the "verdict" was
    sealed, and the last pod had "ended" unaided. None if unknown, or if a pod had to be killed.
    """
    logs: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class RunResult:
    """All attempts of a run."""

    status: str
    attempts: tuple[LocalAttempt, ...]
    outputs: dict[str, Any]
    folder: Path
    """The run's folder on this machine."""
    missing_outputs: tuple[str, ...] = ()
    """Outputs that the task declares and didn't return, of a run that succeeded:
    Flyte only checks that there is a file of outputs.
    """


@dataclass(frozen=True, slots=True)
class _Plan:
    """The data that all attempts of a run share."""

    task: loading.TrainingTask
    command: loading.Command
    root: Path
    name: str
    base: str
    folder: Path
    """The run's folder on this machine, for the pods' logs and the report."""
    nodes: str
    pods: int
    retries: int
    settings: RunSettings

    @property
    def logs(self) -> Path:
        return self.folder if is_remote(self.base) else self.folder / "logs"

    def time_limit_file(self, number: int) -> Path:
        """The file that exists as soon as an attempt has reached its time limit."""
        return self.logs / f"attempt-{number}" / "time-limit"

    def prefix(self, number: int) -> str:
        """The output prefix of an attempt."""
        return join(self.base, str(number))

    @property
    def has_master(self) -> bool:
        return isinstance(self.task.task_config, PyTorch)


def run_task(
    settings: RunSettings, tell: Tell = lambda _: None, look: Look = contextlib.nullcontext
) -> RunResult:
    """Run a task to its end and return the result;
    all its processes have ended when this returns or raises.

    Raises:
        UsageError: the settings aren't valid.
        StoreError: the store can't be written or read.
    """
    plan = _make_plan(settings)
    # The lock on the mark keeps `firstfault prune` in another terminal from removing this run while
    # it is active.
    mark = begin_run(plan.folder)
    tell(f"run {plan.name}: {plan.pods} pods, store {shown(plan.base)}, logs {shown(plan.logs)}")
    attempts: list[LocalAttempt] = []
    used = {Origin.USER: 0, Origin.SYSTEM: 0}
    while True:
        retries_left = plan.retries - used[Origin.USER]
        try:
            attempt = _run_attempt(plan, attempts, retries_left, tell, look)
        except KeyboardInterrupt:
            # its pods have ended, and left their verdict
            prefix = shlex.quote(shown(plan.prefix(len(attempts))))
            tell(
                f"attempt {len(attempts)}: interrupted; to see what it did: firstfault show {prefix}"
            )
            raise
        attempts.append(attempt)
        if attempt.status != "failed" or attempt.conclusion is None:
            break
        decision = attempt.conclusion.decision
        budget, limit = Origin.USER, plan.retries
        if decision.origin is Origin.SYSTEM:
            budget, limit = Origin.SYSTEM, settings.system_retries
        if not decision.retry or used[budget] >= limit:
            break
        used[budget] += 1
        tell(f"retry {used[budget]} of {limit} on the {budget.value.lower()}'s budget")
    # Only after the last attempt. After an exception the kernel releases the lock when this process
    # ends.
    os.close(mark)
    last = attempts[-1]
    outputs = {}
    if last.status == "succeeded":
        values, error = _make_reader(plan, last.number).read()
        if values is None:
            raise UsageError(error.message if error else "the task left no outputs")
        outputs = loading.show_outputs(plan.task, values)
    declared = plan.task.python_interface.outputs if last.status == "succeeded" else ()
    missing = tuple(name for name in declared if name not in outputs)
    return RunResult(last.status, tuple(attempts), outputs, plan.folder, missing)


# --- the plan -------------------------------------------------------------------------------------


def _make_plan(settings: RunSettings) -> _Plan:
    if settings.strategy is not None:
        get_strategy(settings.strategy)
    task, root = loading.load_task(settings.file, settings.task)
    config = task.task_config
    if isinstance(config, PyTorch):
        workers = config.num_workers or config.worker.replicas or 0
        pods = settings.nodes or workers + 1
        nodes = str(pods)
    else:
        nodes = str(settings.nodes) if settings.nodes is not None else str(config.nnodes)
        pods = parse_nnodes(nodes)[1]
    inputs = loading.read_inputs(task, settings.inputs)
    command = loading.serialized_command(task)
    name = f"f{uuid.uuid4().hex[:19]}"
    store = settings.store if "://" in settings.store else str(Path(settings.store).resolve())
    base = join(store, name)
    put_file(base, "inputs.pb", inputs.SerializeToString())
    local = (
        Path(".firstfault/logs").resolve() / name
        if is_remote(store)
        else Path(base.removeprefix("file://"))
    )
    retries = settings.retries if settings.retries is not None else task.metadata.retries
    return _Plan(task, command, root, name, base, local, nodes, pods, retries, settings)


# --- one attempt ----------------------------------------------------------------------------------


def _run_attempt(
    plan: _Plan,
    before: Sequence[LocalAttempt],
    retries_left: int,
    tell: Tell,
    look: Look,
) -> LocalAttempt:
    started = time.monotonic()
    number = len(before)
    prefix = plan.prefix(number)
    limit = plan.settings.timeout_seconds
    tell(f"attempt {number}: starting {counted(plan.pods, 'pod')}")
    pods_ended_ns = None
    seen = None
    killed = dict[str, str]()
    with (
        _run_pods(plan, number) as pods,
        look(Running(number, tuple(pods), _make_reader(plan, number), started)),
    ):
        stalls = StallLines(pods[0].log)

        def has_ended() -> bool:
            for line in stalls.read():
                tell(f"attempt {number}: {line}")
            return job_state(pods) is not None

        _wait(has_ended, float("inf") if limit is None else limit)
        # Look again: `_wait` doesn't return why it ended, and a pod may have ended right at the
        # time limit.
        state = job_state(pods)
        if state is not None:
            multi = writes_error_file_per_pod(_pod_environment(plan, number, 0, 0))
            # Read now, as Flyte does when the operator reports the end: pods that still run may
            # write more files.
            seen = error_seen(prefix, state, multi_file=multi)
        ended = time.monotonic() - started
        if state is not None:
            tell(f"attempt {number}: ended after {ended:.1f} s")
            pods_ended_ns = _linger(pods, plan)
            killed = _describe_killed_pods(pods)  # before this process itself kills what still runs
            for text in killed.values():
                tell(f"attempt {number}: {text}")
        else:
            tell(f"attempt {number}: timed out after {limit:g} s, ending its pods")
            # Before SIGTERM, which the end of the block sends: a terminated pod looks for this
            # file, and reports a time limit if the file exists.
            plan.time_limit_file(number).write_text(str(limit), encoding="ascii")
    sealed_ns = seen.timestamp_ns if isinstance(seen, Seal) else None
    reader = _make_reader(plan, number)
    previous = before[-1].conclusion if before else None
    context = RetryContext(
        attempt=number,
        retries=plan.retries,
        retries_left=retries_left,
        pods_alive=state is JobState.SUCCEEDED,
        previous_fingerprint=previous.verdict.fingerprint if previous is not None else "",
        previous_machine=find_machine(previous.verdict) if previous is not None else "",
    )
    conclusion = _with_end_of_pod(_conclude(reader, prefix, context, tell), killed)
    return LocalAttempt(
        number=number,
        status=_describe_status(plan, reader, state, conclusion),
        prefix=prefix,
        errors_uri=reader.errors_uri,
        conclusion=conclusion,
        job=state,
        seen=seen,
        total_seconds=ended,
        seconds_after_fault={
            "durable": _durable_seconds(conclusion),
            "verdict": _seconds_after_fault(conclusion, sealed_ns),
            "ended": _seconds_after_fault(conclusion, pods_ended_ns),
        },
        logs=tuple(pod.log for pod in pods),
    )


def _conclude(
    reader: MultiErrorFileOutputReader,
    uri: str,
    context: RetryContext,
    tell: Tell,
) -> Conclusion | None:
    """Conclude; if the task's strategy or policy raises, with firstfault's own, as the pods do."""
    conclusion, error = try_call(lambda: reader.conclude(context), Exception)
    # Only user code gets the fallback: firstfault's own strategy would fail on the same storage.
    if isinstance(error, StoreError):
        raise error
    if error is None:
        return conclusion
    tell(
        f"the task's strategy or retry policy failed ({type(error).__name__}: {error}); the"
        " defaults decide"
    )
    return MultiErrorFileOutputReader(uri).conclude(context)


@contextlib.contextmanager
def _run_pods(plan: _Plan, number: int) -> Iterator[list[Pod]]:
    """Start an attempt's pods, and end them when the block ends."""
    pods: list[Pod] = []
    # The probe is closed before rank 0's pod binds the port, so another process may take it in
    # between.
    port = free_port()
    inputs = join(plan.base, "inputs.pb")
    raw = join(plan.base, "raw", str(number))
    previous_raw = join(plan.base, "raw", str(number - 1)) if number else ""
    arguments = plan.command.filled(
        inputs=inputs,
        prefix=plan.prefix(number),
        raw=raw,
        previous_raw=previous_raw,
    )
    start = partial(start_pod, arguments=arguments, folder=plan.root)
    try:
        # Inside the try: if a later pod can't be started, or Ctrl-C arrives, the pods started so
        # far are ended.
        for index in range(plan.pods):
            name = _pod_name(plan, index)
            environment = _pod_environment(plan, number, index, port)
            log = plan.logs / f"attempt-{number}" / f"{name}.log"
            pods.append(
                start(name, environment=environment, log=log, master=plan.has_master and index == 0)
            )
        yield pods
    finally:
        end_all(pods)


def _pod_name(plan: _Plan, index: int) -> str:
    job = f"{plan.name}-n0-0"
    if plan.has_master:
        return f"{job}-master-0" if index == 0 else f"{job}-worker-{index - 1}"
    return job if plan.pods == 1 else f"{job}-worker-{index}"


def _pod_environment(plan: _Plan, number: int, index: int, port: int) -> dict[str, str]:
    """Return a pod's environment: this process's, then Flyte's, the operator's,
    the task's and the user's variables.
    """
    config = plan.task.task_config
    flyte = {
        "FLYTE_INTERNAL_EXECUTION_ID": plan.name,
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "local",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
        "FLYTE_INTERNAL_TASK_NAME": plan.task.name,
        "FLYTE_INTERNAL_TASK_VERSION": "local",
        "FLYTE_ATTEMPT_NUMBER": str(number),
        "HOSTNAME": _pod_name(plan, index),
        TIME_LIMIT_VARIABLE: str(plan.time_limit_file(number)),
        RETRIES_VARIABLE: str(plan.retries),
    }
    if plan.has_master:
        operator = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        operator |= {"WORLD_SIZE": str(plan.pods), "RANK": str(index)}
    elif plan.nodes == "1" == str(config.nnodes):
        operator = {}
    else:
        operator = elastic_environment(
            plan.nodes,
            config.nproc_per_node,
            config.max_restarts,
            plan.name,
            port,
        )
    if plan.pods > 1 and not (plan.has_master and index == 0):
        flyte["_F_WN"] = _pod_name(plan, index)
    strategy = {STRATEGY_VARIABLE: plan.settings.strategy} if plan.settings.strategy else {}
    path = os.pathsep.join(filter(None, [str(plan.root), os.environ.get("PYTHONPATH", "")]))
    # This process may itself be part of an elastic job, for example in a pod: its rendezvous isn't
    # the local pods'.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PET_", "TORCHELASTIC_"))
    }
    python = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    overrides = {**plan.command.environment, **strategy, **plan.settings.environment}
    return {**inherited, **python, **flyte, **operator, **overrides}


def _wait(is_done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_done() and time.monotonic() < deadline:
        time.sleep(_PODS_POLL_SECONDS)


def _linger(pods: list[Pod], plan: _Plan) -> int | None:
    """Wait for the remaining pods to exit unaided, because they may still write documents.

    Returns:
        When the last pod ended, nanoseconds since the Unix epoch, or None if a pod is still
        running.
    """

    def have_ended() -> bool:
        return all(pod.exit_code is not None for pod in pods)

    _wait(have_ended, plan.task.task_config.settle_seconds + _LINGER_TIMEOUT_SECONDS)
    ended_ns = time.time_ns() if have_ended() else None
    # workers of a dead agent still write a document about it
    _wait(lambda: not any(pod.has_processes() for pod in pods), _ORPHANS_TIMEOUT_SECONDS)
    return ended_ns


def _describe_killed_pods(pods: Sequence[Pod]) -> dict[str, str]:
    """Return a sentence for each pod that a signal ended, by the pod's name:
    it may have left no report.
    """
    ended = ((pod.name, pod.exit_code) for pod in pods)
    return {
        name: f"{name} was killed by {signal_name(-code)}"
        for name, code in ended
        if code is not None and code < 0
    }


def _with_end_of_pod(conclusion: Conclusion | None, killed: Mapping[str, str]) -> Conclusion | None:
    """Add to a verdict on a lost node how its pod ended;
    a reader sees only that it left no report.
    """
    if conclusion is None or conclusion.verdict.category != "node_lost":
        return conclusion
    verdict = conclusion.verdict
    text = killed.get(conclusion.verdict.node or "")
    return (
        replace(conclusion, verdict=replace(verdict, why=(*verdict.why, f"the pod {text}")))
        if text
        else conclusion
    )


# --- after ----------------------------------------------------------------------------------------


def _make_reader(plan: _Plan, number: int) -> MultiErrorFileOutputReader:
    return MultiErrorFileOutputReader(
        plan.prefix(number),
        strategy=plan.settings.strategy or plan.task.task_config.strategy,
        retry_policy=plan.task.task_config.retry_policy,
    )


def _describe_status(
    plan: _Plan,
    reader: MultiErrorFileOutputReader,
    state: JobState | None,
    conclusion: Conclusion | None,
) -> str:
    if state is None:
        return "timeout"
    if state is JobState.FAILED or (conclusion is not None and reader.is_error()):
        return "failed"
    return "succeeded" if reader.exists() or not plan.task.python_interface.outputs else "failed"


def _durable_seconds(conclusion: Conclusion | None) -> float | None:
    """Return the seconds from the root cause's fault until the storage had its document,
    from the node's receipt.
    """
    if conclusion is None or conclusion.verdict.root is None:
        return None
    names = {document.name for document in conclusion.verdict.root.documents}
    receipts = [
        item
        for presence in conclusion.job.roster
        for item in presence.receipts
        if item.name in names
    ]
    taken = [item.fault_to_durable_ns for item in receipts if item.fault_to_durable_ns is not None]
    return min(taken) / 1e9 if taken else None


def _seconds_after_fault(conclusion: Conclusion | None, moment_ns: int | None) -> float | None:
    """Return the seconds from the root cause's fault to a moment by this machine's clock."""
    root: WorkerError | None = conclusion.verdict.root if conclusion is not None else None
    if root is None or root.timestamp_ns is None or moment_ns is None:
        return None
    return (moment_ns - root.timestamp_ns) / 1e9
