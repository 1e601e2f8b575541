"""What the node runs: task, image, GPUs and source code."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from pathlib import Path

from firstfault.model import NodeSetup
from firstfault_torch.guard import call_with_timeout
from firstfault_torch.node_context import Identity
from firstfault_torch.source_code import find_source_code
from firstfault_torch.time_limits import NODE_SETUP_TIMEOUT_SECONDS

_GPUS_FOLDER = Path("/proc/driver/nvidia/gpus")
_GPU_MODEL_LINE = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)


def read_node_setup(identity: Identity) -> NodeSetup:
    """Return what this node runs; files that don't answer within 0.25 s are left out."""
    known = NodeSetup(task=identity.task, image=identity.image)
    read = partial(_with_files, known)
    doing = "reading what this node runs"
    return call_with_timeout(read, NODE_SETUP_TIMEOUT_SECONDS, doing) or known


def _with_files(known: NodeSetup) -> NodeSetup:
    models = []  # of each GPU that NVIDIA's driver shows to this container
    for file in sorted(_GPUS_FOLDER.glob("*/information")):
        with contextlib.suppress(OSError):
            models += _GPU_MODEL_LINE.findall(file.read_text(encoding="utf-8", errors="replace"))[
                :1
            ]
    url, root = find_source_code()
    return NodeSetup(
        task=known.task,
        image=known.image,
        gpu_model=models[0] if models else "",
        gpus=len(models),
        source_url=url,
        source_root=str(root) if url else "",
    )
