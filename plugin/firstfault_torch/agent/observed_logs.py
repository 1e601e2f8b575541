"""A user's LogsSpecs that reports where each worker's output goes."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs


class ObservedLogsSpecs(LogsSpecs):
    """A user's LogsSpecs that also records where each worker's output goes."""

    def __init__(self, specs: LogsSpecs) -> None:
        super().__init__()
        self._specs = specs
        self.prepare: Callable[[dict[int, dict[str, str]], LogsDest], None] = (
            lambda _environments, _logs: None
        )
        """Called with the workers' environments, which it may add to, and where their output goes.
        """

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where each worker's output goes."""
        found = self._specs.reify(envs)
        self.prepare(envs, found)
        return found

    @property
    def root_log_dir(self) -> str:
        """The folder of all logs."""
        return self._specs.root_log_dir
