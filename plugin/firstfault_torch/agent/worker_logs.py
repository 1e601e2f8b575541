"""What torch decides about each worker's output and environment, seen before the workers start."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import LogsSpecs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.elastic.multiprocessing import LogsDest

__all__ = ["ObservedLogs", "with_node"]

_MACRO = re.compile(r"\$(?:(?P<escaped>\$)|(?P<named>group_rank|node)\b|\{(?P<braced>group_rank|node)\})")


class ObservedLogs(LogsSpecs):
    """A user's LogsSpecs that tells where each worker's output goes.

    Args:
        specs: the user's; they alone decide.
        prepare: called with the workers' environments, which it may add to, and where their output goes, by local rank.
    """

    def __init__(self, specs: LogsSpecs, prepare: Callable[[dict[int, dict[str, str]], LogsDest], None]) -> None:
        super().__init__()
        self._specs = specs
        self._prepare = prepare

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where each worker's output goes."""
        found = self._specs.reify(envs)
        self._prepare(envs, found)
        return found

    @property
    def root_log_dir(self) -> str:
        """The folder of all logs."""
        return self._specs.root_log_dir


def with_node(template: str, values: Mapping[str, object]) -> str:
    """Return a template for log lines in which ``${group_rank}`` and ``${node}`` are filled in.

    torch fills in ``${role_name}``, ``${rank}`` and ``${local_rank}`` later; it does not know a node's rank and name.

    Args:
        template: as for ``string.Template``.
        values: of "group_rank" and "node".
    """

    def fill(match: re.Match[str]) -> str:
        name = match["named"] or match["braced"]
        return match[0] if name is None else str(values[name]).replace("$", "$$")

    return _MACRO.sub(fill, template)
