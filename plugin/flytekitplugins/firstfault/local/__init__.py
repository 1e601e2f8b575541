"""``firstfault run``: runs a task on one machine. Only this package imports ``firstfault.cli`` and rich.

Each pod is a real ``pyflyte-execute``; the rules of Kubeflow's operator and of Flyte are simulated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.lazy import lazy_names

if TYPE_CHECKING:
    from flytekitplugins.firstfault.local.runner import RunResult, RunSettings, run_task

__all__ = ["RunResult", "RunSettings", "run_task"]

__getattr__, __dir__ = lazy_names(__name__, {"flytekitplugins.firstfault.local.runner": __all__})
