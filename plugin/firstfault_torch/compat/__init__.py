"""All uses of torch's private names, except the names that `ReportingAgent`
overrides or reads on itself.

`torch_agent` holds the names that the agent needs, `torch_worker` those of the training processes,
which must not load torch's agent. `versions` lists the tested releases of all packages.

Checked in the sources of torch 2.3.1, 2.6.0, 2.9.0, 2.13.0 and 2.15.0. If a name is missing,
firstfault warns once and falls back to torch's behavior: without an agent hook the plain
LocalElasticAgent runs, without any other name one kind of evidence isn't collected.

| name | used for |
|---|---|
| `SimpleElasticAgent._rendezvous` and further hooks of `ReportingAgent` | the agent overrides them |
| `_worker_group`, `_remaining_restarts`, `_pcontext` of the agent | ranks, restarts, processes |
| `_worker_watchdog`, `_log_line_prefix_template` of the agent | the end of the watchdog; the node in log lines |
| `MultiprocessContext._pc.processes`, `SubprocessContext.subprocess_handlers` | when each worker ends |
| `MultiprocessContext._pc.error_files` | tracebacks that torch.multiprocessing keeps |
| `MultiprocessContext._ret_vals`, `_return_values`, `_worker_finished_event` | results, and that workers may end |
| `DynamicRendezvousHandler._bootstrap_store_info`, `_shared_tcp_store_server` | a store for each round |
| `_store` of `DynamicRendezvousHandler` and `StaticTCPRendezvous` | one name for a run on all its nodes |
| `RendezvousHandlerRegistry._registry` | whether torch loads our entry point, for `firstfault doctor` |
| ``torchelastic/agent/terminal_state`` | the keys of torch's exit barrier |
| `distributed_c10d.destroy_process_group.__code__` | seeing an exception before the sockets close |
| `distributed_c10d._world`, `_unregister_all_process_groups` | restarts in a process |
| `ProcessGroup._get_backend`, `_device_types` | the groups with flight recorders to read, and what a restart aborts |
| `Backend._get_sequence_number_for_group` | whether the recorder that is read belongs to the backend that is used |
| `rendezvous._rendezvous_handlers` | a separate store for each iteration's process groups |
| `_distributed_c10d._dump_fr_trace_json`, `_dump_nccl_trace_json` | the flight recorder |
| names of torch elastic's loggers | formatting tracebacks without importing a compiler |
"""

from __future__ import annotations

from functools import cache

from firstfault_torch.guard import logger


@cache
def warn_once(what: str, consequence: str) -> None:
    """Log once per process that this torch lacks a name, and the consequence."""
    import torch  # noqa: PLC0415 - only for its version

    logger.warning(
        "torch %s does not have %s as firstfault expects; %s",
        torch.__version__,
        what,
        consequence,
    )
