"""Reports on pods that are processes of one machine."""

from dataclasses import replace

from firstfault.conclude import conclude
from firstfault.report import Report
from firstfault.report.data import report_conclusion
from firstfault.testing import make_job
from tests.readers.scenes import agent_failure


def _report(host: str, namespace: str = "") -> Report:
    failure = agent_failure(1, "preemption", message="the agent was terminated")
    place = replace(failure.place, host=host, namespace=namespace)
    return report_conclusion(conclude(make_job(replace(failure, place=place))), uri="")


def test_a_pods_machine_is_unknown_without_node_name() -> None:
    """A pod in a cluster has its own name for a host, so its machine isn't known without NODE_NAME;
    another host is the machine, where kubectl knows nothing.
    """
    in_cluster = _report("worker-1", namespace="research-development").answers
    assert any(text.startswith("which machine ran worker-1") for text in in_cluster.unknown)
    assert any(step.command.startswith("kubectl") for step in in_cluster.steps)
    on_laptop = _report("vm").answers
    assert not any(text.startswith("which machine ran") for text in on_laptop.unknown)
    assert not any(step.command.startswith("kubectl") for step in on_laptop.steps)
