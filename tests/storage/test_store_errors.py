"""A storage that refuses, is missing or answers badly gives a typed error of one line,
in bounded time.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from firstfault.errors import (
    AccessDeniedError,
    FirstFaultError,
    StoreError,
    StoreUnavailableError,
    UsageError,
)
from firstfault.store import Store, settings
from tests.faulty_proxy import Fault, FaultyProxy
from tests.s3_server import S3
from tests.storage.conftest import SilentServer, WithStore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("client")]


DOCUMENT = "firstfault/errors/a.pb"
VERBS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "list": lambda store: store.list("firstfault/errors"),
    "read": lambda store: store.get(DOCUMENT),
    "write": lambda store: store.put(DOCUMENT, b"data"),
    "exists": lambda store: store.exists(DOCUMENT),
}
SAID = {"exists": "read"}


def refusal(kind: type[FirstFaultError], run: Callable[[], object]) -> str:
    """Return the text of the error that `run` raises, which is exactly `kind` and one line."""
    with pytest.raises(kind) as caught:
        run()
    assert caught.type is kind
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def refusals(
    kind: type[FirstFaultError],
    with_store: WithStore,
    uri: str,
    *verbs: str,
) -> list[str]:
    """Return the text of the error of each kind of request,
    which names the request and the folder.
    """
    texts = []
    for verb in verbs or VERBS:
        texts.append(refusal(kind, lambda verb=verb: with_store(uri, VERBS[verb])))
        assert texts[-1].startswith(f"cannot {SAID.get(verb, verb)} {uri}/firstfault/errors")
    return texts


@pytest.mark.parametrize(
    "wrong", [{"access_key": "unknown"}, {"secret_key": "guessed"}], ids=["key", "secret"]
)
def test_wrong_credentials_raise_access_denied(
    s3: S3,
    environment_of: Callable[..., Any],
    with_store: WithStore,
    wrong: dict[str, str],
) -> None:
    """A wrong key or secret raises AccessDeniedError, which says what to check."""
    with environment_of(replace(s3, **wrong)):
        texts = refusals(
            AccessDeniedError,
            with_store,
            s3.uri(),
            *(["list"] if "access_key" in wrong else []),
        )
    assert all("check the credentials" in text and "guessed" not in text for text in texts)


@pytest.mark.parametrize("variables", ["AWS_", "FLYTE_AWS_"])
def test_variables_of_flytekit_or_botocore_suffice(
    s3: S3,
    monkeypatch: pytest.MonkeyPatch,
    with_store: WithStore,
    variables: str,
) -> None:
    """The variables of flytekit are enough, and so are those of botocore."""
    for name, value in s3.environment().items():
        if name.startswith(variables):
            monkeypatch.setenv(name, value)
    assert with_store(s3.uri(), VERBS["list"]) == []


def test_passed_options_replace_the_environments(
    s3_environ: S3,
    faulty_proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    with_store: WithStore,
) -> None:
    """Options that the caller passes are used instead of the environment's;
    a refusal is not repeated.
    """
    monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "guessed")
    refusal(AccessDeniedError, lambda: with_store(s3_environ.uri(), VERBS["list"]))
    assert len(faulty_proxy.requests) == 1
    assert with_store(s3_environ.uri(), VERBS["list"], secret=s3_environ.secret_key) == []


def test_without_credentials_the_error_names_the_variables_in_time(
    s3: S3,
    silent_server: SilentServer,
    monkeypatch: pytest.MonkeyPatch,
    with_store: WithStore,
) -> None:
    """The error names the variables to set. botocore's search for an instance role ends,
    and is not repeated.
    """
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", s3.endpoint)
    for text in refusals(AccessDeniedError, with_store, s3.uri()):
        for name in ("FLYTE_AWS_ACCESS_KEY_ID", "FLYTE_AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
            assert name in text
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", silent_server.endpoint)
    refusal(AccessDeniedError, lambda: with_store(s3.uri(), VERBS["list"]))
    assert 0 < len(silent_server.connections) <= 2, (
        "the client asked the instance service again, or not at all"
    )


def test_the_error_of_a_forbidden_listing_names_the_permission(
    s3_no_list: S3, environment_of: Callable[..., Any], with_store: WithStore
) -> None:
    """An account without the list permission can read and write;
    the error of a listing names the permission.
    """
    uri = s3_no_list.uri()
    with environment_of(s3_no_list):
        with_store(uri, VERBS["write"])
        assert with_store(uri, VERBS["read"]) == b"data"
        assert with_store(uri, VERBS["exists"]) is True
        assert "the list permission" in refusal(
            AccessDeniedError, lambda: with_store(uri, VERBS["list"])
        )


def test_a_missing_bucket_raises_an_error_about_its_name(
    s3_environ: S3, with_store: WithStore
) -> None:
    """A missing bucket raises an error that says to check its name;
    so does a name against the rules.
    """
    for text in refusals(StoreError, with_store, "s3://no-such-place/run", "list", "read", "write"):
        assert "check the bucket's name" in text
    assert "Not_A_Bucket" in refusal(
        StoreError, lambda: with_store("s3://Not_A_Bucket!/run", VERBS["list"])
    )


@pytest.mark.usefixtures("no_waiting")
def test_a_refused_connection_raises_store_unavailable(
    s3_environ: S3, monkeypatch: pytest.MonkeyPatch, with_store: WithStore
) -> None:
    """A refused connection raises StoreUnavailableError, which says to check the endpoint."""
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", "http://127.0.0.1:9")
    for text in refusals(StoreUnavailableError, with_store, s3_environ.uri()):
        assert "127.0.0.1:9" in text
        assert "check the endpoint" in text


def test_an_endpoint_that_is_no_url_is_a_usage_error(
    s3_environ: S3, monkeypatch: pytest.MonkeyPatch, with_store: WithStore
) -> None:
    """An endpoint that is not a URL raises a UsageError."""
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", "minio.flyte:9000")
    text = refusal(UsageError, lambda: with_store(s3_environ.uri(), VERBS["list"]))
    assert "minio.flyte:9000" in text
    assert "https://" in text


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("verb", ["list", "write"])
def test_a_silent_server_costs_one_read_timeout_per_attempt(
    s3_environ: S3,
    silent_server: SilentServer,
    monkeypatch: pytest.MonkeyPatch,
    with_store: WithStore,
    verb: str,
) -> None:
    """A silent server takes one read timeout per attempt:
    the clients do not retry by themselves.
    """
    monkeypatch.setattr(settings, "READ_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(settings, "CONNECT_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", silent_server.endpoint)
    refusal(StoreUnavailableError, lambda: with_store(s3_environ.uri(), VERBS[verb]))
    # on a busy machine a write may be given up before it has a connection
    assert len(silent_server.connections) <= 4


@pytest.mark.usefixtures("no_waiting")
def test_up_to_three_transient_faults_are_retried(
    s3_environ: S3, faulty_proxy: FaultyProxy, with_store: WithStore
) -> None:
    """Up to three transient faults in a row are retried."""
    uri = s3_environ.uri()
    with_store(uri, VERBS["write"])
    for verb in ("list", "read", "write"):
        before = len(faulty_proxy.requests)
        faulty_proxy.plan("503", "drop", "500")
        with_store(uri, VERBS[verb])
        assert faulty_proxy.is_used_up
        assert len(faulty_proxy.requests) - before == 4


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("fault", ["503", "500", "drop"])
def test_a_lasting_fault_raises_store_unavailable_after_four_requests(
    s3_environ: S3,
    faulty_proxy: FaultyProxy,
    with_store: WithStore,
    fault: str,
) -> None:
    """A lasting fault raises StoreUnavailableError after four requests."""
    faulty_proxy.plan(Fault(fault))
    for verb in VERBS:
        before = len(faulty_proxy.requests)
        refusals(StoreUnavailableError, with_store, s3_environ.uri(), verb)
        # aiohttp by itself repeats once what was sent on a connection that closed
        assert len(faulty_proxy.requests) - before in ({4, 8} if fault == "drop" else {4})


def test_a_redirect_to_another_region_is_followed(
    s3_environ: S3,
    faulty_proxy: FaultyProxy,
    with_store: WithStore,
    client: str,
) -> None:
    """If S3 redirects to the bucket's region, the store follows."""
    faulty_proxy.plan(Fault("301", client="object_store"))

    async def use(store: Store) -> object:
        await store.put("a.pb", b"data")
        assert [item.name for item in await store.list()] == ["a.pb"]
        assert await store.exists("a.pb")
        return await store.get("a.pb")

    assert with_store(s3_environ.uri(), use) == b"data"
    assert len(faulty_proxy.requests) == (5 if client == "obstore" else 4)
