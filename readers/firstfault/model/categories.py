"""The categories of failures."""

from __future__ import annotations

CATEGORIES: dict[str, str] = {
    "recoverable": "the user's code raised FlyteRecoverableException or a subclass",
    "user_code": "an exception of the training code without a more precise class",
    "input": "the task was given or configured with something it cannot run with",
    "config": "a configuration that no worker can run with",
    "data": "malformed or missing training data",
    "numerics": "NaN, overflow or another numerical fault",
    "checkpoint": "a checkpoint is damaged, missing or does not fit the model",
    "cuda_oom": "the GPU's memory is used up",
    "gpu_kernel": "a CUDA kernel failed (illegal access, assert)",
    "gpu_hardware": "a GPU, its memory or its links are faulty (ECC, NVLink, fell off the bus)",
    "host_oom": "the host's or the container's memory is used up",
    "disk_full": "no space is left on a disk",
    "storage": "object storage or a file system failed",
    "network": "the network failed, as reported by a process that is not a victim",
    "external_service": "a hub, a tracker or another service failed",
    "auth": "credentials are missing, wrong or expired",
    "collective": "a collective operation failed because of a peer",
    "rendezvous": "the rendezvous failed, or the nodes lost its store",
    "hang": "a worker stopped making progress",
    "signal": "a process was killed by a signal that its agent did not send",
    "exit": "a process exited by itself without an exception",
    "stopped": "a process was stopped by its own agent",
    "preemption": "it was told to stop from outside: preemption, drain, eviction, abort or time limit",
    "node_lost": "it is gone and left no report",
    "platform": "the elastic agent itself failed",
    "infrastructure": "something outside of the agent and its workers failed",
    "unknown": "no category fits what was reported",
}
"""The closed list of categories, each with its meaning."""
