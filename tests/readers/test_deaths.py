"""What deaths tell by a signal, an exit, or NCCL's watchdogs;
and what a process printed that is no evidence.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstfault import model
from firstfault.evidence import Role, classify
from firstfault.evidence.classification import FailureClass, classify_failures
from firstfault.report import build_report
from firstfault.retry import decide
from firstfault.strategies.rules import evidence
from firstfault.testing import make_error, make_job, make_presence
from firstfault.utils.toml import parse_toml
from tests.readers.scenes import watchdog_output

OWN, EXIT = FailureClass.OWN_FAULT, FailureClass.OWN_EXIT
UNCLEAR, VICTIM = FailureClass.UNCLEAR, FailureClass.CONSEQUENCE
PER_NODE = 4
SENT = (model.SentSignal("SIGTERM", "rank 0 failed"),)
THROWN = "terminate called after throwing an instance of 'E'\n  what():  "
ASSERTED = (
    "/build/Loss.cu:77: nll: block: [0,0,0], thread: [5,0,0] Assertion `t >= 0 && t < n_classes`"
    " failed.\n"
)
CRASH = (
    "Fatal Python error: Segmentation fault\n\nThread 0x00007f0000000001 (most recent call"
    ' first):\n  File "/job/a.py", line 3 in step\n\nExtension modules: numpy._core,'
    " aiohttp._websocket, s3fs.core (total: 3)\n"
)
LOGGED_DISK = (
    "2031-05-01 WARNING cache: [Errno 28] No space left on device: '/tmp/c'; going on without a"
    " cache\n"
)
LOGGED_PEER = (
    "2031-05-01 WARNING probe: RuntimeError: Connection closed by peer [10.1.2.3]:4242; trying"
    " again\n"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in fit\n    step()\n'
FOLLOWS = "\nDuring handling of the above exception, another exception occurred:\n\n"
NO_LABELS = TRACEBACK + "KeyError: 'labels'"
PEER = "RuntimeError: Connection closed by peer [10.0.0.1]:41\n"
PEER_GONE = model.ExceptionInfo(
    "RuntimeError",
    "gloo/tcp/pair.cc:9] Connection closed by peer [10.1.2.3]:42",
    relation="context",
)
NO_LABEL = model.ExceptionInfo("KeyError", "'label'", relation="context")
SIGNAL_EXCEPTION = model.ExceptionInfo(
    "torch.distributed.elastic.multiprocessing.api.SignalException", "got signal: 15"
)


def died(
    rank: int,
    stderr: str = "",
    signal: str = "SIGABRT",
    at_ms: float = 0,
    **more: Any,
) -> model.WorkerError:
    """A worker that its agent did not stop."""
    place = {
        "node": f"worker-{rank // PER_NODE}",
        "at_ms": at_ms,
        "writer": model.Writer.AGENT,
        "exception": None,
    }
    return make_error(
        rank, **{**place, "signal": signal, "exit_code": -6, "log_tail": stderr, **more}
    )


def stopped(rank: int, stderr: str = "", **more: Any) -> model.WorkerError:
    """A worker that its agent stopped."""
    return died(
        rank, stderr, **{"signal": "SIGTERM", "at_ms": 15_000, "sent_signals": SENT, **more}
    )


def aborting(said: str) -> model.WorkerError:
    """A worker that aborted while its agent stopped it."""
    return stopped(2, f"[rank2]:[E314 a.cpp:7] {said}\n", signal="SIGABRT")


def exited(stderr: str, exit_code: int = 1) -> model.WorkerError:
    """A worker that exited on its own, without an exception that its own process recorded."""
    return died(1, stderr, "", exit_code=exit_code)


def called_exit(stderr: str, *causes: model.ExceptionInfo) -> model.WorkerError:
    """A worker that called sys.exit(1)."""
    exception = model.ExceptionInfo("SystemExit", "1", causes=causes)
    return make_error(1, exception=exception, exit_code=1, log_tail=stderr)


def reported_job(*failures: model.WorkerError, nodes: int = 2) -> model.JobErrors:
    """A job of which every node has reported."""
    roster = tuple(
        make_presence(
            node=f"worker-{node}",
            group_rank=node,
            nodes=nodes,
            ranks=tuple(range(4 * node, 4 * node + 4)),
        )
        for node in range(nodes)
    )
    return make_job(*failures, roster=roster)


# --- the class of a death -------------------------------------------------------------------------

C10_ERROR = "terminate called after throwing an instance of 'c10::Error'\n"
CLASSES: dict[tuple[FailureClass, str], dict[str, model.WorkerError]] = {
    (VICTIM, ""): {
        # an abort while the agent stops the worker, judged by its last words
        "a peer during a stop": aborting("ncclRemoteError: Connection closed by remote peer"),
        # the agent sends SIGKILL to a worker that does not end at its SIGTERM
        "it had to be killed": stopped(1, signal="SIGKILL"),
        # a program that prints its exception and exits is judged by that exception, with a
        # traceback or not
        "sys.exit after a peer's error": called_exit(TRACEBACK + PEER),
        "sys.exit after a line about a peer": called_exit(PEER),
        "code 1 after a peer's error": exited(TRACEBACK + PEER),
        "code 1 after an error about a peer's": exited(
            TRACEBACK + PEER + FOLLOWS + TRACEBACK + "ValueError: failed\n"
        ),
        # ``except Exception: sys.exit(1)`` makes a victim's exit no fault of its own
        "an exit for a peer": called_exit("", PEER_GONE),
        # the context that ``from None`` hides still tells that it is a consequence
        "from None": make_error(
            3, exception=model.ExceptionInfo("train.StepError", "step failed", causes=(PEER_GONE,))
        ),
        # a library that wraps the exception of a signal handler has not failed
        "a wrapped signal": make_error(
            3,
            exception=model.ExceptionInfo("OSError", "cannot load", causes=(SIGNAL_EXCEPTION,)),
            sent_signals=SENT,
        ),
    },
    (UNCLEAR, "hang"): {
        "a timeout during a stop": stopped(2, watchdog_output(2), signal="SIGABRT")
    },
    (UNCLEAR, "signal"): {"an abort during a stop": stopped(2, signal="SIGABRT")},
    (UNCLEAR, ""): {"code 1 after other words": exited("uploading logs\n"), "code 1": exited("")},
    (EXIT, "exit"): {
        "sys.exit": called_exit("3 shards loaded"),
        "sys.exit after another connection": called_exit(
            "Connection closed by peer; connecting again to the metrics"
        ),
    },
    # an error that was handled and logged gives an end neither a cause nor a category
    (EXIT, ""): {
        "loaded modules": died(3, CRASH, "SIGSEGV"),
        "handled before a kill": died(3, LOGGED_DISK, "SIGKILL"),
        "handled before a crash": died(3, LOGGED_DISK + CRASH, "SIGSEGV"),
        "a peer long ago": died(
            3, f"{LOGGED_PEER}epoch 3\nterminate called after throwing an instance of 'Oops'\n"
        ),
        "a disk long ago": died(3, LOGGED_DISK + "epoch 3\nepoch 4\n"),
    },
    (OWN, ""): {"an exit for an error": called_exit("", NO_LABEL)},
    (OWN, "user_code"): {
        "sys.exit after an error": called_exit(NO_LABELS),
        "a program's sys.exit after an error": replace(
            called_exit(NO_LABELS), exception=model.ExceptionInfo("SystemExit", "")
        ),
        "code 1 after an error": exited(
            TRACEBACK + "ValueError: arrays must have the same shape\nuploading logs\n"
        ),
    },
    # what native code printed, and the last traceback of a process that exited, tell the cause
    (OWN, "hang"): {
        # the monitor process of an in-process restart terminates it
        "a call that could not be interrupted": died(
            1,
            "step 30\nin-process restart: this rank is still at a.py:7 in save, after rank 2:"
            " OSError\n",
            "SIGTERM",
        )
    },
    (OWN, "gpu_kernel"): {
        "a GPU during a stop": aborting("CUDA error: device-side assert triggered"),
        "an assertion of a kernel": died(3, LOGGED_PEER + ASSERTED + C10_ERROR),
    },
    (OWN, "gpu_hardware"): {
        "ECC": died(
            3,
            f"{LOGGED_PEER}epoch 3\n[rank3]:[E1 1:2 a.cpp:7] CUDA error: uncorrectable ECC error"
            " encountered\n",
        )
    },
    (OWN, "config"): {
        "shared memory": died(
            3,
            LOGGED_PEER
            + "Misc: shm.cc NCCL WARN Error: failed to extend /dev/shm/nccl-Ab to 9 bytes\n",
            "SIGBUS",
        )
    },
    (OWN, "disk_full"): {
        "a full disk": exited(LOGGED_PEER + TRACEBACK + "OSError: [Errno 28] No space left\n")
    },
}
"""By class and category, the ends that have them."""


@pytest.mark.parametrize(
    ("name", "told"), [(name, told) for told, ends in CLASSES.items() for name in ends]
)
def test_last_words_decide_between_own_fault_and_consequence(
    name: str, told: tuple[FailureClass, str]
) -> None:
    """What a process printed or raised last makes its end a fault of its own, a consequence,
    or neither.
    """
    (judged,) = classify_failures(make_job(CLASSES[told][name]))
    assert (judged.failure_class, judged.category) == told
    assert judged.waited is (told == (UNCLEAR, "hang"))


@pytest.mark.parametrize(
    ("dump", "printed", "confidence"),
    [
        ('Thread 0x00007f12 (most recent call first):\n  File "a.py", line 1 in f', "", "low"),
        ('Current thread 0x00007f12 (most recent call first):\n  File "a.py"', "", "high"),
        ("Thread 0x00007f12", "free(): invalid pointer\n", "high"),
    ],
)
def test_an_abort_without_a_reason_gives_no_sure_verdict(
    dump: str, printed: str, confidence: str
) -> None:
    """A thread that Python does not know may be a watchdog, whose words went elsewhere:
    the verdict is not sure.
    """
    aborted = died(
        2, printed, stack_dumps=(model.StackDump(7, 2, f"Fatal Python error: Aborted\n\n{dump}"),)
    )
    verdict = evidence(
        reported_job(aborted, stopped(0, caused_by=model.CausedBy(2, "worker-0", "")), nodes=1)
    )
    assert (verdict.ranks, verdict.confidence) == ((2,), confidence)


REFUSED = parse_toml(
    (Path(__file__).parent / "refused_command_lines.toml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("line", REFUSED)
def test_a_refused_command_line_is_config_with_the_reason_in_the_headline(line: str) -> None:
    """The headline has what is wrong, not the advice, the list or the box around it;
    the category is config.
    """
    for failure in (exited(REFUSED[line], 2), replace(called_exit(REFUSED[line]), exit_code=2)):
        verdict = evidence(make_job(failure))
        assert (
            verdict.headline.partition(f"rank 1 on {failure.node}: ")[2].removesuffix(
                "; exit code 2"
            )
            == line
        )
        assert verdict.category == "config"


def frames_of_libraries(*calls: str) -> tuple[model.FrameInfo, ...]:
    own = model.FrameInfo("/job/train.py", 7, "main", "begin()")
    return (
        own,
        *(
            model.FrameInfo(f"/x/site-packages/{call.split()[0]}", 9, call.split()[1])
            for call in calls
        ),
    )


@pytest.mark.parametrize(
    ("kind", "calls", "category"),
    [
        (
            "EOFError",
            ["torch/serialization.py load", "torch/_weights_only_unpickler.py load"],
            "checkpoint",
        ),
        (
            "FileNotFoundError",
            ["accelerate/accelerator.py load_state", "torch/serialization.py load"],
            "checkpoint",
        ),
        ("ValueError", ["accelerate/accelerator.py load_state"], "checkpoint"),
        ("OSError", ["torch/distributed/checkpoint/state_dict_loader.py load"], "checkpoint"),
        ("FileNotFoundError", ["orbax/checkpoint/checkpointer.py restore"], "checkpoint"),
        (
            "FileNotFoundError",
            ["torch/utils/data/_utils/fetch.py fetch", "torch/serialization.py load"],
            "data",
        ),
        (
            "ValueError",
            ["jsonargparse/core.py parse_args", "jsonargparse/core.py _check"],
            "config",
        ),
        ("ValueError", ["absl/flags/_flag.py _parse"], "config"),
        (
            "ValueError",
            ["click/core.py main", "trainer/cli.py train", "torch/nn/modules/linear.py forward"],
            "user_code",
        ),
        (
            "ValueError",
            ["trainer/loop.py load_state", *["torch/nn/modules/module.py _call_impl"] * 9],
            "user_code",
        ),
        ("SystemExit", ["argparse.py error", "argparse.py exit"], "config"),
        ("SystemExit", ["trainer/loop.py leave"], "exit"),
    ],
)
def test_the_raising_library_decides_the_category_of_a_vague_text(
    kind: str, calls: list[str], category: str
) -> None:
    """A text that tells little is of a checkpoint or a command line,
    if the library that raised it reads those.
    """
    frames = frames_of_libraries(*calls)
    bases = {"EOFError": (), "SystemExit": ()}.get(kind, ("Exception",))
    failure = make_error(
        3, exception=model.ExceptionInfo(kind, "2", bases, frames=frames), exit_code=2
    )
    assert evidence(make_job(failure)).category == category


def test_output_before_exit_code_0_is_no_reason() -> None:
    """What a process printed before it exited with code 0 is neither its
    reason nor its category.
    """
    warned = "There were missing keys in the checkpoint model loaded: ['head.weight'].\n"
    verdict = evidence(make_job(exited(f"{warned}OSError: No space left on device\n", 0)))
    assert verdict.headline == "exit code 0, rank 1 on worker-0: it exited without an error"
    assert verdict.category == "exit"
    assert "missing keys" not in evidence(make_job(exited(warned))).headline


@pytest.mark.parametrize(("raised_at_s", "ranks"), [(600, (3,)), (1, (0,))])
def test_an_exception_after_a_long_wait_is_not_its_cause(
    raised_at_s: int, ranks: tuple[int, ...]
) -> None:
    """An exception cannot be why the others had waited for long,
    unless it was raised when they began to.
    """
    raised = make_error(
        0,
        at_ms=raised_at_s * 1000,
        exception="UnpicklingError",
        message="invalid load key",
    )
    late = [
        died(rank, watchdog_output(rank), at_ms=601_000 if ranks == (3,) else 91_000)
        for rank in (1, 2, 4, 5)
    ]
    verdict = evidence(make_job(raised, *late, stopped(3, at_ms=601_500)))
    assert verdict.ranks == ranks
    assert [suspect.rank for suspect in verdict.suspects] == ([0] if ranks == (3,) else [])


GPU = """Indexing.cu:1255: select: block: [0,0,0], thread: [3,0,0] Assertion `index < size` failed.
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: device-side assert triggered
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
HOOK = """terminate called after throwing an instance of 'pybind11::error_already_set'
  what():  ValueError: bad gradient

At:
  /root/train.py(12): hook
  /usr/lib/python3.11/site-packages/torch/autograd/graph.py(824): _engine_run_backward
"""
LAUNCH = (
    "Process group watchdog thread terminated with exception: CUDA error: unspecified launch"
    " failure\n"
)
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.27.5"
NCCL_FAILED = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what(): "
    f" {NCCL}\nncclSystemError: System call (e.g. socket, malloc) or external library call failed"
    " or device error. \n"
)
NO_SHM = (
    "Error while creating shared memory segment /dev/shm/nccl-4o (size 96), error: No space left on"
    " device (28)"
)
CUDNN = "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"
BUS = "NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("printed", "category", "told"),
    [
        (GPU, "gpu_kernel", "CUDA error: device-side assert triggered"),
        (
            f"[rank2]:[E1124 a.cpp:1370] [PG ID 0 Rank 2] {LAUNCH}",
            "gpu_kernel",
            "CUDA error: unspecified launch failure",
        ),
        (f"{BUS}\n", "gpu_hardware", BUS),
        (f"{THROWN}{CUDNN}\n", "gpu_kernel", CUDNN),
        (
            f"{THROWN}cannot copy: No space left on device\n",
            "disk_full",
            "cannot copy: No space left on device",
        ),
        (HOOK, "user_code", "ValueError: bad gradient; printed before SIGABRT"),
        (f"{THROWN}shard 7 is empty\n", "signal", "shard 7 is empty"),
        ("fatal: no licence\nAborted (core dumped)\n", "signal", "fatal: no licence"),
        (
            "reader.cpp:12: void read(): Assertion `n > 0' failed.\n",
            "signal",
            "Assertion `n > 0' failed.",
        ),
        (NCCL_FAILED, "collective", NCCL),
        (f"{NCCL_FAILED}Last error:\n{NO_SHM}\nException raised from x\n", "disk_full", NO_SHM),
        ("", "signal", "the process aborted (a failed check in native code)"),
    ],
)
def test_the_last_lines_of_an_abort_give_headline_and_category(
    printed: str, category: str, told: str
) -> None:
    """The last lines of an abort give its headline and its category,
    also while its agent stopped it.
    """
    told = told if printed == HOOK else f"SIGABRT: {told}"
    verdict = evidence(make_job(died(2, printed)))
    assert (verdict.category, verdict.headline.replace(", rank 2 on worker-0", "")) == (
        category,
        told,
    )
    if category.startswith("gpu"):
        verdict = evidence(make_job(stopped(2, printed, signal="SIGABRT"), stopped(0)))
        assert (verdict.ranks, verdict.headline.replace(", rank 2 on worker-0", "")) == ((2,), told)


@pytest.mark.parametrize(
    ("kind", "text", "category"),
    [
        (
            "RuntimeError",
            "PytorchStreamWriter failed writing file data/0: file write failed",
            "storage",
        ),
        (
            "RuntimeError",
            "[enforce fail at inline_container.cc:603] . unexpected pos 704 vs 598",
            "storage",
        ),
        ("PermissionError", "[Errno 13] Permission denied: '/data/checkpoint.pt'", "config"),
        ("OSError", "[Errno 28] No space left on device: '/data/checkpoint.pt'", "disk_full"),
    ],
)
def test_a_refused_or_failed_write_is_not_the_programs_fault(
    kind: str, text: str, category: str
) -> None:
    """A refused file is no matter of credentials, and a failed write is not the program's fault."""
    assert evidence(make_job(make_error(2, exception=kind, message=text))).category == category


def test_a_checkpoint_error_is_that_of_the_rank_that_had_it() -> None:
    """torch.distributed.checkpoint raises one rank's error on every rank."""
    text = (
        "CheckpointException ranks:dict_keys([3])\nTraceback (most recent call last): (RANK"
        " 3)\nOSError: disk gone\n"
    )
    frame = model.FrameInfo(
        "/x/site-packages/torch/distributed/checkpoint/utils.py",
        7,
        "reduce_scatter",
        "raise",
    )
    raised = model.ExceptionInfo(
        "torch.distributed.checkpoint.api.CheckpointException",
        text,
        ("BaseException",),
        (frame,),
    )
    verdict = evidence(
        reported_job(
            *(make_error(rank, node=f"worker-{rank // 4}", exception=raised) for rank in range(8))
        )
    )
    assert (verdict.ranks, verdict.category) == ((3,), "checkpoint")


# --- watchdogs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enqueued", "completed", "role"),
    [
        (9, 9, Role.AMBIGUOUS),
        (10, 9, Role.SECONDARY),
        (123456, 123455, Role.SECONDARY),
        (123456, 123456, Role.AMBIGUOUS),
    ],
)
def test_only_a_rank_without_an_outstanding_collective_is_a_suspect(
    enqueued: int, completed: int, role: Role
) -> None:
    """A rank with a collective outstanding waits as well;
    one without may be the one that the others wait for.
    """
    text = dump_signal_output(2, completed, enqueued)
    assert classify(text).role is role
    (judged,) = classify_failures(make_job(died(2, text)))
    assert judged.failure_class is (VICTIM if role is Role.SECONDARY else UNCLEAR)
    assert judged.pointer is None, "the rank that signals first is the first victim"


@pytest.mark.parametrize(
    ("asked", "role"), [("96.00 GiB", Role.AMBIGUOUS), ("96.00 MiB", Role.PRIMARY)]
)
def test_an_impossible_allocation_may_be_rubbish_of_a_collective(asked: str, role: Role) -> None:
    """A size that no model asks for may be rubbish from a collective that was given up."""
    text = (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 1 has a total capacity of 39.50 GiB of"
        " which 3 GiB is."
    )
    found = classify(text, "torch.OutOfMemoryError")
    assert (found.role, found.category) == (role, "cuda_oom")


IN_LOADER = (
    'Current thread 0x1 (most recent call first):\n  File "/job/data.py", line 31 in next_batch\n'
)
REMOTE = (
    "NCCL error in: NCCLUtils.hpp:7, remote process exited or there was a network error, NCCL"
    " version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote"
    " process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer"
    " worker-0<4711>"
)
DESYNC = (
    "[rank0]:[E314 ProcessGroupNCCL.cpp:1950] Rank 0\n"
    "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
    "\t   [7] finished collective #4, but didn't join collective #5 (count from 1)\n"
)


def dump_signal_output(rank: int, completed: int, enqueued: int = 31) -> str:
    """What a rank prints when another rank has timed out."""
    return (
        f"[rank{rank}]:[E314 09:26:53 ProcessGroupNCCL.cpp:1750] [PG ID 0 PG GUID 0(default_pg)"
        f" Rank {rank}] Received a dump signal due to a collective timeout from  rank 0 and we will"
        f" try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, last completed"
        f" NCCL work: {completed}.\n"
    )


def raised(rank: int, kind: str, message: str, at_ms: float, **more: Any) -> model.WorkerError:
    """A worker that raised an exception."""
    fields = {"node": f"worker-{rank // PER_NODE}", "at_ms": at_ms, "boot_id": "b", **more}
    return make_error(rank, exception=kind, message=message, **fields)


FIRST = died(0, watchdog_output(0))
ALL_BUT_ONE = [
    died(rank, watchdog_output(rank), at_ms=90_000 + rank, boot_id="b") for rank in range(7)
]
INCONSISTENT = "expects same model across all ranks, but inconsistent 0 params"
CLEANING = {
    "in_flight": True,
    "sent_signals": SENT,
    "stack_dumps": (model.StackDump(1, 7, IN_LOADER),),
}


CASCADES: dict[str, tuple[list[model.WorkerError], str]] = {
    "one found the others gone": (
        [
            *ALL_BUT_ONE,
            died(
                7,
                "NCCL WARN socketProgress: Connection closed by remote peer a<4711>",
                at_ms=99_000,
            ),
        ],
        "hang",
    ),
    "two waited too when they were stopped": (
        [
            *ALL_BUT_ONE[:5],
            *(stopped(rank, watchdog_output(rank)) for rank in (5, 6)),
            stopped(7, "loading shard 9\n"),
        ],
        "hang",
    ),
    "a desync report names one": (
        [died(0, watchdog_output(0) + DESYNC), *map(stopped, range(1, 8))],
        "hang",
    ),
    "one came late": (
        [*ALL_BUT_ONE, raised(7, "torch.distributed.DistBackendError", REMOTE, 120_000)],
        "hang",
    ),
    "the abort let a victim run on": (
        [*ALL_BUT_ONE[1:], raised(0, "RuntimeError", INCONSISTENT, 95_000), stopped(7)],
        "hang",
    ),
    "one was still cleaning up after its exception": (
        [*ALL_BUT_ONE, raised(7, "ValueError", "bad batch", 90_400, **CLEANING)],
        "user_code",
    ),
    "OOM killer": (
        [*ALL_BUT_ONE, died(7, "", "SIGKILL", resources=model.Resources(oom_kill=1))],
        "host_oom",
    ),
}


@pytest.mark.parametrize(("failures", "category"), CASCADES.values(), ids=CASCADES)
def test_the_root_cause_of_a_cascade_is_rank_7(
    failures: list[model.WorkerError], category: str
) -> None:
    """Rank 7 is the root cause."""
    verdict = evidence(reported_job(*failures))
    assert (verdict.ranks, verdict.category) == ((7,), category)


@pytest.mark.parametrize("silent", [2, 4, 6])
def test_no_rank_stands_out_if_few_timed_out(silent: int) -> None:
    """The first abort ends the others early: where many did not time out, none stands out."""
    waiting = [died(rank, watchdog_output(rank)) for rank in range(silent, 4)] or [FIRST]
    verdict = evidence(reported_job(*waiting, *(stopped(rank) for rank in range(len(waiting), 8))))
    assert verdict.scope is model.Scope.UNDETERMINED


def test_a_node_is_named_if_none_of_its_ranks_was_missing() -> None:
    """No rank was missing: the node is named, with low confidence. Aborts are one fault
    only if they say the same.
    """
    failures = [died(rank, watchdog_output(rank), world_size=4) for rank in range(4)]
    verdict = evidence(reported_job(*failures, nodes=1))
    assert (verdict.node, verdict.category, verdict.confidence) == ("worker-0", "network", "low")
    assert "all 4 ranks waited in ALLREDUCE number 31" in verdict.headline
    failures[2] = died(2, watchdog_output(2, 32, "BROADCAST"), world_size=4)
    assert evidence(reported_job(*failures, nodes=1)).scope is model.Scope.UNDETERMINED
    aborted = "terminate called without an active exception\n"
    assert evidence(
        reported_job(died(5, ASSERTED), *(died(rank, aborted) for rank in (0, 1, 2)))
    ).ranks == (5,)
    assert evidence(reported_job(*(died(rank, ASSERTED) for rank in (2, 3)))).ranks == (2, 3)


# --- flight recorders -----------------------------------------------------------------------------

REDUCE = model.Collective(9, "nccl:all_reduce", "[[8]] -> [[8]]", "Float -> Float", "started")


def progress(
    *last: model.Collective,
    group: str = "default_pg",
    completed: int | None = None,
    members: tuple[int, ...] = (),
) -> tuple[model.CollectiveProgress]:
    """How far a rank came."""
    number = last[-1].sequence
    done = number - 1 if completed is None else completed
    return (model.CollectiveProgress(group, last[-1].operation, number, done, last, members),)


def find_stragglers(came: dict[int, tuple[model.CollectiveProgress, ...]]) -> model.Verdict:
    """Return the verdict on a job whose ranks came so far; rank 0's watchdog ended it."""
    others = [stopped(rank, collectives=seen) for rank, seen in came.items() if rank]
    return evidence(reported_job(replace(FIRST, collectives=came[0]), *others))


USUAL_CALLS = tuple(replace(REDUCE, sequence=number) for number in (7, 8, 9))
ODD_CALLS = (replace(REDUCE, sequence=7, operation="nccl:all_gather"), *USUAL_CALLS[1:])


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (
            (replace(REDUCE, operation="nccl:broadcast"),),
            "as collective 9 of group default_pg it called broadcast",
        ),
        (
            (replace(REDUCE, dtypes="Half -> Half"),),
            "it used Half -> Half, its peers Float -> Float",
        ),
        (
            (replace(REDUCE, sizes="[[4]] -> [[4]]"),),
            "it passed [[4]] -> [[4]], its peers [[8]] -> [[8]]",
        ),
        (
            (replace(REDUCE, state="scheduled"),),
            "it had not started the last collective of group default_pg",
        ),
        (ODD_CALLS, "as collective 7 of group default_pg it called all_gather"),
    ],
    ids=[
        "operation",
        "type",
        "size",
        "state",
        "the first that differs, though the ranks ran ahead",
    ],
)
def test_the_odd_one_out_in_a_collective_is_the_root_cause(
    odd: tuple[model.Collective, ...], why: str
) -> None:
    """Torch's analyzer's rules: the odd one out in operation, type, size,
    or whether its GPU has started.
    """
    verdict = find_stragglers(
        {rank: progress(*(odd if rank == 6 else USUAL_CALLS)) for rank in range(8)}
    )
    assert verdict.ranks == (6,)
    assert why in verdict.headline


TENSOR, PIPELINE = "tensor (1)", "pipeline (2)"
THIRD, FOURTH, EIGHTH = (replace(REDUCE, sequence=number) for number in (3, 4, 8))
GATHERS = [
    replace(REDUCE, operation="nccl:gather", sizes=f"[[8]] -> [[{rank}]]") for rank in (0, 7)
]
CALLS_OF_THREE_RANKS: dict[str, Any] = {"group": TENSOR, "members": (0, 1, 2)}


@pytest.mark.parametrize(
    ("came", "ranks", "why"),
    [
        # rank 3 has called none, however far each of the others has run ahead
        (
            {
                at: (model.CollectiveProgress("default_pg", "nccl:a", calls, 0),)
                for at, calls in enumerate((7, 5, 6, 0))
            },
            (3,),
            "it called 0 collectives of group default_pg",
        ),
        # a gather's ranks pass different sizes by design
        ({rank: progress(GATHERS[rank == 7]) for rank in range(8)}, (), ""),
        # rank 1 is late for its tensor group because it waits in its pipeline group for rank 5,
        # which is late there
        (
            {
                0: progress(REDUCE, group=TENSOR),
                1: progress(EIGHTH, group=TENSOR, completed=8) + progress(FOURTH, group=PIPELINE),
                5: progress(THIRD, group=PIPELINE, completed=3),
            },
            (5,),
            PIPELINE,
        ),
        # rank 2 is in no dump of the group; the group's members tell that it is missing
        (
            {
                0: progress(REDUCE, **CALLS_OF_THREE_RANKS),
                1: progress(REDUCE, **CALLS_OF_THREE_RANKS),
                2: progress(REDUCE),
            },
            (2,),
            "",
        ),
    ],
    ids=[
        "the first collective of a group",
        "sizes that may differ",
        "the group that is stuck first",
        "a silent member",
    ],
)
def test_the_rank_behind_in_the_first_stuck_group_is_the_root_cause(
    came: dict[int, tuple[model.CollectiveProgress, ...]], ranks: tuple[int, ...], why: str
) -> None:
    """The rank that is behind in the group that is stuck first is the root cause."""
    verdict = find_stragglers(came)
    assert (verdict.ranks, verdict.scope is model.Scope.UNDETERMINED) == (ranks, not ranks)
    assert why in verdict.headline


def test_the_next_step_is_about_the_line_in_the_headline() -> None:
    """The next step is about the line that the headline has; without a line, about the log."""
    for stderr, advice in (
        ("fatal: no license\n", "find where the program prints this"),
        ("", "read the end of its log to find out why it exited"),
    ):
        found = reported_job(exited(stderr, exit_code=7))
        verdict = evidence(found)
        report = build_report(found, verdict, decide(verdict))
        assert report.answers.steps[0].text.replace("the pod's", "its") == advice


@pytest.mark.parametrize("file", ["signal_handling.py", "worker.py"])
def test_a_killed_data_loader_gets_advice_on_memory(file: str) -> None:
    """The advice is about memory; the line at which the signal arrived isn't the place."""
    message = "DataLoader worker (pid 17) is killed by signal: Killed."
    frames = (
        model.FrameInfo("/app/train.py", 62, "main", "loss.backward()"),
        model.FrameInfo(f"/x/site-packages/torch/utils/data/_utils/{file}", 73, "handler"),
    )
    exception = model.ExceptionInfo("RuntimeError", message, frames=frames)
    found = reported_job(make_error(1, exception=exception))
    verdict = evidence(found)
    answers = build_report(found, verdict, decide(verdict)).answers
    assert answers.steps[0].text.startswith("check the memory and /dev/shm of its node")
    assert answers.code == ("" if file == "signal_handling.py" else "train.py:62 in main")
