"""Runs an Elastic task in a pod or in a local call: starts the workers,
then returns rank 0's result or raises.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections import ChainMap
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import flytekit
import torch
from flytekit.core.context_manager import FlyteContextManager
from flytekit.deck.deck import TimeLineDeck
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from firstfault.errors import UsageError
from firstfault_torch.agent.launch import build_job
from firstfault_torch.failures.torch_error_file import was_recoverable
from firstfault_torch.guard import logger
from firstfault_torch.options import DEFAULT_SIGNALS, Options, logs_specs, numa_options
from firstfault_torch.run import NodeFailedError, error_files_removed, run_node
from flytekitplugins.firstfault.config import RENDEZVOUS_BACKEND, Elastic, parse_nnodes
from flytekitplugins.firstfault.entrypoints import (
    WorkerResult,
    code_with_file,
    run_forked,
    run_spawned,
)
from flytekitplugins.firstfault.flyte_engine import FlyteEngine
from flytekitplugins.firstfault.flytekit_classes import build_verdict_error

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

_NEUTRAL_VALUES = {
    "event_log_handler": "null",
    "signals_to_handle": DEFAULT_SIGNALS,
    "virtual_local_rank": False,
}
"""Values that need nothing of torch."""


class ElasticTaskError(FlyteUserRuntimeException, RuntimeError):
    """A local call failed for a reason that isn't recoverable: torch's ChildFailedError,
    or the agent's own error.

    kfpytorch documents a RuntimeError and raises a FlyteUserRuntimeException; this is both.
    """


def run_training(
    config: Elastic,
    function: Callable[[], Any],
    engine: FlyteEngine | None,
    options: Options,
    *,
    keeps_decks: bool,
) -> Any:
    """Run the workers of this node; return and raise as `ElasticFunctionTask.execute` does.

    `function` is the task function with its arguments. Without an `engine` nothing is recorded.
    With `keeps_decks`, rank 0 writes its decks to a file, for the deck of a failed attempt.
    """
    if parse_nnodes(config.nnodes)[0] > 1 and "PET_NNODES" not in os.environ:
        logger.warning(
            "nnodes is %s, but this process isn't part of a PyTorchJob (PET_NNODES isn't set):"
            " waiting for more pods. To run all of them on this machine, use: firstfault run FILE"
            " TASK --nodes %s",
            config.nnodes,
            parse_nnodes(config.nnodes)[0],
        )
    if "OMP_NUM_THREADS" not in os.environ and config.nproc_per_node > 1:
        # each of several processes would use every core
        logger.info(
            "OMP_NUM_THREADS is not set; setting it to 1 for each of this node's workers, as"
            " torchrun does"
        )
        os.environ["OMP_NUM_THREADS"] = "1"
    launch = _build_launch_config(config)
    entrypoint, args = _build_entrypoint(config, function, keeps_decks=keeps_decks)
    if engine is None:
        results = _launch_plain(launch, entrypoint, args)
        if config.in_process_restart is not None:
            results = config.in_process_restart.by_last_rank(results)
        return _hand_over(results)
    # `run_node` reads torch's error files, and so does `_build_local_exception` (root cause of
    # another rank): remove them only when the exception to raise has been built.
    with error_files_removed(launch):
        try:
            results = run_node(build_job(launch, entrypoint, args), engine=engine, options=options)
        except NodeFailedError as failed:
            # `publish` sets `is_deck_pending`, and only in a pod. A local call, and a pod without a
            # sealed verdict, raise kfpytorch's exceptions instead; a pod's entrypoint then writes a
            # stock error file.
            publication = failed.publication
            if publication is not None and publication.is_deck_pending is not None:
                raise build_verdict_error(publication) from failed.error
            raise _build_local_exception(failed) from failed.error
    return _hand_over(results)


def _launch_plain(
    config: LaunchConfig, entrypoint: Callable[..., Any], args: tuple[Any, ...]
) -> dict[int, Any]:
    """Run plain torch elastic, because recording is switched off; raise kfpytorch's errors."""
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415

    try:
        results: dict[int, Any] = elastic_launch(config=config, entrypoint=entrypoint)(*args)
    except (ChildFailedError, SignalException) as error:
        raise _build_plain_exception(error) from error
    return results


# --- before ---------------------------------------------------------------------------------------


def _build_launch_config(config: Elastic) -> LaunchConfig:
    from torch.distributed.launcher.api import (  # noqa: PLC0415 - looked up when used, as kfpytorch does
        LaunchConfig,
    )

    # the operator sets PET_NNODES; torchrun reads it too
    min_nodes, max_nodes = parse_nnodes(os.environ.get("PET_NNODES") or config.nnodes)
    logs = logs_specs(
        config.log_dir,
        config.redirects,
        config.tee,
        config.local_ranks_filter,
        config.nproc_per_node,
    )
    return LaunchConfig(
        # The same in all pods of the execution, so their agents meet in one rendezvous.
        run_id=flytekit.current_context().execution_id.name,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=config.nproc_per_node,
        rdzv_backend=RENDEZVOUS_BACKEND,
        rdzv_configs=config.rdzv_configs,
        rdzv_endpoint=os.environ.get("PET_RDZV_ENDPOINT", "localhost:0"),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        start_method=config.start_method,
        logs_specs=logs,
        **_build_newer_options(config, LaunchConfig),
    )


def _build_newer_options(config: Elastic, launch_config: type[LaunchConfig]) -> dict[str, Any]:
    """Return the options that differ from torch's defaults.

    Raises:
        firstfault.errors.UsageError: this torch doesn't have one of them.
    """
    values = {
        "role": config.role,
        "log_line_prefix_template": config.log_line_prefix_template,
        "event_log_handler": config.event_log_handler,
        "signals_to_handle": config.signals_to_handle,
        "duplicate_stdout_filters": list(config.duplicate_stdout_filters) or None,
        "duplicate_stderr_filters": list(config.duplicate_stderr_filters) or None,
        "virtual_local_rank": config.virtual_local_rank,
        "numa_options": numa_options(config.numa_options),
    }
    if not is_dataclass(launch_config):
        return {}  # another class replaces torch's
    defaults = {field.name: field.default for field in fields(launch_config)}
    chosen = {
        name: value
        for name, value in values.items()
        if value != defaults.get(name, _NEUTRAL_VALUES.get(name))
    }
    for name in chosen:
        if name not in defaults:
            raise UsageError(
                f"Elastic.{name} needs a later torch: torch {torch.__version__} does not have it"
            )
    with contextlib.suppress(KeyError):
        get_logging_handler(config.event_log_handler)
        return chosen
    raise UsageError(
        f"Elastic.event_log_handler names no handler of torch elastic: {config.event_log_handler!r}"
    )


def _build_entrypoint(
    config: Elastic, function: Callable[[], Any], *, keeps_decks: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return each worker's function: a picklable one for spawn, a closure for fork,
    as torch passes no keywords.
    """
    restart = config.in_process_restart
    # A forked worker inherits the task function and flytekit's context as they are in memory;
    # nothing is pickled to start it.
    if config.start_method == "fork":

        def forked_worker() -> Any:
            return run_forked(function, keeps_decks=keeps_decks, restart=restart)

        return forked_worker, ()
    context = flytekit.current_context()
    try:
        # A spawned worker begins without flytekit's context. It calls `setup_execution` as the
        # entrypoint does, and needs these paths for it.
        checkpoint = context.checkpoint
        destination, source = (
            checkpoint._checkpoint_dest,  # noqa: SLF001 - no public name
            checkpoint._checkpoint_src,  # noqa: SLF001
        )
    except NotImplementedError:
        destination = source = None  # no checkpoints in this execution
    work = pickled((function, restart))
    return run_spawned, (work, context.raw_output_prefix, destination, source, keeps_decks)


def pickled(value: Any) -> bytes:
    """Return a value as bytes that ``pickle.loads`` reads, as ``cloudpickle.dumps`` does,
    with the files of its code.

    cloudpickle 3.1.3 and later replace the file of each code object by "<dynamic-code>". Then no
    traceback and no stack would name the file of a task function.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    return code_with_file, (code.co_filename, *cloudpickle.Pickler.dispatch_table[CodeType](code))


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


# --- after ----------------------------------------------------------------------------------------


def _hand_over(results: dict[int, WorkerResult]) -> Any:
    """Return what global rank 0 returned, with its decks and output metadata."""
    # Every pod's entrypoint writes outputs.pb below the same prefix. IgnoreOutputs makes the
    # entrypoint return without an upload, so only the pod of rank 0 writes.
    if 0 not in results:
        raise IgnoreOutputs
    first = results[0]
    if first is None:
        return None  # rank 0 called sys.exit(0): torch counts that as a success without a result
    context = flytekit.current_context()
    # flytekit renders one deck per name, the last one added. This pod's context has its own
    # timeline, which rank 0's would replace.
    for deck in first.decks:
        if not isinstance(deck, TimeLineDeck):
            context.decks.append(deck)
    if first.output_metadata:
        # The tracker's keys are id() of the values. An id from the worker's process means nothing
        # here, so register the value again under its id in this process.
        tracker = FlyteContextManager.current_context().output_metadata_tracker
        if tracker is not None:
            tracker.add(first.return_value, first.output_metadata)
    return first.return_value


def _build_plain_exception(error: Exception) -> Exception:
    """Return kfpytorch's exception for the failure that torch kept:
    recoverable if its worker marked it so.
    """
    raised: Exception = ElasticTaskError(error)
    # A stop signal to the agent isn't a failure of the training: the entrypoint uploads neither
    # outputs nor an error file.
    if isinstance(error, SignalException):
        logger.warning("the agent was terminated (%s), so this pod writes no outputs", error)
        raised = IgnoreOutputs()
    elif isinstance(error, ChildFailedError):
        # torch keeps one failure of the node with its time; Flyte sorts error files of several pods
        # by that time.
        _, first = error.get_first_failure()
        if was_recoverable(first.error_file):
            raised = FlyteRecoverableException(str(error), timestamp=first.timestamp)
        else:
            raised = ElasticTaskError(error, first.timestamp)
    return raised


def _build_local_exception(failed: NodeFailedError) -> Exception:
    """Return kfpytorch's exception for a local call;
    a pod raises it too if it could not seal its verdict.
    """
    if failed.verdict is None:
        return _build_plain_exception(failed.error)
    verdict, decision = failed.verdict.verdict, failed.verdict.decision
    timestamp = verdict.timestamp_ns / 1e9 if verdict.timestamp_ns else None
    if decision.retry:
        recoverable: Exception = FlyteRecoverableException(
            failed.verdict.seal.message, timestamp=timestamp
        )
        return recoverable
    return ElasticTaskError(failed.error, timestamp)
