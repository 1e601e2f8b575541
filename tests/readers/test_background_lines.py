"""What stands around a peer's end in a log is no fault of the process that wrote it; a fault of its own still is."""

from __future__ import annotations

import pytest

from firstfault.evidence import classify

REMOTE = (
    "[rank5]:[E914 07:08:09.100200 ProcessGroupNCCL.cpp:600] [Rank 5] Collective WorkNCCL(SeqNum=44, "
    "OpType=BROADCAST, NumelIn=9, NumelOut=9, Timeout(ms)=700000) raised the following async exception: "
    "NCCL error: remote process exited or there was a network error, NCCL version 2.22.3\nncclRemoteError: "
    "A call failed possibly due to a network error or a remote process exiting prematurely.\nLast "
    "error:\nNET/IB : Got completion from peer 10.8.7.6<40404> with status=12 opcode=0 len=0 vendor err 129 "
    "(Send)\nterminate called after throwing an instance of 'c10::DistBackendError'"
)
WAITED = (
    "[rank5]:[E914 07:08:09.100200 ProcessGroupNCCL.cpp:640] [Rank 5] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=44, OpType=BROADCAST, NumelIn=9, NumelOut=9, Timeout(ms)=700000) ran for 700020 milliseconds "
    "before timing out."
)
OWN = (
    "[rank5]: torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.00 GiB.",
    "OSError: [Errno 28] No space left on device: '/out/part-7'",
    "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://hub.example.org/w",
    "node9:70:71 [5] transport/net_ib.cc:90 NCCL WARN NET/IB : mlx5_5:1 Got async event : port error",
)
HARMLESS = (
    "huggingface/tokenizers: The current process just got forked. Disabling parallelism to avoid deadlocks...",
    "wandb: View run quiet-sea-3 at https://tracker.example.org/t/r/9",
    "node9:70:71 [5] NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file: No such file or directory",
    "libibverbs: Warning: couldn't load driver 'libx-rdmav34.so': libx.so: cannot open shared object file",
    "INFO:botocore.credentials:Found credentials, none are invalid.",
    "2031-04-05 06:07:08,900 - train - INFO - saved step 9, error 0.2, to s3://bucket/9",
    "I0914 07:08:09.100200 70 api.py:9] no error at https://hub.example.org/w",
    "2031-04-05 06:07:08 WARNING urllib3.connectionpool: Retrying (Retry(total=1)) after ReadTimeoutError: /api/w",
    "[WARN] cannot reach https://index.example.org, skipping the version check",
    "/home/azureuser/env/trainer.py:9: FutureWarning: `x` failed, see https://example.org/errors",
    "UserWarning: Plan failed with CUDNN_STATUS_NOT_SUPPORTED",
    "Extension modules: torch._C, pyarrow._s3fs, pyarrow._azurefs, aiohttp._helpers, grpc_error (total: 5)",
    "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 3e-05, 'epoch': 0.4}",
    "iteration 9 | loss 2.1 | grad norm inf | skipping this step",
    "no checkpoint at /out: the directory does not exist, training from scratch",
    '[rank5]:   File "/lustre/me/s3fs/redis_errors.py", line 9, in failed',
    "frame #3: step(float) + 0x9 (0x7f12 in /nfs/me/azure/liberror.so)",
)


@pytest.mark.parametrize("harmless", HARMLESS)
@pytest.mark.parametrize("prefix", ["", "node9: ", "2031-04-05T06:07:08.9Z stderr F "])
def test_lines_around_a_peers_end(harmless: str, prefix: str) -> None:
    """Neither a name nor a notice makes a victim guilty, whether it stands before or after."""
    line = prefix + harmless
    for text, role in ((REMOTE, "secondary"), (WAITED, "ambiguous")):
        assert classify(f"{line}\n{text}").role.value == role
        assert classify(f"{text}\n{line}").role.value == role


@pytest.mark.parametrize("own", OWN)
def test_a_fault_of_its_own_among_them(own: str) -> None:
    """What a process raised itself counts, though harmless lines precede it and its peers' ends follow."""
    before = "\n".join(HARMLESS)
    assert classify(f"{before}\n{own}\n{REMOTE}").role.value == "primary"
    assert classify(own).category == classify(f"{before}\n{own}\n{REMOTE}").category


@pytest.mark.parametrize(
    ("kind", "message", "role"),
    [
        ("RuntimeError", "NCCL error in: /lustre/b/torch/c10d/NCCLUtils.cpp:9, ncclRemoteError", "secondary"),
        ("RuntimeError", "NCCL error in: /lustre/b/torch/c10d/NCCLUtils.cpp:9, something new", "ambiguous"),
        ("DistBackendError", "NCCL timeout in communicator initialization.", "ambiguous"),
        (
            "RuntimeError",
            "[gloo/transport/tcp/pair.cc:9] Pair is not connected ([10.8.7.6]:9 <--> [::]:8)",
            "secondary",
        ),
        ("RuntimeError", "[gloo/transport/tcp/pair.cc:9] writev [10.8.7.6]:404: Success", "ambiguous"),
        ("RuntimeError", "[x/gloo/transport/tcp/pair.cc:9] Read error [10.8.7.6]:9: No route to host", "secondary"),
        ("RuntimeError", "Stop_waiting response is expected", "secondary"),
        ("RuntimeError", "[ProcessGroupUCC] failed to progress UCC collective", "ambiguous"),
        ("RuntimeError", "Engine core initialization failed. See root cause above.", "secondary"),
        ("RuntimeError", "Input tensor data type is not supported for NCCL process group: Half", "primary"),
        ("RuntimeError", "Distributed package doesn't have NCCL built in", "primary"),
        ("RuntimeError", "CUDA error: misaligned address while retrying", "primary"),
        (
            "CalledProcessError",
            "Command '['py', 'a.py', '--local_rank=9']' returned non-zero exit status 1.",
            "ambiguous",
        ),
        ("", "NCCL WARN NET/OFI Request 0x7 completed with error. RC: 9. Error: 13 (Unresponsive remote", "secondary"),
        ("", "NCCL WARN NET/OFI Request 0x7 completed with error. Error: 9 (Bad queue pair (QP) number", "secondary"),
        ("", "NCCL WARN NET/OFI Request 0x7 completed with error. Error: 5 (Local key (LKEY) invalid", "primary"),
        ("", "NCCL WARN NET/IB: Got completion from peer 10.8.7.6<9> with status=IBV_WC_WR_FLUSH_ERR(5)", "secondary"),
        ("", "NCCL WARN NET/IB : Got completion from peer 10.8.7.6<9> with status=12 opcode=403 len=401", "ambiguous"),
        ("", "NCCL WARN socketProgressOpt: Call to recv from 10.8.7.6<9> failed : Connection timed out", "secondary"),
        ("", f"{REMOTE}\nNCCL WARN Cuda failure 4 'driver shutting down'", "secondary"),
        (
            "",
            "The Notify register times out\nRuntimeError: ACL stream synchronize failed, error code:507048",
            "ambiguous",
        ),
        ("", "ChildFailedError: a.py FAILED Root Cause (first observed failure): exitcode : -9 (pid: 7)", "secondary"),
        ("", "in _tensor_to_object\n  return load(b)\n_pickle.UnpicklingError: invalid load key, '9'.", "ambiguous"),
    ],
)
def test_a_library_between_ranks(kind: str, message: str, role: str) -> None:
    """An error of a library that connects ranks is the process's own only if the text says so."""
    assert classify(message, kind).role.value == role
