"""The manifests of ``firstfault k8s`` against the controllers' own schemas,
and the rules that schemas can't express.

The schemas are those of JobSet's, Kubeflow Trainer's and PyTorchJob's CustomResourceDefinitions
(Apache-2.0), without descriptions: versions 0.12, 2.3 and 1.9.4 of these projects. A JobSet's
schema contains that of Kubernetes's Job.
"""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from firstfault.kubernetes.command import k8s
from firstfault_torch.torchrun.exit_codes import PRESETS, parse_exit_codes

HERE = Path(__file__).parent
KINDS = ("job", "jobset", "pytorchjob", "trainjob")
MAX_RULES = 20
CEL = celpy.Environment()
"""The language of rules in CustomResourceDefinitions."""
BY_CODE = (
    "Container train for pod jobs/train-0 failed with exit code {} matching FailJob rule at"
    " index {}"
)
BY_CONDITION = "Pod jobs/train-0 has condition {} matching FailJob rule at index {}"
LIMIT_REACHED = "Job has reached the specified backoff limit"
RETRY, SYSTEM, STOP = parse_exit_codes("default").values()


def _strict(schema: Any) -> Any:
    """Return a schema that refuses keys that it doesn't list."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        properties = {name: _strict(item) for name, item in schema["properties"].items()}
        return {**schema, "properties": properties, "additionalProperties": False}
    return {name: _strict(item) for name, item in schema.items()}


def _schema(kind: str) -> Any:
    schema = json.loads(
        gzip.decompress((HERE / f"{'JobSet' if kind == 'Job' else kind}.json.gz").read_bytes())
    )
    if kind == "Job":
        jobs = schema["properties"]["spec"]["properties"]["replicatedJobs"]["items"]["properties"]
        schema["properties"] |= {"spec": jobs["template"]["properties"]["spec"]}
    schema["properties"]["metadata"] = {"type": "object"}
    return _strict(schema)


def _broken_rules(schema: Any, value: Any) -> Iterator[str]:
    """Return the CEL rules of a schema that a value breaks,
    except rules about changes (`oldSelf`).
    """
    for rule in schema.get("x-kubernetes-validations", ()):
        program = CEL.program(CEL.compile(rule["rule"]))
        if "oldSelf" not in rule["rule"] and not program.evaluate(
            {"self": celpy.json_to_cel(value)}
        ):
            yield rule["rule"]
    if isinstance(value, dict):
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            yield from _broken_rules(inner if isinstance(inner, dict) else {}, item)
    for item in value if isinstance(value, list) else ():
        yield from _broken_rules(schema.get("items", {}), item)


def documents(kind: str) -> list[dict[str, Any]]:
    """Return the objects in the manifest that the command prints."""
    return list(yaml.safe_load_all(CliRunner().invoke(k8s, [kind]).output))


def find_values(value: Any, key: str) -> list[Any]:
    """Return all values of a key at any depth."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [
        found
        for name, item in items
        for found in ([item] if name == key else []) + find_values(item, key)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_each_object_fits_the_schema_of_its_kind(kind: str) -> None:
    """Each object fits the schema of its kind, which has all of its keys;
    a mistake in one is found.
    """
    for item in (item for item in documents(kind) if item["kind"] != "Service"):
        jsonschema.validate(item, _schema(item["kind"]))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(
                {**item, "spec": {**item["spec"], "backoffLimits": 3}}, _schema(item["kind"])
            )


@pytest.mark.parametrize("kind", KINDS)
def test_no_object_breaks_a_cel_rule(kind: str) -> None:
    """No object breaks a CEL rule of its CustomResourceDefinition."""
    for item in (item for item in documents(kind) if item["kind"] != "Service"):
        assert not [*_broken_rules(_schema(item["kind"]), item)]


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
    [
        ("TrainJob", ("metadata", "name"), "Train_7", "matches"),
        (
            "ClusterTrainingRuntime",
            ("spec", "mlPolicy"),
            {"torch": {}, "mpi": {}},
            "has(self.torch)",
        ),
        (
            "JobSet",
            ("spec", "startupPolicy"),
            {"startupPolicyOrder": "InOrder"},
            "startupPolicyOrder",
        ),
    ],
)
def test_broken_cel_rules_are_found(
    kind: str,
    path: tuple[str, ...],
    value: Any,
    words: str,
) -> None:
    [item] = (item for name in KINDS for item in documents(name) if item["kind"] == kind)
    item[path[0]][path[1]] = value
    if kind == "JobSet":  # the rule is about jobs that depend on each other
        item["spec"]["replicatedJobs"][0]["dependsOn"] = [{"name": "workers", "status": "Ready"}]
    assert any(words in rule for rule in _broken_rules(_schema(kind), item))


@pytest.mark.parametrize("kind", KINDS)
def test_the_documented_examples_are_the_generated_manifests(kind: str) -> None:
    example = HERE.parents[1] / "examples" / "kubernetes" / f"{kind}.yaml"
    assert example.read_text() == CliRunner().invoke(k8s, [kind]).output


@pytest.mark.parametrize("kind", KINDS)
def test_objects_pass_the_checks_of_the_api_server(kind: str) -> None:
    """What Kubernetes checks beyond its schema,
    and that the codes are those with which workers leave.
    """
    objects = documents(kind)
    policies = find_values(objects, "podFailurePolicy")
    assert len(policies) == (kind != "pytorchjob")
    for policy in policies:
        assert set(find_values(objects, "restartPolicy")) == {"Never"}
        assert len(policy["rules"]) <= MAX_RULES
        assert {rule["action"] for rule in policy["rules"]} == {"FailJob"}
        assert set(find_values(policy, "values")[0]) == {RETRY, SYSTEM, STOP}
        assert find_values(policy, "containerName") == [
            find_values(objects, "containers")[0][0]["name"]
        ]
    [preset] = {
        item["value"]
        for item in find_values(objects, "env")[0]
        if item["name"] == "FIRSTFAULT_EXIT_CODES"
    }
    assert preset in PRESETS
    assert (preset == "pytorchjob") is (kind == "pytorchjob")


def test_a_pytorchjob_has_a_deadline_and_no_restart_after_an_unknown_cause() -> None:
    """The operator counts no restarts after codes from 128 on, so an unknown cause has none,
    and the job a deadline.
    """
    codes = {action.value: code >= 128 for action, code in parse_exit_codes("pytorchjob").items()}
    assert codes == {
        "retry": True,
        "system": True,
        "stop": False,
    }, "unknown: torchrun's 1, which fails the job"
    [item] = documents("pytorchjob")
    policy = item["spec"]["runPolicy"]
    assert 0 < policy["activeDeadlineSeconds"] <= 7 * 24 * 3600
    assert "backoffLimit" not in policy, "it has no effect with restartPolicy ExitCode"
    # None leaves running pods alone, and their GPUs with them, when another pod has failed the job
    assert policy["cleanPodPolicy"] == "Running"
    assert set(find_values(item, "restartPolicy")) == {"ExitCode"}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_name_their_job_and_have_time_for_the_verdict(kind: str) -> None:
    """Each pod names its job, and has time for a worker that ignores SIGTERM: 30 s,
    and 2 s for the verdict.
    """
    templates = [item for item in find_values(documents(kind), "spec") if "containers" in item]
    assert templates
    for template in templates:
        assert template["terminationGracePeriodSeconds"] == 60
        names = {item["name"] for item in template["containers"][0]["env"]}
        assert {"FIRSTFAULT_JOB", "POD_NAMESPACE", "NODE_NAME", "FIRSTFAULT_FOLDER"} <= names
    names = {item["name"] for item in find_values(documents(kind), "env")[0]}
    counts = {"job": {"FIRSTFAULT_ATTEMPT"}, "pytorchjob": set()}.get(
        kind, {"JOBSET_RESTART_ATTEMPT"}
    )
    assert {name for name in names if name.endswith("ATTEMPT")} == counts


def _end_job(kind: str, code: int, *conditions: str) -> tuple[str, str]:
    """Return reason and message of a Job after a pod has ended,
    as Kubernetes's controller of Jobs writes them.
    """
    [policy] = find_values(documents(kind), "podFailurePolicy")
    for index, rule in enumerate(policy["rules"]):
        if code in rule.get("onExitCodes", {}).get("values", ()):
            return "PodFailurePolicy", BY_CODE.format(code, index)
        found = [
            item["type"] for item in rule.get("onPodConditions", ()) if item["type"] in conditions
        ]
        if found:
            return "PodFailurePolicy", BY_CONDITION.format(found[0], index)
    return "BackoffLimitExceeded", LIMIT_REACHED


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_restarts_without_proof_are_counted(kind: str) -> None:
    """Only a disruption that the cluster announces, and a proven fault of the platform,
    leave maxRestarts as it is.
    """
    [policy] = find_values(documents(kind), "failurePolicy")

    def choose(code: int, *conditions: str) -> str:
        reason, message = _end_job(kind, code, *conditions)
        rules = (rule for rule in policy["rules"] if reason in rule["onJobFailureReasons"])
        found = (
            rule
            for rule in rules
            if re.search("|".join(rule["onJobFailureMessagePatterns"]), message)
        )
        return next((str(rule["action"]) for rule in found), "RestartJobSet")

    assert choose(STOP) == "FailJobSet"
    # a pod that Kubernetes or Kueue preempts handles SIGTERM, and leaves with a code, too
    conditions = ("DisruptionTarget", "TerminationTarget")
    free = {
        choose(SYSTEM),
        *(choose(code, condition) for condition in conditions for code in (RETRY, 137, 143)),
    }
    assert free == {"RestartJobSetAndIgnoreMaxRestarts"}
    # a liveness probe, or `kubectl delete pod`: SIGTERM without a condition; RETRY: the peers of a
    # lost machine, too
    assert {choose(code) for code in (RETRY, 1, 137, 143)} == {"RestartJobSet"}
    # JobSet finds no code in another one
    assert {choose(code) for code in (7, 9, 179, 193)} == {"RestartJobSet"}
    assert not find_values(policy, "ttlSecondsAfterFinished")


def test_a_preempted_pod_ends_its_job() -> None:
    """A Job's message names the preemption, whatever code the pod left with."""
    assert _end_job("job", RETRY, "TerminationTarget")[1] == BY_CONDITION.format(
        "TerminationTarget", 0
    )
    assert _end_job("job", STOP)[1] == BY_CODE.format(STOP, 1)
