"""Faults of two ranks on one real GPU, with both NCCL backends of torch: ``make gpu``, ten minutes.

Prints a table for docs/project/accuracy.md. ``--backend gloo`` runs the faults that need no GPU, to
try this script.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import firstfault_inprocess as inprocess

CULPRIT, STEPS, FAULT_STEP, TIMEOUT_S = 1, 8, 4, 20.0
MOST_S = 180.0
ON_CPU = ("exception", "hang", "abort", "restart")
FAULTS = (*ON_CPU, "assert", "illegal", "memory")
CATEGORIES = {
    "exception": {"user_code"},
    "hang": {"hang"},
    "abort": {"signal"},
    "assert": {"gpu_kernel"},
    "illegal": {"gpu_kernel"},
    "memory": {"cuda_oom"},
}


def main() -> int:
    """Run each fault with each backend; print the table;
    return how many verdicts are not as expected.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    parser.add_argument(
        "--fault", choices=FAULTS, help="train with this fault; the script starts itself so"
    )
    options = parser.parse_args()
    if options.fault:
        train(options.fault, options.backend)
        return 0
    if options.backend == "nccl" and not torch.cuda.is_available():
        print("make gpu: this machine has no GPU that torch can use; nothing was run")
        return 0
    on_gpu = options.backend == "nccl"
    columns = [("nccl2", "1"), ("nccl", "0")] if on_gpu else [("gloo", "")]
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(
        f"{device}, torch {torch.__version__}, Python {platform.python_version()}, {TIMEOUT_S:g} s"
        " of timeout\n"
    )
    print(
        "| Fault of rank 1 | "
        + " | ".join(name for name, _ in columns)
        + " |\n|---|"
        + "---|" * len(columns)
    )
    wrong = 0
    for fault in FAULTS if on_gpu else ON_CPU:
        found = [outcome(fault, options.backend, value) for _, value in columns]
        wrong += sum(not is_right for is_right, _ in found)
        print(f"| {fault} | " + " | ".join(text for _, text in found) + " |", flush=True)
    return wrong


def outcome(fault: str, backend: str, use_nccl2: str) -> tuple[bool, str]:
    """Run one job of two ranks; return whether its end is as expected, and a cell of the table."""
    with tempfile.TemporaryDirectory(
        prefix="firstfault-gpu-", ignore_cleanup_errors=True
    ) as folder:
        environment = {
            **os.environ,
            "FIRSTFAULT_FOLDER": folder,
            "FIRSTFAULT_JOB": "gpu",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # NCCL refuses two ranks on one GPU without it
            **({"TORCH_DIST_USE_NCCL2": use_nccl2} if use_nccl2 else {}),
        }
        command = [
            sys.executable,
            "-m",
            "firstfault",
            "torchrun",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        command += [__file__, "--backend", backend, "--fault", fault]
        began = time.monotonic()
        try:
            ended = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=MOST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, f"WRONG: it did not end within {MOST_S:g} s"
        took = f"{time.monotonic() - began:.0f} s"
        if fault == "restart":
            is_right = ended.returncode == 0
            return is_right, (
                f"continued, {took}"
                if is_right
                else f"WRONG: {ended.stderr.strip().splitlines()[-1:]}"
            )
        show = [sys.executable, "-m", "firstfault", "show", "--json", str(Path(folder, "gpu", "0"))]
        shown = subprocess.run(show, capture_output=True, text=True, check=False)
        verdict = (json.loads(shown.stdout) if shown.stdout else {}).get("verdict") or {}
    is_right = verdict.get("ranks") == [CULPRIT] and verdict.get("category") in CATEGORIES[fault]
    text = f"{verdict.get('confidence')}: {verdict.get('headline', ended.stderr[-200:])}".replace(
        "|", "/"
    )
    return is_right, f"{'right' if is_right else 'WRONG'}, {text}, {took}"


def train(fault: str, backend: str) -> None:
    """Train; rank 1 meets the fault in a step, in the first iteration of a restart only."""
    if fault == "restart":
        retries = inprocess.initialize.RetryController(max_iterations=3)
        inprocess.Wrapper(initialize=retries)(_steps)("exception", backend)
    else:
        _steps(fault, backend)


def _steps(fault: str, backend: str) -> None:
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    call = inprocess.current_call()
    dist.init_process_group(backend, timeout=dt.timedelta(seconds=TIMEOUT_S))
    for step in range(STEPS):
        gradient = torch.ones(1024, device=device)
        if (
            step == FAULT_STEP
            and dist.get_rank() == CULPRIT
            and (call is None or call.iteration == 0)
        ):
            meet(fault, device)
        dist.all_reduce(gradient)
        gradient.sum().item()
    dist.destroy_process_group()


def meet(fault: str, device: torch.device) -> None:
    """Meet a fault."""
    if fault == "exception":
        raise ValueError("the batch has no labels")
    if fault == "hang":
        time.sleep(600)
    elif fault == "abort":
        os.abort()
    elif fault == "assert":
        torch.ones(4, device=device)[torch.tensor([9], device=device)].sum().item()
    elif fault == "illegal":
        _freed(device).add_(1).sum().item()
    else:
        _kept = [torch.empty(1 << 28, device=device) for _ in range(10_000)]


def _freed(device: torch.device) -> torch.Tensor:
    """Return a tensor whose memory the driver has taken back."""
    memory = torch.ones(1 << 26, device=device)

    class View:
        __cuda_array_interface__ = memory.__cuda_array_interface__

    view = torch.as_tensor(View(), device=device)
    del memory
    torch.cuda.empty_cache()
    return view


if __name__ == "__main__":
    sys.exit(main())
