"""Tasks of Flyte 2 whose input names a fault of their last rank."""

import asyncio
import os
import signal
import time
from pathlib import Path

import flyte
import flyte.report
import torch.distributed as dist
from flyte._run_python_script import _build_task
from flyte.clustered import ClusteredTaskEnvironment
from flyteplugins.pytorch.task import Elastic

from firstfault_torch.engine import RecoverableError

clustered = ClusteredTaskEnvironment(name="clustered", replicas=2, nproc_per_node=1)
elastic = flyte.TaskEnvironment(
    name="elastic", plugin_config=Elastic(nnodes=1, nproc_per_node=2, max_restarts=1)
)
inner = flyte.TaskEnvironment(name="inner")
script = ClusteredTaskEnvironment(name="python_script", replicas=2, nproc_per_node=1)
execute_script = _build_task(script, str(Path(__file__).with_name("script.py")), 3600, "script")


@inner.task
def refuse(reason: str) -> int:
    raise ValueError(reason)


def _raise(fault: str) -> None:
    if fault == "bug":
        raise TypeError("learning_rate is None")
    if fault == "cancelled":
        raise asyncio.CancelledError("the evaluation was cancelled")
    if fault == "interrupted":
        raise KeyboardInterrupt("the evaluation was interrupted")
    if fault == "unclear" or (fault == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
        raise ConnectionError("the data server closed the connection")
    if fault == "recoverable":
        raise RecoverableError("the queue is full")


def fail(fault: str) -> int:
    """Train a step, and fail before it at the last rank."""
    dist.init_process_group("gloo")
    Path(os.environ["MARKS"], f"{os.getpid()}").touch()
    for _ in range(int(os.environ.get("TRAIN_STEPS", "0"))):
        dist.barrier()
        time.sleep(1)
    if dist.get_rank() == dist.get_world_size() - 1:
        _raise(fault)
        if fault == "handled":
            flyte.init()
            runner = flyte.with_runcontext(mode="local", raw_data_path=os.environ["MARKS"])
            runner._metadata_path = os.environ["MARKS"]  # else below /tmp, where all users write
            try:
                runner.run(refuse, "not now")
            except flyte.errors.RuntimeUserError:
                pass
            else:
                raise AssertionError("the inner task has not failed")
        if fault == "lost":
            os.kill(os.getppid(), signal.SIGKILL)
        if fault == "early":
            return 7
    dist.barrier()
    dist.destroy_process_group()
    return 7


@clustered.task(report=True)
async def train(fault: str) -> int:
    if fault == "reported":
        await flyte.report.log.aio("the loss is 0.3", do_flush=True)
    return fail(fault.replace("reported", "bug"))


@clustered.task
def train_to_text(fault: str) -> int:
    return f"{fail(fault)}"  # type: ignore[return-value]


@clustered.task
def train_in_thread(fault: str) -> int:
    checkpoint = flyte.ctx().checkpoint
    if checkpoint is not None and os.environ["RANK"] == "0" and flyte.ctx().restart_attempt:
        checkpoint.save_sync(b"the model")
    return fail(fault)


@elastic.task
def train_elastic(fault: str) -> int:
    return fail(fault)
