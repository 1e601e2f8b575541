"""Errors of Flyte's entrypoint about the values that a task returned."""

from dataclasses import replace
from typing import Any

import pytest

from firstfault.conclude import conclude
from firstfault.model import DocumentRef, NodePresence, Phase, Place, WorkerError
from firstfault.render.terminal import terminal_text
from firstfault.report import Report
from firstfault.report.data import report_conclusion
from firstfault.testing import make_job
from firstfault.wire.documents import decode
from tests.readers.conftest import flyte_error_document

FOLDER = "/venv/lib/python3.11/site-packages/flytekit"
CALL = f'  File "{FOLDER}/core/base_task.py", line 664, in _output_to_literal_map\n    raise e\n'
CONVERSION = (
    f"{CALL}"
    f'  File "{FOLDER}/core/type_engine.py", line 187, in assert_type\n'
    "    raise TypeTransformerFailedError(text)\n"
)
WRONG = "Expected value of type <class 'int'> but got 'three' of type <class 'str'>"
WRONG_TYPE = (
    "flytekit.core.type_engine.TypeTransformerFailedError: Failed to convert outputs of task"
    f" 't.train' at position 0.\nFailed to convert type <class 'str'> to type <class 'int'>.\n"
    f"Error Message: {WRONG}."
)


def _file(frames: str, error: str) -> WorkerError:
    """Return what a reader makes of the entrypoint's file."""
    trace = f"Traceback (most recent call last):\n{frames}{error}"
    indented = "\n".join(f"    {line}" for line in trace.splitlines())
    message = f"Trace:\n\n{indented}\nMessage:\n\n    {error}"
    data = flyte_error_document(code="SYSTEM", message=message, origin=2)
    found = decode(data, DocumentRef("error.pb"))
    assert isinstance(found, WorkerError)
    return found


def _entries(*phases: Phase) -> tuple[NodePresence, ...]:
    """Return the roster of nodes of two ranks each."""
    return tuple(
        NodePresence(
            phase,
            Place(node=f"worker-{index}", group_rank=index, group_world_size=len(phases)),
            (2 * index, 2 * index + 1),
        )
        for index, phase in enumerate(phases)
    )


def _report(failure: WorkerError, **fields: Any) -> Report:
    return report_conclusion(conclude(make_job(failure, **fields)), uri="")


def test_a_wrong_value_is_rank_0s_after_all_ranks_returned() -> None:
    """After all ranks have returned, only rank 0's value can be meant;
    the same code would return it again.
    """
    failure = _file(CONVERSION, WRONG_TYPE)
    report = _report(failure, roster=_entries(Phase.SUCCEEDED, Phase.SUCCEEDED))
    headline = f"TypeTransformerFailedError, rank 0 on worker-0: {WRONG}"
    assert report.verdict.headline == headline
    assert report.answers.fault_owner.value == "your code"
    assert report.answers.retry == "no"
    assert report.answers.retry_reason == (
        "a value has another type than the task declares, so it would fail again"
    )
    assert report.answers.steps[0].text == "compare the value with the type that the task declares"
    assert "returned a value that flytekit can't convert" in terminal_text(report)
    assert {item.rank: item.state.value for item in report.cascade.ranks} == {
        0: "root cause",
        1: "finished",
        2: "finished",
        3: "finished",
    }


@pytest.mark.parametrize("phases", [(), (Phase.SUCCEEDED, Phase.JOINED), (Phase.FAILED,)])
def test_without_the_end_of_all_nodes_the_pod_is_unknown(phases: tuple[Phase, ...]) -> None:
    """Without the end of all nodes the file's pod isn't known, but still the reason."""
    report = _report(_file(CONVERSION, WRONG_TYPE), roster=_entries(*phases))
    assert report.verdict.root is not None
    assert report.verdict.root.rank is None
    assert report.answers.retry_reason.startswith("a value has another type than the task declares")


def test_other_errors_of_the_entrypoint_are_no_wrong_value() -> None:
    """An error elsewhere, or one of flytekit's own storage, is no wrong value."""
    elsewhere = CONVERSION.replace("_output_to_literal_map", "dispatch_execute")
    assert _file(elsewhere, WRONG_TYPE).exception is None
    lost = _file(
        CALL, "flytekit.exceptions.system.FlyteUploadDataException: connection reset by the store"
    )
    decision = _report(replace(lost, code="SYSTEM")).answers.retry_reason
    assert "another type" not in decision
