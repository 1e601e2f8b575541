"""Asks flyteadmin for an attempt's output prefix:
``flyte://project/domain/execution/node/attempt``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flyteidl.admin import common_pb2, execution_pb2, node_execution_pb2, task_execution_pb2
from flyteidl.admin.node_execution_pb2 import NodeExecution
from flyteidl.admin.task_execution_pb2 import TaskExecution
from flyteidl.core import execution_pb2 as core
from flyteidl.core.identifier_pb2 import NodeExecutionIdentifier, WorkflowExecutionIdentifier
from flytekit.clients.raw import RawSynchronousFlyteClient
from flytekit.configuration import PlatformConfig, get_config_file
from flytekit.configuration.internal import Platform
from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteEntityNotExistException

from firstfault.errors import FirstFaultError, ObjectNotFoundError, UsageError
from firstfault_torch.guard import call_with_timeout, try_call

_ADMIN_TIMEOUT_SECONDS = 10.0
"""How long flyteadmin may take for all answers together."""
_PAGE_SIZE = 100
"""Entries in one answer of flyteadmin."""
_ATTEMPT = re.compile(r"[0-9]{1,9}")
_MAX_NESTING_DEPTH = 8
"""Subworkflows, dynamic tasks and launch plans within each other."""
_URI_FORM = (
    "flyte://project/domain/execution, then /node and /attempt if you want another than the one"
    " that failed"
)

_FAILED_NODE_PHASES = {
    core.NodeExecution.FAILED,
    core.NodeExecution.FAILING,
    core.NodeExecution.TIMED_OUT,
}
_FAILED_TASK_PHASES = {core.TaskExecution.FAILED, core.TaskExecution.ABORTED}


def output_prefix(uri: str) -> str:
    """Return the output prefix of an attempt that flyteadmin knows.

    Without an attempt it is the last one that failed, without a node the first node that failed.

    Raises:
        UsageError: `uri` has another form, or flytekit isn't configured.
        ObjectNotFoundError: the execution, a failed node in it, or the attempt doesn't exist.
        FirstFaultError: flyteadmin refused, or didn't answer within 10 s.
    """
    parts = uri.partition("://")[2].strip("/").split("/")
    if (
        not 3 <= len(parts) <= 5  # noqa: PLR2004
        or not all(parts)
        or not (len(parts) < 5 or _ATTEMPT.fullmatch(parts[4]))  # noqa: PLR2004
    ):
        raise UsageError(f"{uri!r} names no execution of Flyte; write {_URI_FORM}")
    config_file = get_config_file(None)
    if Platform.URL.read(config_file) is None:
        raise UsageError(
            f"flytekit is not configured, so {uri!r} cannot be looked up; set FLYTE_PLATFORM_URL,"
            " or FLYTECTL_CONFIG, or write ~/.flyte/config.yaml"
        )
    config = PlatformConfig.auto(config_file)
    project, domain, name, *rest = parts
    execution = WorkflowExecutionIdentifier(project=project, domain=domain, name=name)

    def ask() -> str:
        admin = _Admin(RawSynchronousFlyteClient(config))
        return admin.output_prefix(
            uri,
            execution,
            rest[0] if rest else "",
            int(rest[1]) if rest[1:] else None,
        )

    return _answer(ask, config.endpoint)


def _answer(ask: Callable[[], str], endpoint: str) -> str:
    """Return what `ask` returns, within the limit: flytekit's retries and logins have no limit."""
    answer, error = call_with_timeout(
        partial(try_call, ask, Exception), _ADMIN_TIMEOUT_SECONDS, "asking flyteadmin"
    ) or (None, None)
    if answer is not None:
        return answer
    # A client that waits for a login or retries stays behind in its daemon thread; the command ends
    # without it.
    if error is None:
        raise FirstFaultError(
            f"flyteadmin at {endpoint} didn't respond within {_ADMIN_TIMEOUT_SECONDS:g} s; check the endpoint"
        )
    if isinstance(error, FirstFaultError):
        raise error
    cause = error.__cause__ or error
    text = getattr(cause, "details", lambda: "")() or str(cause) or type(cause).__name__
    kind = type(error if isinstance(error, FlyteException) else cause).__name__
    raise FirstFaultError(f"flyteadmin at {endpoint} returned an error ({kind}): {text}") from error


class _Admin:
    """The calls to flyteadmin."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def output_prefix(
        self,
        uri: str,
        execution: WorkflowExecutionIdentifier,
        node: str,
        attempt: int | None,
    ) -> str:
        """Return the output prefix; see the function of the same name."""
        try:
            known_execution = self._client.get_execution(
                execution_pb2.WorkflowExecutionGetRequest(id=execution)
            )
        except FlyteEntityNotExistException as error:
            raise ObjectNotFoundError(
                f"flyteadmin has no execution {uri!r}; {_URI_FORM}"
            ) from error
        if node:
            where = NodeExecutionIdentifier(node_id=node, execution_id=execution)
            return self._of_node(uri, where, attempt)
        failed = self._failed_node(execution)
        if failed is None:
            phase = core.WorkflowExecution.Phase.Name(known_execution.closure.phase)
            raise ObjectNotFoundError(
                f"no node of {uri!r} failed with a task; its phase is {phase}; name a node"
            )
        return self._of_node(uri, failed, attempt)

    def _failed_node(
        self,
        execution: WorkflowExecutionIdentifier,
        parent: str = "",
        depth: int = 0,
    ) -> NodeExecutionIdentifier | None:
        """Return the first node that failed and ran a task, in the order of their failures."""
        failed = [
            node
            for node in self._list_nodes(execution, parent)
            if node.closure.phase in _FAILED_NODE_PHASES
        ]
        for node in sorted(failed, key=lambda node: node.closure.updated_at.ToNanoseconds()):
            launched = node.closure.workflow_node_metadata.executionId
            deeper = None
            # Look inside a parent first. It usually fails because of a node inside it, in the same
            # execution (subworkflow, dynamic task) or in a launched one, and that node ran the task
            # with the documents.
            if node.metadata.is_parent_node and depth < _MAX_NESTING_DEPTH:
                deeper = self._failed_node(node.id.execution_id, node.id.node_id, depth + 1)
            elif launched.name and depth < _MAX_NESTING_DEPTH:
                deeper = self._failed_node(launched, "", depth + 1)
            if deeper is not None:
                return deeper
            if not launched.name and next(self._list_tasks(node.id), None) is not None:
                identifier: NodeExecutionIdentifier = node.id
                return identifier
        return None

    def _of_node(self, uri: str, node: NodeExecutionIdentifier, attempt: int | None) -> str:
        """Return the output prefix of an attempt of a node; by default the last one that failed,
        else the last one.
        """
        tasks = [
            task for task in self._list_tasks(node) if attempt in {None, task.id.retry_attempt}
        ]
        if not tasks:
            which = "has run no task" if attempt is None else f"has no attempt {attempt}"
            raise ObjectNotFoundError(f"node {node.node_id!r} of {uri!r} {which}")
        task = max(
            tasks,
            key=lambda task: (task.closure.phase in _FAILED_TASK_PHASES, task.id.retry_attempt),
        )
        for known in (task.closure.error.error_uri, task.closure.output_uri):
            if known:
                return str(known.rpartition("/")[0] if known.endswith(".pb") else known.rstrip("/"))
        # Flyte puts the attempts next to the node's inputs
        folder = task.input_uri.rpartition("/")[0]
        if not folder:
            raise ObjectNotFoundError(
                f"flyteadmin returned no output location for node {node.node_id!r} of {uri!r}"
            )
        return f"{folder}/{task.id.retry_attempt}"

    def _list_nodes(
        self, execution: WorkflowExecutionIdentifier, parent: str
    ) -> Iterator[NodeExecution]:
        kind = node_execution_pb2.NodeExecutionListRequest
        request = partial(kind, workflow_execution_id=execution, unique_parent_id=parent)
        for page in _list_pages(self._client.list_node_executions_paginated, request):
            yield from page.node_executions

    def _list_tasks(self, node: NodeExecutionIdentifier) -> Iterator[TaskExecution]:
        by_age = common_pb2.Sort(key="created_at", direction=common_pb2.Sort.ASCENDING)
        request = partial(
            task_execution_pb2.TaskExecutionListRequest, node_execution_id=node, sort_by=by_age
        )
        for page in _list_pages(self._client.list_task_executions_paginated, request):
            yield from page.task_executions


def _list_pages(ask: Callable[[Any], Any], request: Callable[..., Any]) -> Iterator[Any]:
    """Yield flyteadmin's answers to a request, page by page."""
    token = ""
    while True:
        page = ask(request(limit=_PAGE_SIZE, token=token))
        yield page
        token = page.token
        if not token:
            return
