"""Task configurations: valid and invalid values, and kfpytorch's fields and defaults."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
from flytekit import task
from flytekitplugins import firstfault as plugin
from flytekitplugins import kfpytorch as stock
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig
from torch.numa.binding import AffinityMode, NumaOptions

from firstfault.errors import UsageError
from flytekitplugins.firstfault import Elastic, PyTorch, Worker
from flytekitplugins.firstfault.config import parse_nnodes
from flytekitplugins.firstfault.elastic import _build_launch_config

OF_TORCHRUN = (
    *("log_dir", "redirects", "tee", "local_ranks_filter", "log_line_prefix_template"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters", "event_log_handler", "numa_options"),
    *("signals_to_handle", "shutdown_timeout", "role", "virtual_local_rank"),
)
ADDED = {
    "strategy",
    "settle_seconds",
    "upload_deadline_seconds",
    "stop_seconds",
    "retry_policy",
    "deck",
    "stops_repeats",
}
ADDED |= {
    "restarts_follow_policy",
    "stops_repeats",
    "in_process_restart",
    "watchdog",
    "hang",
    *OF_TORCHRUN,
}


@pytest.mark.parametrize(
    ("nnodes", "expected"),
    [
        (1, (1, 1)),
        (16, (16, 16)),
        ("2", (2, 2)),
        ("1:3", (1, 3)),
        (" 1 : 3 ", (1, 3)),
        ("2:2", (2, 2)),
    ],
)
def test_nnodes_is_a_number_or_a_range(nnodes: int | str, expected: tuple[int, int]) -> None:
    """The number of nodes is a number or a range."""
    assert parse_nnodes(nnodes) == expected
    Elastic(
        nnodes=nnodes,
        settle_seconds=0,
        retry_policy=lambda *_: True,
        strategy="earliest",
        deck=False,
    )


@pytest.mark.parametrize(
    "nnodes", [0, -1, True, None, 1.5, "x", "", "0:2", "3:1", "1:", ":2", "1:2:3"]
)
def test_bad_nnodes_are_refused_with_the_expected_form(nnodes: object) -> None:
    """Other values are refused; the message shows the given value and the expected form."""
    with pytest.raises(
        UsageError, match=r'must be a number like 2 or a range like "1:4"'
    ) as caught:
        Elastic(nnodes=nnodes)
    assert repr(nnodes) in str(caught.value)
    assert isinstance(caught.value, ValueError), "kfpytorch's callers catch a ValueError"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"start_method": "forkserver"},
            "Elastic.start_method must be one of spawn, fork, not 'forkserver'",
        ),
        ({"nproc_per_node": 0}, "Elastic.nproc_per_node must be a whole number, 1 or more, not 0"),
        (
            {"nproc_per_node": True},
            "Elastic.nproc_per_node must be a whole number, 1 or more, not True",
        ),
        ({"max_restarts": -1}, "Elastic.max_restarts must be a whole number, 0 or more, not -1"),
        (
            {"restarts_follow_policy": 1},
            "Elastic.restarts_follow_policy must be True or False, not 1",
        ),
        (
            {"monitor_interval": 0},
            "Elastic.monitor_interval must be a number of seconds above 0, not 0",
        ),
        (
            {"monitor_interval": float("nan")},
            "Elastic.monitor_interval must be a number of seconds above 0, not nan",
        ),
        (
            {"stop_seconds": -1},
            "Elastic.stop_seconds must be a number of seconds, 0 or more, not -1",
        ),
        (
            {"shutdown_timeout": -1},
            "Elastic.shutdown_timeout must be a number of seconds, 0 or more, not -1",
        ),
        ({"hang": 60}, "Elastic.hang must be a Hang or None, not 60"),
        ({"watchdog": True}, "Elastic.watchdog must be a Watchdog or None, not True"),
        ({"role": ""}, "Elastic.role must be a name, not ''"),
        ({"event_log_handler": None}, "Elastic.event_log_handler must be a name, not None"),
        ({"log_dir": 3}, "Elastic.log_dir must be a text or None, not 3"),
        (
            {"log_line_prefix_template": ""},
            "Elastic.log_line_prefix_template must be a text or None, not ''",
        ),
        (
            {"duplicate_stdout_filters": "loss"},
            "Elastic.duplicate_stdout_filters must be a list of texts, not 'loss'",
        ),
        (
            {"tee": "0:1,1:3"},
            "Elastic.tee names local rank 1, but a node has only 1 workers (from rank 0)",
        ),
        (
            {"local_ranks_filter": "all"},
            "Elastic.local_ranks_filter must be local ranks like \"0,1\" or [0, 1], not 'all'",
        ),
        (
            {"signals_to_handle": "SIGKILL"},
            (
                "Elastic.signals_to_handle must be names of signals that can be handled, like"
                " \"SIGTERM,SIGINT\", not 'SIGKILL'"
            ),
        ),
    ],
)
def test_a_value_that_torch_cannot_run_is_refused_with_its_field(
    fields: dict[str, object], message: str
) -> None:
    """A value with which torch elastic cannot run is refused; the message names the field."""
    with pytest.raises(UsageError) as caught:
        Elastic(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "config", [Elastic, lambda **fields: PyTorch(worker=Worker(replicas=1), **fields)]
)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "earlyest"}, "unknown strategy 'earlyest'; available: evidence, earliest"),
        ({"settle_seconds": -1}, "settle_seconds must be a number of seconds, 0 or more, not -1"),
        (
            {"settle_seconds": float("nan")},
            "settle_seconds must be a number of seconds, 0 or more, not nan",
        ),
        (
            {"upload_deadline_seconds": float("inf")},
            "upload_deadline_seconds must be a number of seconds, 0 or more",
        ),
        ({"deck": 1}, "deck must be True, False or None, not 1"),
        (
            {"retry_policy": "never"},
            "a retry policy must be callable with (verdict, context); 'never' is not",
        ),
    ],
)
def test_both_configurations_check_firstfaults_fields(
    config: type[Elastic], fields: dict[str, object], message: str
) -> None:
    """Both configurations check firstfault's own fields when they are made."""
    with pytest.raises(UsageError) as caught:
        config(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["Elastic", "PyTorch", "Master", "Worker", "RunPolicy"])
def test_configurations_have_kfpytorchs_fields_and_defaults_first(name: str) -> None:
    """Each configuration has kfpytorch's fields in order and with their defaults; ours follow,
    some by keyword only.
    """

    def fields(module: object) -> dict[str, object]:
        return {
            field.name: (
                field.default_factory() if callable(field.default_factory) else field.default
            )
            for field in sorted(
                dataclasses.fields(getattr(module, name)), key=lambda field: field.kw_only
            )
        }

    def comparable(value: object) -> object:
        return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value

    ours = fields(plugin)
    theirs = fields(stock)
    assert list(ours)[: len(theirs)] == list(theirs)
    assert set(ours) - set(theirs) <= ADDED
    differing = {key for key in theirs if comparable(ours[key]) != comparable(theirs[key])}
    # ours is torchrun's default; with kfpytorch's the agent notices a fault up to 5 s late
    assert differing == ({"monitor_interval"} if name == "Elastic" else set())


def test_without_options_torch_gets_its_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options of ours torch gets the same configuration as without these fields."""
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: "/tmp/logs")  # noqa: S108 - a name only

    @task(task_config=Elastic(increase_shared_mem=False))
    def train() -> None: ...

    ours = dataclasses.asdict(_build_launch_config(train.task_config))  # type: ignore[arg-type]
    own = {
        "run_id",
        "rdzv_backend",
        "rdzv_configs",
        "rdzv_endpoint",
        "max_restarts",
        "min_nodes",
        "max_nodes",
    }
    theirs = dataclasses.asdict(LaunchConfig(1, 1, 1))
    assert {name: ours[name] for name in ours.keys() - own} == {
        name: theirs[name] for name in theirs.keys() - own
    }


def test_options_of_torchrun_reach_torch(tmp_path: Path) -> None:
    """Each option becomes torch's own of that name;
    `shutdown_timeout` is another name of `stop_seconds`.
    """
    values: dict[str, Any] = {
        "log_line_prefix_template": "[${node}] ",
        "duplicate_stdout_filters": ["loss"],
        "duplicate_stderr_filters": ["Error"],
        "event_log_handler": "console",
        "signals_to_handle": "SIGTERM,SIGUSR1",
        "role": "trainer",
        "virtual_local_rank": True,
    }
    logs = {"log_dir": str(tmp_path), "redirects": "3", "tee": "0:1", "local_ranks_filter": "0"}

    @task(
        task_config=Elastic(
            increase_shared_mem=False,
            shutdown_timeout=7,
            numa_options="node",
            **logs,
            **values,
        )
    )
    def train() -> None: ...

    config = _build_launch_config(train.task_config)  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in values} == values
    assert config.numa_options == NumaOptions(AffinityMode.NODE)
    assert config.logs_specs == DefaultLogsSpecs(str(tmp_path), Std.ALL, {0: Std.OUT}, {0})
    assert train.options().stop_seconds == 7  # type: ignore[attr-defined]


def test_an_unknown_event_handler_is_refused_at_run_time() -> None:
    """A handler that torch does not know is refused when the task runs."""

    @task(task_config=Elastic(event_log_handler="mine", increase_shared_mem=False))
    def train() -> None: ...

    with pytest.raises(UsageError, match="names no handler of torch elastic: 'mine'"):
        _build_launch_config(train.task_config)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["RestartPolicy", "CleanPodPolicy"])
def test_enums_have_kfpytorchs_members_and_values(name: str) -> None:
    """The enums have kfpytorch's members and values."""

    def values(module: object) -> dict[str, int]:
        return {member.name: member.value for member in getattr(module, name)}

    assert values(plugin) == values(stock)
