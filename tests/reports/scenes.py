"""Example attempts for reports: one for each scope and category, and some that are hard to show."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from firstfault.model import (
    TERMINATED,
    TERMINATED_BY,
    CollectiveProgress,
    DocumentRef,
    ExceptionInfo,
    FrameInfo,
    JobErrors,
    Kind,
    NodeSetup,
    Origin,
    Outcome,
    Phase,
    Progress,
    Receipt,
    Resources,
    SentSignal,
    StackDump,
    Subject,
    Verdict,
    WorkerError,
    Writer,
)
from firstfault.model.failure import CTRL_C
from firstfault.report import Report, build_report
from firstfault.report.data import AttemptSummary, summarize_attempt, with_attempts
from firstfault.retry import RetryContext, decide
from firstfault.strategies import build_undetermined_verdict, get_strategy, run_strategy
from firstfault.testing import START_NS, make_error, make_job, make_presence

URI = "s3://bucket/metadata/propeller/project-development-a7xk2m9qp4vd8wz3hj6t/n0/data/0"
_NODES = tuple(f"a7xk2m9qp4vd8wz3hj6t-n0-0-worker-{index}" for index in range(4))
_HERE = {
    "namespace": "project-development",
    "world_size": 4,
    "group_world_size": 2,
    "incarnation": START_NS // 1_000_000 - 800_000,
}
_MS = 1_000_000
_GIB = 1 << 30
_PACKAGES = "/usr/lib/python3.11/site-packages"
_VERSIONS = (("flytekit", "1.16.31"), ("python", "3.11.7"), ("torch", "2.13.0"))
_LOOP = (
    "for batch in loader:",
    "    optimizer.zero_grad()",
    "    loss = step(model, batch)",
    "    loss.backward()",
)
_OWN = (
    FrameInfo(
        "/root/train.py",
        88,
        "main",
        "train(config)",
        ("if __name__ == '__main__':", "    train(config)"),
        87,
    ),
    FrameInfo("/root/train.py", 41, "train", "loss = step(model, batch)", _LOOP, 39, (7, 25)),
)
_FORWARD = """\
def forward(self, batch):
    if batch.shape[1] != 4:
        raise ValueError(shape)
    return self.net(batch)"""
_RAISE = "raise ValueError(shape)"
_INNERMOST = FrameInfo("/root/model.py", 12, "forward", _RAISE, tuple(_FORWARD.split("\n")), 10)
_REDUCE = FrameInfo(
    f"{_PACKAGES}/torch/distributed/distributed_c10d.py",
    2810,
    "all_reduce",
    "work.wait()",
)
_PROGRESS = Progress(40_312, 262.0)
_SETUP = NodeSetup(
    task="workflows.train.fit",
    image="registry.example.com/team/trainer:2026.11.3",
    gpu_model="NVIDIA H100 80GB HBM3",
    gpus=2,
    source_url=f"https://github.com/org/repo/blob/{'3f2c1e9a' * 5}",
    source_root="/root",
)
_TORCH = (
    FrameInfo(
        f"{_PACKAGES}/torch/nn/modules/module.py",
        1775,
        "_wrapped_call_impl",
        "return self._call_impl(*args)",
    ),
    FrameInfo(
        f"{_PACKAGES}/torch/nn/modules/module.py",
        1786,
        "_call_impl",
        "return forward_call(*args, **kwargs)",
    ),
)
_STACK = """Thread 0x00007f10 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f11 (most recent call first):
  File "/root/data.py", line 17 in next_batch
  File "/root/train.py", line 41 in train
"""
_IN_A_COLLECTIVE = f"""Current thread 0x00007f11 (most recent call first):
  File "{_PACKAGES}/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/root/train.py", line 47 in train
"""


def raised(kind: str, message: str, **fields: Any) -> ExceptionInfo:
    """Return an exception with frames of the program and of torch."""
    values = {
        "bases": ("Exception", "BaseException"),
        "frames": (*_OWN, *_TORCH, _INNERMOST),
        **fields,
    }
    return ExceptionInfo(kind, message, **values)


def process(
    rank: int,
    at_ms: float | None,
    exception: ExceptionInfo | None,
    **fields: Any,
) -> WorkerError:
    """Return the failure of one of four ranks, on two machines whose clocks are known."""
    node = rank // 2
    message = exception.message if exception is not None else ""
    process = {
        "local_rank": rank % 2,
        "host": _NODES[node],
        "pid": 4200 + rank,
        "versions": _VERSIONS,
    }
    values = {
        "at_ms": at_ms,
        "exception": exception,
        "message": message,
        **_on(node, at_ms),
        **process,
        **fields,
    }
    return make_error(rank, **values)


def _on(node: int, at_ms: float | None) -> dict[str, Any]:
    """Return what a document has of its node, and of the time by its clock."""
    clock = None if at_ms is None else 10**12 + int(at_ms * _MS)
    machine = {"machine": f"gpu-node-{node + 7}", "boot_id": f"boot-{node}", "monotonic_ns": clock}
    return {"node": _NODES[node], "group_rank": node, **machine, **_HERE}


def victim(rank: int, at_ms: float, peer: str = "10.0.0.8") -> WorkerError:
    """Return the failure of a rank whose collective failed because its peer was gone."""
    text = (
        f"Connection closed by peer [{peer}]:29500. This is typically caused by a remote worker"
        " crashing."
    )
    return process(rank, at_ms, raised("RuntimeError", text, frames=(*_OWN, _REDUCE)))


def stopped(rank: int, at_ms: float, reason: str, **fields: Any) -> WorkerError:
    """Return the failure of a rank that its agent stopped."""
    ended = {"signal": "SIGTERM", "exit_code": -15, "writer": Writer.AGENT, "category": "stopped"}
    return process(
        rank,
        at_ms,
        None,
        sent_signals=(SentSignal("SIGTERM", reason),),
        **ended,
        **fields,
    )


def stored(failure: WorkerError, late_ms: float = 12.0) -> WorkerError:
    """Return a failure with the storage's time of its document, so that clocks can be compared."""
    (ref,) = failure.documents
    recorded = failure.timestamp_ns
    modified = None if recorded is None else recorded + int(late_ms * _MS)
    uri = f"{URI}/firstfault/errors/{ref.name}"
    return replace(
        failure, documents=(DocumentRef(ref.name, uri, modified, 2_400),), upload_delay_ns=2 * _MS
    )


def build_job(
    *failures: WorkerError, done: tuple[Phase, ...] = (Phase.FAILED, Phase.FAILED), **snapshot: Any
) -> JobErrors:
    """Return the job of two nodes with two ranks each."""
    failures = tuple(
        stored(failure) if failure.documents[0].uri == "" else failure for failure in failures
    )
    roster = []
    for node, phase in enumerate(done):
        here = {
            "node": _NODES[node],
            "group_rank": node,
            "nodes": len(done),
            "namespace": _HERE["namespace"],
        }
        here |= {"incarnation": _HERE["incarnation"], "machine": f"gpu-node-{node + 7}"}
        ranks = (2 * node, 2 * node + 1)
        receipts = tuple(
            Receipt(ref.name, durable=True, fault_to_durable_ns=14 * _MS, rank=failure.rank)
            for failure in failures
            for ref in failure.documents
            if failure.node == _NODES[node]
        )
        roster.append(make_presence(Phase.JOINED, ranks=ranks, **here))
        if phase is not Phase.JOINED:
            here |= {"setup": _SETUP, "progress": _PROGRESS}
            roster.append(make_presence(phase, ranks=ranks, receipts=receipts, **here))
    return make_job(*failures, roster=(*snapshot.pop("roster", ()), *roster), **snapshot)


def report_conclusion(
    job: JobErrors,
    *,
    strategy: str = "evidence",
    context: RetryContext | None = None,
    uri: str = URI,
    attempts: tuple[AttemptSummary, ...] = (),
    verdict: Verdict | None = None,
) -> Report:
    """Return the report on an attempt, by the default strategy and policy."""
    verdict = verdict or run_strategy(get_strategy(strategy), job)
    return with_attempts(
        build_report(job, verdict, decide(verdict, None, context), uri=uri), attempts
    )


def cascade(root: WorkerError) -> JobErrors:
    """Return a job in which rank 3 fails, rank 2 loses its connection,
    and ranks 0 and 1 are stopped.
    """
    reason = f"rank 3 on {_NODES[1]} failed: {root.what}"
    return build_job(root, victim(2, 31), stopped(0, 420, reason), stopped(1, 433, reason))


def _classify_text(
    exception: str,
    message: str,
    category: str = "user_code",
    **fields: Any,
) -> Callable[[], Report]:
    def scene() -> Report:
        return report_conclusion(
            cascade(process(3, 0, raised(exception, message), category=category, **fields))
        )

    return scene


def _death(signal: str, exit_code: int, **fields: Any) -> Callable[[], Report]:
    def scene() -> Report:
        message = (
            f"rank 3 was killed by {signal}, which its agent did not send; exit code {exit_code}"
        )
        if not signal:
            message = f"rank 3 exited with code {exit_code} by itself, without an exception"
        root = process(
            3,
            0,
            None,
            signal=signal,
            exit_code=exit_code,
            writer=Writer.AGENT,
            message=message,
            **fields,
        )
        return report_conclusion(cascade(root))

    return scene


def _agent(category: str, message: str, kind: str) -> Callable[[], Report]:
    def scene() -> Report:
        exception = raised(kind, message) if kind else None
        root = process(
            3,
            0,
            exception,
            subject=Subject.AGENT,
            writer=Writer.AGENT,
            category=category,
            message=message,
        )
        place = replace(root.place, rank=None, local_rank=None)
        root = replace(
            root,
            place=place,
            code=f"SYSTEM:{category}",
            origin=Origin.SYSTEM,
            kind=Kind.RECOVERABLE,
        )
        reason = f"the agent of {_NODES[1]} failed: {kind or category}"
        job = build_job(
            root,
            stopped(0, 420, reason),
            stopped(1, 433, reason),
            victim(2, 60),
            victim(3, 61),
        )
        return report_conclusion(job, strategy="earliest")

    return scene


def _hang() -> Report:
    timeout = "Timed out waiting 60000ms for send operation to complete"
    error = raised("torch.distributed.DistBackendError", timeout, frames=(*_OWN, _REDUCE))
    reason = f"rank 0 on {_NODES[0]} failed: DistBackendError"
    ahead = CollectiveProgress("default_pg", "gloo:all_reduce", 120, 119)
    behind = CollectiveProgress("default_pg", "gloo:all_reduce", 119, 119)
    dump = StackDump(4203, 3, _STACK)
    return report_conclusion(
        build_job(
            process(0, 0, error, collectives=(ahead,), category="user_code"),
            process(1, 4, error, collectives=(ahead,), category="user_code"),
            stopped(
                2,
                500,
                reason,
                collectives=(ahead,),
                stack_dumps=(StackDump(4202, 2, _IN_A_COLLECTIVE),),
            ),
            stopped(3, 640, reason, collectives=(behind,), stack_dumps=(dump,), message="stopped"),
        )
    )


def _same_everywhere() -> Report:
    error = raised(
        "KeyError",
        "'learning_rate'",
        frames=(FrameInfo("/root/config.py", 9, "load", "return raw[key]"),),
    )
    return report_conclusion(
        build_job(*(process(rank, rank * 3.0, error, category="user_code") for rank in range(4)))
    )


def _lost_node() -> Report:
    job = build_job(victim(0, 5), victim(1, 6), done=(Phase.FAILED, Phase.JOINED))
    return report_conclusion(job, context=RetryContext(pods_alive=False))


def _sigterm(node: int, at_ms: float) -> WorkerError:
    return make_error(
        None,
        at_ms=at_ms,
        exception=None,
        category="preemption",
        subject=Subject.AGENT,
        writer=Writer.AGENT,
        code="SYSTEM:Preemption",
        message=f"{_NODES[node]} was terminated (SIGTERM)",
        kind=Kind.RECOVERABLE,
        origin=Origin.SYSTEM,
        **_on(node, at_ms),
    )


def _interrupted() -> Report:
    keys = {
        "category": "interrupted",
        "code": CTRL_C,
        "signal": "SIGINT",
        "kind": Kind.NON_RECOVERABLE,
    }
    root = replace(
        _sigterm(1, 0),
        **keys,
        origin=Origin.USER,
        message=f"{_NODES[1]} was interrupted (SIGINT)",
    )
    reason = f"the agent of {_NODES[1]} failed: {TERMINATED_BY} SIGINT"
    return report_conclusion(build_job(root, stopped(0, 420, reason), stopped(1, 433, reason)))


def _terminated() -> Report:
    reason = f"the agent of {_NODES[1]} failed: {TERMINATED_BY} SIGTERM"
    others = (
        stopped(0, 700, reason),
        stopped(1, 702, reason),
        stopped(2, 40, TERMINATED),
        stopped(3, 41, TERMINATED),
    )
    return report_conclusion(build_job(_sigterm(1, 0), *others))


def _teardown() -> Report:
    reason = f"rank 3 on {_NODES[1]} failed: SIGABRT"
    root = process(
        3,
        0,
        None,
        signal="SIGABRT",
        exit_code=-6,
        writer=Writer.AGENT,
        category="signal",
    )
    job = build_job(root, *(stopped(rank, 420.0 + rank, reason) for rank in (0, 1, 2)))
    ranks = {0: (0, 1), 1: (2, 3)}
    roster = (
        replace(entry, finished_ranks=ranks[entry.place.group_rank or 0]) for entry in job.roster
    )
    return report_conclusion(replace(job, roster=tuple(roster)))


def _deadlock() -> Report:
    timeout = "Timed out waiting 60000ms for recv operation to complete"
    error = raised("RuntimeError", timeout, frames=(*_OWN, _REDUCE))
    return report_conclusion(
        build_job(*(process(rank, 2.0 * rank, error, category="user_code") for rank in range(4)))
    )


_UNKNOWN = {
    "category": "unknown",
    "code": "USER:Unknown",
    "message": "nothing was said",
    "exit_code": 1,
}
_MEMORY = Resources(1, int(15.9 * _GIB), 16 * _GIB, int(15.2 * _GIB), START_NS)


def _kept(makers: dict[str, Callable[[], Report]]) -> dict[str, Callable[[], Report]]:
    """Let each scene be made once: a report does not change, and some take seconds."""
    return {name: cache(make) for name, make in makers.items()}


SCOPE_SCENES: dict[str, Callable[[], Report]] = _kept(
    {
        "rank": _classify_text("ValueError", "batch 17 has 3 columns, expected 4"),
        "ranks": _same_everywhere,
        "node": _lost_node,
        "external": _terminated,
        "undetermined": _deadlock,
    }
)
"""A report for each scope."""

CATEGORY_SCENES: dict[str, Callable[[], Report]] = _kept(
    {
        "recoverable": _classify_text(
            "flytekit.exceptions.user.FlyteRecoverableException",
            "no answer from the data server for shard 3",
            "recoverable",
            kind=Kind.RECOVERABLE,
        ),
        "user_code": SCOPE_SCENES["rank"],
        "input": _classify_text(
            "TypeError", "train() got an unexpected keyword argument 'epochs'", "input"
        ),
        "config": _classify_text(
            "ValueError", "tensor parallel size 3 does not divide 32 heads", "config"
        ),
        "data": _classify_text("ValueError", "record 55 of shard 3 is no JSON", "data"),
        "numerics": _classify_text("FloatingPointError", "loss is nan at step 1200", "numerics"),
        "checkpoint": _classify_text(
            "RuntimeError",
            "Error(s) in loading state_dict for Net: size mismatch for head.weight",
            "checkpoint",
        ),
        "cuda_oom": _classify_text(
            "torch.OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79 GiB",
        ),
        "gpu_kernel": _classify_text(
            "torch.AcceleratorError", "CUDA error: an illegal memory access was encountered"
        ),
        "gpu_hardware": _classify_text(
            "torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered"
        ),
        "host_oom": _death("SIGKILL", -9, resources=_MEMORY),
        "disk_full": _classify_text("OSError", "[Errno 28] No space left on device: '/tmp/cache'"),
        "storage": _classify_text(
            "botocore.exceptions.ClientError",
            "An error occurred (SlowDown) when calling the GetObject",
            "storage",
        ),
        "network": _classify_text(
            "socket.gaierror", "[Errno -3] Temporary failure in name resolution", "network"
        ),
        "external_service": _classify_text(
            "requests.HTTPError", "503 Server Error for url: https://hub/", "external_service"
        ),
        "auth": _classify_text(
            "PermissionError", "401 Unauthorized: the token has expired", "auth"
        ),
        "collective": _classify_text(
            "RuntimeError", "the ranks disagree about the shape of a tensor", "collective"
        ),
        "rendezvous": _agent(
            "rendezvous", "timed out waiting for 2 nodes to join", "RendezvousTimeoutError"
        ),
        "hang": _hang,
        "signal": _death("SIGSEGV", -11),
        "exit": _death("", 3, category="exit"),
        "stopped": lambda: report_conclusion(
            build_job(stopped(0, 0, "another worker of this node had failed")), strategy="earliest"
        ),
        "preemption": _terminated,
        "interrupted": _interrupted,
        "node_lost": _lost_node,
        "teardown": _teardown,
        "platform": _agent("platform", "the store does not answer", "DistNetworkError"),
        "infrastructure": _agent("infrastructure", "the spool cannot be written", "OSError"),
        "unknown": lambda: report_conclusion(
            build_job(process(3, 0, None, **_UNKNOWN)), strategy="earliest"
        ),
    }
)
"""A report for each category."""


def _nothing_but_a_node() -> Report:
    verdict = replace(build_undetermined_verdict(make_job(), "evidence"), node=_NODES[1])
    return report_conclusion(make_job(), verdict=verdict, uri="")


_POD = "a7xk2m9qp4vd8wz3hj6t-n0-0-worker-{}"


def messages(count: int) -> Report:
    """Return an attempt in which each of many ranks has an error of its own."""
    names = ("shard", "file", "table", "index", "model")
    failures = (
        make_error(
            rank,
            node=_POD.format(rank // 8),
            at_ms=rank / 7,
            local_rank=rank % 8,
            exception=f"Error{rank:05}",
            message=f"{names[rank % 5]} number {rank} of {rank * 31} is not there",
            fingerprint=f"1:{rank:012x}",
        )
        for rank in range(count)
    )
    return report_conclusion(make_job(*failures), strategy="earliest")


def _long_names() -> Report:
    node = "a-very-long-execution-name-that-kubernetes-still-takes-worker-12"
    uri = f"s3://a-bucket-with-a-long-name-eu-central-1/metadata/propeller/project-development-{'f' * 40}/n0/data/0"
    kind = "lib.module.UnsupportedTensorLayoutForCollectiveOperationError"
    return report_conclusion(
        make_job(make_error(12_345, node=node, exception=raised(kind, "boom"))), uri=uri
    )


def _three_attempts() -> Report:
    first = report_conclusion(
        cascade(process(3, 0, raised("ValueError", "batch 17 has 3 columns, expected 4")))
    )
    now = report_conclusion(
        cascade(process(3, 9_000, raised("ValueError", "batch 17 has 3 columns, expected 4")))
    )
    attempts = (
        summarize_attempt(0, first.job, first.verdict, first.decision),
        AttemptSummary(1, Outcome.UNKNOWN, note="could not be read: access denied"),
        summarize_attempt(2, now.job, now.verdict, now.decision),
    )
    return report_conclusion(now.job, attempts=attempts)


def nodes_of(count: int, *, lost: int | None = None, name: str = _POD) -> Report:
    """Return an attempt of many nodes with eight ranks each, of which one failed by itself,
    or one node was lost.
    """
    root = count * 8 * 4_321 // 10_000
    failures = []
    for rank in range(count * 8):
        here = {"node": name.format(rank // 8), "local_rank": rank % 8, "group_rank": rank // 8}
        if rank // 8 == lost:
            continue
        if rank == root and lost is None:
            failures.append(
                make_error(rank, exception=raised("ValueError", "batch 17 has 3 columns"), **here)
            )
        elif rank % 3:
            peer = "Connection closed by peer [10.0.0.8]:29500"
            failures.append(
                make_error(
                    rank,
                    at_ms=30 + rank / 11,
                    exception="RuntimeError",
                    message=peer,
                    **here,
                )
            )
        else:
            sent = (
                SentSignal(
                    "SIGTERM", f"rank {root} on {name.format(root // 8)} failed: ValueError"
                ),
            )
            at = {
                "at_ms": 400 + rank / 7,
                "exception": None,
                "writer": Writer.AGENT,
                "category": "stopped",
            }
            failures.append(
                make_error(rank, **here, **at, sent_signals=sent, signal="SIGTERM", message="")
            )
    roster = []
    for node in range(count):
        phase = Phase.JOINED if node == lost else Phase.FAILED
        ranks = tuple(range(8 * node, 8 * node + 8))
        roster.append(
            make_presence(phase, node=name.format(node), group_rank=node, nodes=count, ranks=ranks)
        )
    context = RetryContext(pods_alive=False) if lost is not None else None
    return report_conclusion(make_job(*failures, roster=tuple(roster)), context=context)


HARD_SCENES: dict[str, Callable[[], Report]] = _kept(
    {
        "nothing-but-a-node": _nothing_but_a_node,
        "a-thousand-messages": lambda: messages(1_000),
        "one-long-line": lambda: report_conclusion(
            cascade(process(3, 0, raised("ValueError", "x" * 1_000_000)))
        ),
        "long-names": _long_names,
        "no-times": lambda: report_conclusion(
            build_job(
                *(process(rank, None, raised("ValueError", f"boom {rank}")) for rank in range(4))
            )
        ),
        "three-attempts": _three_attempts,
        "all-terminated": lambda: report_conclusion(
            build_job(
                _sigterm(0, 90),
                _sigterm(1, 0),
                *(stopped(rank, 100.0 + rank, TERMINATED) for rank in range(4)),
            )
        ),
        "a-thousand-ranks": lambda: nodes_of(125),
    }
)
"""Reports that are hard to show, by name."""

SCENES: dict[str, Callable[[], Report]] = {**SCOPE_SCENES, **CATEGORY_SCENES, **HARD_SCENES}
"""All of them."""

_HOST = "w{}.gpunode0123456789.rack17.datacenter3.research.examplecompany.internal"
PAGE_SCENES: dict[str, Callable[[], Report]] = {
    **SCENES,
    **_kept(
        {
            "ten-thousand-messages": lambda: messages(10_000),
            "ten-thousand-ranks": lambda: nodes_of(1_250),
            "64x8": lambda: nodes_of(64),
            "lost-node": lambda: nodes_of(64, lost=37),
            "long-host": lambda: nodes_of(64, name=_HOST),
            "longest-host": lambda: nodes_of(64, name="w{}" + "x" * 250),
        }
    ),
}
"""With those of the page's own tests."""
