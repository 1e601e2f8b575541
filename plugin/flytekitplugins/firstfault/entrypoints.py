"""The entrypoints of an Elastic task's workers:
run the task function in flytekit's context and record it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault_torch.guard import suppress_internal_errors
from firstfault_torch.time_limits import LAST_DECKS_TIMEOUT_SECONDS
from firstfault_torch.worker.worker_monitor import WorkerMonitor, recorded
from flytekitplugins.firstfault.flyte_engine import FlyteEngine

if TYPE_CHECKING:
    import flytekit
    from flytekit.core.context_manager import FlyteContext, OutputMetadata

    from firstfault_inprocess import InProcessRestart


class WorkerResult(NamedTuple):
    """A worker's result for its agent."""

    return_value: Any
    decks: list[flytekit.Deck]
    output_metadata: OutputMetadata | None = None


def run_spawned(
    work: bytes,
    raw_output_prefix: str,
    checkpoint_dest: str | None,
    checkpoint_src: str | None,
    keeps_decks: bool,
) -> Any:
    """Run the task function in a new interpreter, with a new execution context.

    `work` is the function with its arguments, and how the ranks restart in their processes or None,
    pickled by cloudpickle. `checkpoint_src` is the checkpoint of the attempt before.
    """
    with recorded(FlyteEngine()) as monitor:
        import cloudpickle  # noqa: PLC0415 - so that a failing import is recorded
        from flytekit.bin.entrypoint import setup_execution  # noqa: PLC0415

        with setup_execution(
            raw_output_data_prefix=raw_output_prefix,
            checkpoint_path=checkpoint_dest,
            prev_checkpoint=checkpoint_src,
        ) as context:
            # Unpickling imports the user's modules, so it may raise or crash. Inside `recorded`
            # that is reported like a failure of the task function, and the modules already see
            # flytekit's execution context.
            function, restart = cloudpickle.loads(work)
            run = partial(_run, function, context, monitor, keeps_decks=keeps_decks)
            return run() if restart is None else restart.call(run, monitor)


def code_with_file(
    file: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]
) -> CodeType:
    """Return the code object of a pickled function, with its file."""
    return make(*arguments).replace(co_filename=file)


def run_forked(
    function: Callable[[], Any],
    *,
    keeps_decks: bool = False,
    restart: InProcessRestart | None = None,
) -> Any:
    """Run the task function in a forked process, with the parent's execution context."""
    with recorded(FlyteEngine()) as monitor:
        from flytekit.core.context_manager import (  # noqa: PLC0415 - the parent has loaded it
            FlyteContextManager,
        )

        context = FlyteContextManager.current_context()
        run = partial(_run, function, context, monitor, keeps_decks=keeps_decks)
        return run() if restart is None else restart.call(run, monitor)


def _run(
    function: Callable[[], Any],
    context: FlyteContext,
    monitor: WorkerMonitor,
    *,
    keeps_decks: bool,
) -> WorkerResult:
    import flytekit  # noqa: PLC0415 - already loaded

    if monitor.node_context is not None:
        from flytekitplugins.firstfault.flytekit_classes import (  # noqa: PLC0415 - imports flytekit
            expect_missing_checkpoint,
        )

        # Before the task function runs: it may call `restore` first.
        expect_missing_checkpoint()
    if keeps_decks:
        with suppress_internal_errors("keeping the decks"):
            _store_decks(flytekit.current_context().decks, monitor)
    return_value = function()
    # The tracker's keys are id() of the values: look up the metadata before the value is pickled
    # for the agent.
    tracker = context.output_metadata_tracker
    metadata = tracker.get(return_value) if tracker else None
    return WorkerResult(return_value, flytekit.current_context().decks, metadata)


def _store_decks(decks: list[flytekit.Deck], monitor: WorkerMonitor) -> None:
    """Write rank 0's decks, which are the task's, to a file that outlives this process."""
    node_context, place = monitor.node_context, monitor.place
    if node_context is None or place.rank != 0 or node_context.files is None:
        return
    from flytekitplugins.firstfault.rank_decks import (  # noqa: PLC0415 - rank 0 alone needs it
        DeckKeeper,
    )

    keeper = DeckKeeper(node_context.files, place.round, decks)
    # Two ways to the last check: the task function ends, or the agent is about to stop this rank
    # because of another rank's failure. In the second case the main thread may be inside C++, so
    # `at_close` may come too late.
    monitor.at_close(keeper.end)
    monitor.before_stop(partial(keeper.check_now, LAST_DECKS_TIMEOUT_SECONDS))
