"""``firstfault run``: runs a task on one machine. Only this package imports ``firstfault.cli`` and rich.

Each pod is a real ``pyflyte-execute``; the rules of Kubeflow's operator and of Flyte are simulated.
"""

from flytekitplugins.firstfault.local.runner import RunResult, RunSettings, run_task

__all__ = ["RunResult", "RunSettings", "run_task"]
