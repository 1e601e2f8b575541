"""The lab's trainings as programs under any launcher: with progress lines, and with more faults.

Its inputs, those of `main`, are in ``LAB_INPUTS`` as JSON. It knows nothing of firstfault.
"""

import argparse
import faulthandler
import itertools
import json
import logging
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

for _rank, _local in (
    ("SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
):
    if "RANK" not in os.environ and _rank in os.environ:
        os.environ |= {"RANK": os.environ[_rank], "LOCAL_RANK": os.environ[_local]}
os.environ["HOSTNAME"] = socket.gethostname()
WORLD = int(os.environ.setdefault("WORLD_SIZE", "4"))

import torch  # noqa: E402 - only now it is known which rank this is
import torch.distributed as dist  # noqa: E402

from lab.cascades import nccl_training, training  # noqa: E402
from lab.cascades.injecting import marks, rank  # noqa: E402

LOG = logging.getLogger("train")
AT_START = ("import", "import-all", "argument-all")


def _end(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _check_loss() -> None:
    loss = torch.log(torch.tensor(-1.0))
    assert torch.isfinite(loss), f"loss is {loss.item()} at step {training.FAULT_STEP}"


def _log_and_exit() -> None:
    try:
        json.loads('{"shards": [1, 2')
    except ValueError:
        LOG.exception("cannot read the manifest")
        os._exit(1)


training.FAULTS |= {
    "nan": _check_loss,
    "shape": lambda: torch.ones(3, 4) @ torch.ones(5, 6),
    "state": lambda: torch.nn.Linear(4, 4).load_state_dict(torch.nn.Linear(4, 5).state_dict()),
    "loader-killed": lambda: list(
        torch.utils.data.DataLoader([0, 1], num_workers=1, worker_init_fn=_end)
    ),
    "file": lambda: Path("/data/shard-00017.tar").read_bytes(),
    "cuda-oom": nccl_training.out_of_memory,
    "explained": lambda: sys.exit("ERROR: label 1003 is out of range, vocabulary has 1000 entries"),
    "logged": _log_and_exit,
    "import": lambda: __import__("flash_attention_4"),
    "import-all": lambda: __import__("flash_attention_4"),
    "argument-all": (
        lambda: argparse.ArgumentParser("train.py").parse_args(["--learnig-rate", "0.1"])
    ),
}


def _say(style: str, step: int) -> None:
    text = (
        f"step {step} loss {2.5 / (step + 1) + random.random() / 10:.4f} tokens/s"
        f" {random.randint(9000, 9900)}"
    )
    if style == "ranks":
        print(f"[Rank {rank()}] {text}")
    elif style == "logging":
        LOG.info(text)
    elif style == "json":
        print(json.dumps({"time": time.time(), "level": "INFO", "rank": rank(), "message": text}))
    elif style == "bar" and rank() == 0:
        sys.stderr.write(
            f"\rEpoch 0: {step * 16:3}%|{'█' * step:<7}| {step}/6 [00:0{step}<00:04, {step}.21it/s]"
        )
    elif style != "quiet" and rank() == 0:
        print(text)


def speak(style: str, decoys: bool, endless: bool) -> None:
    """Print progress as `style` says from now on,
    and with `decoys` also errors that are handled.
    """
    form = (
        f"%(asctime)s %(levelname)s [rank {rank()}] %(name)s: %(message)s"
        if style == "logging"
        else None
    )
    logging.basicConfig(format=form, level=logging.INFO)
    if style in {"ranks", "bar"}:
        faulthandler.enable()
    if style in {"ranks", "logging"}:
        LOG.info("rank %s of %s on %s, pid %s", rank(), WORLD, socket.gethostname(), os.getpid())
    if style == "rich":
        __import__("rich.traceback").traceback.install()
    if style == "json":
        sys.excepthook = lambda *error: print(
            json.dumps(
                {
                    "level": "ERROR",
                    "rank": rank(),
                    "exc_info": "".join(traceback.format_exception(*error)),
                }
            )
        )
    steps = itertools.count()
    reduce = dist.all_reduce

    def all_reduce(*values: Any, **options: Any) -> Any:
        step = next(steps)
        _say(style, step)
        if step == 1 and decoys:
            try:
                {}["index-v2"]
            except KeyError:
                LOG.exception("no cached index, building it again")
            LOG.warning(
                "shard 12: ConnectionResetError(104, 'Connection reset by peer'), attempt 1 of 5"
            )
        if endless:
            (marks() / f"step-{rank()}-{step}").touch()
            time.sleep(0.3)
        return reduce(*values, **options)

    dist.all_reduce = all_reduce


def main(*, kind: str, culprit: int, style: str, decoys: int, nccl: str, then: str = "") -> None:
    """Train: `culprit` meets `kind`, and rank `decoys` handles errors.

    kind: a fault, "endless" for a training that something else ends, or a success; `then`: the
    fault of the next rank after torchrun's restart. nccl: the version of torch whose words the
    lab's NCCL prints; empty for gloo.
    """
    if then and ((marks() / "again").exists() or list(marks().glob("truth-*.json"))):
        (marks() / "again").touch()
        for old in marks().glob("truth-*.json"):
            old.unlink(missing_ok=True)
        kind, culprit = then, (culprit + 1) % WORLD
    speak(style, decoys == rank(), kind == "endless")
    if kind == "endless":
        training.STEPS = 500
    is_noisy = kind == "success-noisy"
    kind = "" if kind in {"endless", "success", "success-noisy"} else kind
    if nccl:
        nccl_training.train(kind, culprit, nccl)
    else:
        training.train(kind, culprit, early=kind in AT_START)
    if is_noisy:
        make_noise_at_exit()
    if rank() == 0:
        print("training is done, saved /checkpoints/final")


def make_noise_at_exit() -> None:
    """Print what a healthy training may print at its end: retries, ignored exceptions,
    warnings of libraries.
    """
    for attempt in (1, 2):
        LOG.error(
            "upload of metrics failed: HTTP 503 Service Unavailable, retrying (%s/5)", attempt
        )
    warnings.warn(
        "process group was not destroyed before exit, which can leak resources", stacklevel=1
    )
    if rank() == 1:
        held = type("Loader", (), {"__del__": lambda _: {}["workers"]})()
        del held  # Python prints "Exception ignored in" and the traceback
        LOG.error("could not close the cache: [Errno 9] Bad file descriptor")


def as_rank(number: int, inputs: dict[str, Any]) -> None:
    """Train as a rank that this program starts itself."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    main(**inputs)


class Trainer:
    """An actor of Ray's."""

    run = staticmethod(as_rank)


if __name__ == "__main__":
    _inputs = json.loads(os.environ["LAB_INPUTS"])
    _launcher = os.environ["LAB_LAUNCHER"]
    if _launcher == "spawn":
        torch.multiprocessing.spawn(as_rank, (_inputs,), nprocs=WORLD)
    elif _launcher == "ray":
        import ray  # an environment of its own

        # Ray's workers import it, and so have all faults
        from lab.consoles.program import (
            Trainer as _Trainer,
        )

        ray.init(num_cpus=WORLD, include_dashboard=False)
        _actors = [ray.remote(_Trainer).remote() for _ in range(WORLD)]
        ray.get([actor.run.remote(number, _inputs) for number, actor in enumerate(_actors)])
    else:
        main(**_inputs)
