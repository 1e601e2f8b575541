"""Tell exceptions about memory, disks and GPUs from others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import classify
from firstfault.exceptions.first_cause import find_first_cause

if TYPE_CHECKING:
    from firstfault.model import ExceptionInfo

_RESOURCE_CATEGORIES = {"cuda_oom", "host_oom", "disk_full", "gpu_hardware", "gpu_kernel"}
"""Categories of faults that end one thread, while other threads notice only that it's gone."""


def ends_resource(exception: ExceptionInfo) -> bool:
    """Whether an exception is about memory, a disk or a GPU:
    it may explain a later one of the same process.
    """
    return find_specific_category(exception) in _RESOURCE_CATEGORIES


def find_specific_category(exception: ExceptionInfo) -> str:
    """Return the category of a fault that an exception's text identifies, or "" without one."""
    first = find_first_cause(exception)
    judged = classify(first.message, first.type, (*first.bases, "BaseException"))
    is_fault = judged.role is Role.PRIMARY and judged.is_specific
    return judged.category if is_fault else ""
