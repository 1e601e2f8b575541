"""The functions that the user gave to a call, called with the state of this rank."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from firstfault_inprocess.call.session import CallSession
from firstfault_inprocess.exception import (
    HealthCheckError,
    InternalError,
    RestartAbort,
    one_line,
)
from firstfault_inprocess.hooks import Compose
from firstfault_inprocess.options import InProcessOptions
from firstfault_inprocess.rank_assignment import Mode, RankAssignmentCtx, State
from firstfault_torch.guard import suppress_internal_errors


class RankHooks:
    """The state of this rank, and the hooks that are called with it or change it."""

    def __init__(self, options: InProcessOptions, state: State) -> None:
        self._options = options
        self.state = state

    def initialize(self, restart_cause: BaseException | None) -> None:
        """Call `initialize`, before an iteration.

        Raises:
            RestartAbort: a limit was met; its cause is that of the last restart, unless the hook
                gave one.
        """
        if self._options.initialize is None:
            return
        try:
            self._options.initialize(self.state)
        except RestartAbort as abort:
            if abort.__cause__ is None and restart_cause is not None:
                raise abort from restart_cause
            raise

    def check_assignment(self) -> None:
        """Raise a RestartAbort if the rank assignment left this rank, or all, without a part."""
        state = self.state
        if state.mode is Mode.INITIALIZED:
            raise RestartAbort(
                f"the rank assignment left rank {state.initial_rank} neither active nor a reserve; "
                "add ActivateAllRanks, or a rank filter"
            )
        if state.active_world_size == 0:
            raise RestartAbort(
                f"no rank is active: the rank assignment left none of {state.world_size} ranks"
            )

    def check_health(self) -> None:
        """Call `health_check`; raise a HealthCheckError if it raises."""
        if self._options.health_check is None:
            return
        try:
            self._options.health_check(self.state)
        except Exception as error:
            raise HealthCheckError(
                f"rank {self.state.initial_rank} is not healthy: {error}"
            ) from error

    def finalize(self, own_error: BaseException | None) -> None:
        """Call `finalize`, after the function has raised this error, or was interrupted."""
        self.state = replace(self.state, fn_exception=own_error)
        if self._options.finalize is None:
            return
        try:
            self._options.finalize(self.state)
        except (dist.DistNetworkError, dist.DistStoreError) as store_error:
            # it isn't this call's own store
            raise RuntimeError(f"`finalize` failed: {one_line(store_error)}") from store_error

    def assign(self, session: CallSession, gone: Collection[int]) -> None:
        """Assign this rank its place among the ranks that continue, all except `gone`."""
        iteration = session.iteration
        if iteration is None:
            raise InternalError("ranks were assigned outside of a call")
        # All ranks get the same `gone`, so each computes its own new rank. The keys are those of
        # the ended iteration.
        exchange = partial(iteration.exchange, session.barrier_timeout)
        context = RankAssignmentCtx(
            self.state, iteration.open_substore("assignment"), set(gone), exchange
        )
        parts = [
            part
            for part in (self._options.rank_filter, self._options.rank_assignment)
            if part is not None
        ]
        self.state = Compose(*parts)(context).state

    def complete(self) -> None:
        """Call `completion` after all ranks have completed."""
        with suppress_internal_errors("calling `completion`"):
            if self._options.completion is not None:
                self._options.completion(self.state)

    def terminate(self) -> None:
        """Call `terminate`, because this rank takes no part in further iterations."""
        with suppress_internal_errors("calling `terminate`"):
            if self._options.terminate is not None:
                self._options.terminate(self.state)

    def begin_next(self) -> None:
        """Begin the next iteration's state, with the ranks that `assign` gave."""
        self.state = self.state.next()

    def drop_exception(self) -> None:
        """Hold the function's last exception no longer."""
        self.state = replace(self.state, fn_exception=None)
