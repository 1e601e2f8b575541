"""``firstfault run``: a task on one machine.

Each pod is the real ``pyflyte-execute``; over the pods stand the operator's and Flyte's rules.
"""

from flytekitplugins.firstfault.local.runner import RunResult, RunSettings, run_task

__all__ = ["RunResult", "RunSettings", "run_task"]
