"""``firstfault show flyte://...``: asks a real gRPC server that answers as flyteadmin does."""

import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from flyteidl.admin import execution_pb2, node_execution_pb2, task_execution_pb2
from flyteidl.core import execution_pb2 as core
from flyteidl.core.identifier_pb2 import (
    NodeExecutionIdentifier,
    TaskExecutionIdentifier,
    WorkflowExecutionIdentifier,
)
from flyteidl.service import admin_pb2_grpc

from firstfault.cli import EXIT
from firstfault.testing import make_error
from firstfault.wire.documents import encode
from flytekitplugins.firstfault import flyteadmin
from tests.readers.commands import Ran

_N, _T = core.NodeExecution, core.TaskExecution


@dataclass
class Admin(admin_pb2_grpc.AdminServiceServicer):
    """The calls of flyteadmin that the command uses, with pages of one entry."""

    nodes: list[node_execution_pb2.NodeExecution] = field(default_factory=list)
    within: dict[str, list[node_execution_pb2.NodeExecution]] = field(default_factory=dict)
    """The nodes of a parent node."""
    tasks: list[task_execution_pb2.TaskExecution] = field(default_factory=list)
    endpoint: str = ""

    # gRPC's name
    def GetExecution(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Return the execution, if any node is of it."""
        if request.id.name not in {node.id.execution_id.name for node in self.nodes}:
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"missing entity of type EXECUTION {request.id.name}"
            )
        closure = execution_pb2.ExecutionClosure(phase=core.WorkflowExecution.SUCCEEDED)
        return execution_pb2.Execution(id=request.id, closure=closure)

    # as above
    def ListNodeExecutions(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        """Return one node of the execution, or of a parent node."""
        nodes = self.within[request.unique_parent_id] if request.unique_parent_id else self.nodes
        name = request.workflow_execution_id.name
        found, token = self._page(
            [node for node in nodes if node.id.execution_id.name == name], request
        )
        return node_execution_pb2.NodeExecutionList(node_executions=found, token=token)

    # as above
    def ListTaskExecutions(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        """Return one attempt of a node."""
        tasks = [
            task for task in self.tasks if task.id.node_execution_id == request.node_execution_id
        ]
        found, token = self._page(tasks, request)
        return task_execution_pb2.TaskExecutionList(task_executions=found, token=token)

    @staticmethod
    def _page(items: list[Any], request: Any) -> tuple[list[Any], str]:
        start = int(request.token or 0)
        return items[start : start + 1], str(start + 1) if start + 1 < len(items) else ""


def _execution(name: str) -> WorkflowExecutionIdentifier:
    return WorkflowExecutionIdentifier(project="flytesnacks", domain="development", name=name)


def _node(
    name: str,
    phase: int = _N.FAILED,
    seconds: int = 0,
    *,
    launched: str = "",
    execution: str = "f3a9",
    **metadata: Any,
) -> node_execution_pb2.NodeExecution:
    closure = node_execution_pb2.NodeExecutionClosure(phase=phase)
    closure.updated_at.seconds = seconds
    if launched:
        closure.workflow_node_metadata.executionId.CopyFrom(_execution(launched))
    return node_execution_pb2.NodeExecution(
        id=NodeExecutionIdentifier(node_id=name, execution_id=_execution(execution)),
        closure=closure,
        metadata=node_execution_pb2.NodeExecutionMetaData(**metadata),
    )


def _task(
    node: str,
    attempt: int,
    phase: int = _T.FAILED,
    *,
    error_uri: str = "",
    output_uri: str = "",
    input_uri: str = "",
    execution: str = "f3a9",
) -> task_execution_pb2.TaskExecution:
    closure = task_execution_pb2.TaskExecutionClosure(phase=phase)
    if output_uri:
        closure.output_uri = output_uri
    elif error_uri:
        closure.error.error_uri = error_uri
    where = NodeExecutionIdentifier(node_id=node, execution_id=_execution(execution))
    identifier = TaskExecutionIdentifier(node_execution_id=where, retry_attempt=attempt)
    return task_execution_pb2.TaskExecution(id=identifier, closure=closure, input_uri=input_uri)


@pytest.fixture
def admin() -> Iterator[Admin]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    servicer = Admin()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    servicer.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait()


@pytest.fixture
def show(
    admin: Admin, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """Return a function that runs ``firstfault show`` in this process,
    with the admin's endpoint in its settings.
    """
    monkeypatch.setenv("FLYTE_PLATFORM_URL", admin.endpoint)
    monkeypatch.setenv("FLYTE_PLATFORM_INSECURE", "true")
    return lambda uri, command="show": run(command, uri)


def _attempt(folder: Path, rank: int) -> str:
    """Write an attempt in which `rank` failed; return the URI of its error file,
    which need not exist.
    """
    errors = folder / "firstfault" / "errors"
    errors.mkdir(parents=True)
    (errors / "one.pb").write_bytes(encode(make_error(rank)))
    return f"{folder}/error.pb"


def test_an_executions_uri_shows_the_first_failed_node(
    admin: Admin, show: Callable[..., Ran], tmp_path: Path
) -> None:
    """An execution's URI shows the last failed attempt of the first failed node;
    node and attempt choose another.
    """
    admin.nodes = [
        _node("start-node", _N.SUCCEEDED),
        _node("n2", seconds=30),
        _node("n1", seconds=20),
        _node("n0", _N.SUCCEEDED, 10),
    ]
    admin.tasks = [
        _task("n1", 0, error_uri=_attempt(tmp_path / "n1" / "data" / "0", 10)),
        _task("n1", 1, error_uri=_attempt(tmp_path / "n1" / "data" / "1", 11)),
        _task("n2", 0, error_uri=_attempt(tmp_path / "n2" / "data" / "0", 20)),
    ]
    uri = "flyte://flytesnacks/development/f3a9"
    for below, rank, attempt in (
        ("", 11, "n1/data/1"),
        ("/n2", 20, "n2/data/0"),
        ("/n1/0", 10, "n1/data/0"),
    ):
        ran = show(uri + below)
        assert ran.code == EXIT.ROOT_CAUSE, ran.err
        assert f"rank {rank}" in ran.out.splitlines()[0]
        assert ran.err == f"firstfault: {uri}{below} is {tmp_path}/{attempt}\n"


def test_failed_subworkflows_and_launch_plans_lead_to_their_failed_node(
    admin: Admin, show: Callable[..., Ran], tmp_path: Path
) -> None:
    """A failed subworkflow leads to its failed node,
    a failed launch plan to the execution that it launched.
    """
    admin.nodes = [_node("n0", is_parent_node=True), _node("dn0", execution="f4b0")]
    admin.within = {"n0": [_node("n0-0-n0", _N.SUCCEEDED), _node("n0-0-n1", launched="f4b0")]}
    admin.tasks = [_task("dn0", 0, error_uri=_attempt(tmp_path / "dn0" / "0", 7), execution="f4b0")]
    ran = show("flyte://flytesnacks/development/f3a9")
    assert ran.code == EXIT.ROOT_CAUSE, ran.err
    assert "rank 7" in ran.out.splitlines()[0]


def test_an_attempt_without_an_error_file_is_found_by_inputs_or_outputs(
    admin: Admin, show: Callable[..., Ran], tmp_path: Path
) -> None:
    """If admin has no URI of an error, the attempt lies beside the node's inputs;
    outputs tell the prefix too.
    """
    _attempt(tmp_path / "n0" / "data" / "0", 3)
    (tmp_path / "n0" / "data" / "1").mkdir()
    (tmp_path / "n0" / "data" / "1" / "outputs.pb").write_bytes(b"")
    admin.nodes = [_node("n0")]
    admin.tasks = [
        _task("n0", 0, _T.ABORTED, input_uri=f"{tmp_path}/n0/data/inputs.pb"),
        _task("n0", 1, _T.SUCCEEDED, output_uri=f"{tmp_path}/n0/data/1/outputs.pb"),
    ]
    uri = "flyte://flytesnacks/development/f3a9/n0"
    ran = show(uri)
    assert (ran.code, "rank 3" in ran.out) == (EXIT.ROOT_CAUSE, True), ran.err
    assert show(f"{uri}/1").out == "no error: the attempt has outputs\n"


@pytest.mark.parametrize(
    ("below", "code", "said"),
    [
        (
            "f000",
            EXIT.NOTHING_FOUND,
            "flyteadmin has no execution 'flyte://flytesnacks/development/f000'",
        ),
        ("f3a9", EXIT.NOTHING_FOUND, "its phase is SUCCEEDED; name a node"),
        ("f3a9/n0/5", EXIT.NOTHING_FOUND, "has no attempt 5"),
        ("f3a9/n7", EXIT.NOTHING_FOUND, "has run no task"),
        ("f3a9/n0", EXIT.NOTHING_FOUND, "returned no output location for node 'n0'"),
        ("", EXIT.USAGE, "names no execution of Flyte; write flyte://project/domain/execution"),
        ("f3a9/n0/last", EXIT.USAGE, "names no execution of Flyte"),
        pytest.param(
            f"f3a9/n0/{'9' * 5000}",
            EXIT.USAGE,
            "names no execution of Flyte",
            id="5,000 digits",
        ),
    ],
)
def test_an_unknown_execution_node_or_attempt_is_one_line(
    admin: Admin,
    show: Callable[..., Ran],
    below: str,
    code: EXIT,
    said: str,
) -> None:
    """A wrong URI, and an execution, node or attempt that does not exist,
    is one line with its exit code.
    """
    admin.nodes = [_node("n0", _N.SUCCEEDED)]
    admin.tasks = [_task("n0", 0, _T.SUCCEEDED)]
    ran = show(f"flyte://flytesnacks/development/{below}")
    (line,) = ran.err.splitlines()
    assert (ran.code, ran.out) == (code, "")
    assert said in line


def test_a_silent_or_absent_server_is_one_line_within_the_limit(
    show: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that never answers is given up after the limit, one that is not there at once,
    each in one line.
    """
    monkeypatch.setattr(flyteadmin, "_ADMIN_TIMEOUT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("FLYTE_PLATFORM_URL", endpoint)
        ran = show("flyte://flytesnacks/development/f3a9")
    assert ran.code == EXIT.TOOL_FAILED
    assert (
        ran.err
        == f"firstfault: flyteadmin at {endpoint} didn't respond within 0.5 s; check the endpoint\n"
    )
    monkeypatch.setattr(flyteadmin, "_ADMIN_TIMEOUT_SECONDS", 60.0)
    ran = show("flyte://flytesnacks/development/f3a9")
    (line,) = ran.err.splitlines()
    assert ran.code == EXIT.TOOL_FAILED
    assert f"flyteadmin at {endpoint} returned an error" in line


@pytest.mark.parametrize("command", ["show", "watch"])
def test_without_flytekits_settings_one_line_names_them(
    command: str,
    show: Callable[..., Ran],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without flytekit's settings one line says which to make; watch takes the same URIs."""
    monkeypatch.delenv("FLYTE_PLATFORM_URL")
    monkeypatch.setenv("HOME", str(tmp_path))
    ran = show("flyte://flytesnacks/development/f3a9", command)
    (line,) = ran.err.splitlines()
    assert ran.code == EXIT.USAGE
    assert "flytekit is not configured" in line
    assert "FLYTE_PLATFORM_URL" in line
