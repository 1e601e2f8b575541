"""A job on S3 whose storage breaks as a worker fails.
`tests/torch_agent/test_faulty_storage.py` has other faults.
"""

from pathlib import Path

import pytest

from tests.faulty_proxy import faulty_proxy_before
from tests.plugin.running import DEADLINE_S, running
from tests.s3_server import S3
from tests.waiting import wait_until

pytestmark = pytest.mark.jobs

FILE = Path(__file__).parent / "jobs" / "faulty_storage.py"


def test_the_entrypoint_uploads_the_verdict_after_refused_connections(
    s3: S3, tmp_path: Path
) -> None:
    """The exception carries the whole verdict, and the entrypoint uploads it when it can."""
    with faulty_proxy_before(s3) as proxy:
        store = ("--store", proxy.server.uri("job"))
        with running(
            FILE,
            "train",
            tmp_path,
            {},
            *store,
            environment=proxy.server.environment(),
            cwd=tmp_path,
        ) as run:
            run.mark("runs")
            proxy.await_request("PUT", "-0000000-joined-")
            proxy.refuse()
            (run.marks / "go").touch()
            _await_text(tmp_path, "was not uploaded: the storage did not answer")
            _await_text(tmp_path, "Cause: ValueError")
            proxy.accept()
            ended = run.end()
    error = ended.attempt["engine"]["error_seen"]
    assert ended.status == 10, ended.logs
    assert "the user's own error" in error["message"]
    assert error["code"] == "USER:RuntimeError"
    assert ended.verdict["ranks"] == [0]
    assert "the document of rank 0" in error["message"]
    assert "was not uploaded" in error["message"]
    assert "only the documents at hand were read" in error["message"]
    # outputs go to a bucket, the report to the folder of the pods' logs
    report = Path(ended.result["report"])
    assert report.parent.parent == tmp_path / ".firstfault" / "logs"
    assert (report.parent / "attempt-0").is_dir()
    assert "the user's own error" in report.read_text(encoding="utf-8")


def _await_text(folder: Path, text: str) -> None:
    """Wait until a pod has logged a text."""
    logs = ".firstfault/logs/*/*/*.log"
    wait_until(
        lambda: any(text in log.read_text(errors="replace") for log in folder.glob(logs)),
        text,
        DEADLINE_S,
    )
