"""``firstfault doctor``: which commands would record a job in this environment,
and what prevents it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import click

from firstfault.cli import EXIT, debug_option
from firstfault.errors import StoreError
from firstfault.store import is_remote, join, open_store
from firstfault.utils.run_sync import run_sync
from firstfault_start import WORKER_VARIABLE, is_in_worker, is_off, is_on
from firstfault_torch.compat.versions import find_untested_releases
from firstfault_torch.guard import call_with_timeout, try_call
from firstfault_torch.time_limits import DOCTOR_TIMEOUT_SECONDS

_PROBE_NAME, _PROBE_CONTENT = "firstfault-doctor", b"written by firstfault doctor"
"""The file that the doctor writes. A storage keeps it: an object can't be removed everywhere."""
_PACKAGES = {
    "torch": "torch",
    "flytekit": "flytekit",
    "extra s3": "s3fs",
    "extra gcs": "gcsfs",
    "extra azure": "adlfs",
}
_RAY_CALLBACKS_VARIABLE, _JAX_VARIABLE = "RAY_TRAIN_CALLBACKS", "JAX_COORDINATOR_ADDRESS"
_HANDLER_NAME = "firstfault"
"""Name of our entry point in torch's group ``torchrun.handlers``."""
_OK, _NO, _FACT = True, False, None
"""States of a check: fine; prevents recording or has an invalid value; only informs."""
_STATE_TEXTS = {_OK: "ok", _NO: "NO", _FACT: "--"}
_Check = tuple[bool | None, str, str]
"""The state, subject and text of a line."""


@click.command()
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object (firstfault.doctor/v1).",
)
@debug_option
def doctor(as_json: bool) -> None:
    """Check whether jobs would be recorded in this environment, by which commands, and under which
    names.

    Run it where the job will run: in its image, with its variables, in its working folder. It
    writes a small file into the folder of the documents, lists the folder, and reads the file.

    \b
    Exit codes: 0 `firstfault torchrun` records jobs here,
    1 it doesn't, or a variable has an invalid value.

    \b
    Examples:
      firstfault doctor
      FIRSTFAULT=1 FIRSTFAULT_FOLDER=s3://bucket/runs firstfault doctor --json
    """  # noqa: D301 - click's mark of lines to keep
    checks = list(_run_checks())
    refused = [name for state, name, _ in checks if state is _NO]
    is_recorded = not set(refused) - _list_variable_rows()
    is_plain_recorded = is_recorded and is_on() and _has_loaded_entry_point()
    lines = [f"{_STATE_TEXTS[state]}  {name:10} {text}" for state, name, text in checks]
    lines += _conclude(refused, is_plain_recorded=is_plain_recorded)
    if as_json:
        rows = [{"name": name, "ok": state, "text": text} for state, name, text in checks]
        result = {"recorded": is_recorded, "plain_torchrun": is_plain_recorded, "checks": rows}
        lines = [json.dumps({"schema": "firstfault.doctor/v1", **result})]
    click.echo("\n".join(lines))
    sys.stdout.flush()
    # a thread may wait for a folder that doesn't answer
    os._exit(EXIT.TOOL_FAILED if refused else EXIT.OK)


def _conclude(refused: Sequence[str], *, is_plain_recorded: bool) -> list[str]:
    """Return what works now, and what would also work with another setting."""
    rows = _list_variable_rows()
    invalid = [name for name in refused if name in rows]
    refused = [name for name in refused if name not in rows]
    if invalid and not refused:
        names = ", ".join(invalid)
        return [f"records, but ignores invalid values: repair what is marked with NO ({names})"]
    if list(refused) == ["storage"]:
        return [
            "records only on each node, not in FIRSTFAULT_FOLDER: repair what is marked with NO"
        ]
    if refused:
        return [f"doesn't record yet: repair what is marked with NO ({', '.join(refused)})"]
    if is_plain_recorded:
        return [
            "works now: torchrun, other launchers with torch's agent, and `firstfault torchrun`"
        ]
    lines = ["works now: `firstfault torchrun`"]
    if not is_on():
        lines.append(
            "would also work with FIRSTFAULT=1: torchrun, and other launchers with torch's agent"
        )
    return lines


def _list_variable_rows() -> set[str]:
    """Return the rows of variables: an invalid value is ignored, and the job is recorded."""
    from firstfault_torch.torchrun.settings_in_words import (  # noqa: PLC0415 - loads strategies
        list_rows,
    )

    return list_rows()


def _run_checks() -> Iterator[_Check]:
    versions = {
        name: try_call(partial(importlib.metadata.version, package))[0]
        for name, package in _PACKAGES.items()
    }
    packages = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in versions.items()
    )
    own = importlib.metadata.version("firstfault")
    yield _FACT, "installed", f"firstfault {own}, Python {sys.version.split()[0]}, {packages}"
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch:
        yield _check_versions()
    yield _check_switch()
    yield from _check_settings()
    yield _check_torch()
    if has_torch:
        yield _check_recorder()
    yield _check_workers()
    storage, error = _check_storage()
    yield storage
    yield from _check_callbacks()
    yield from _describe_names(is_stored=error is None)


def _describe_names(*, is_stored: bool) -> Iterator[_Check]:
    """Yield the names of a job that starts here; if its folder can be written,
    also where its documents go.
    """
    from firstfault.run_folder import describe_fallback_folder  # noqa: PLC0415 - loads strategies
    from firstfault_torch.torchrun.job_folder import (  # noqa: PLC0415 - as above
        find_root_folder,
        is_named_by_start,
        name_run,
    )
    from firstfault_torch.torchrun.job_names import read_job_names  # noqa: PLC0415 - as above
    from firstfault_torch.torchrun.settings import ATTEMPT_VARIABLE  # noqa: PLC0415 - as above

    this = read_job_names(os.environ.get("PET_RDZV_ID", ""))
    unnamed = "no variable names it: torchrun's --rdzv-id, else the start's time, host and process"
    yield _FACT, "job", str(this.job) if this.job.value else unnamed
    yield (
        _FACT,
        "attempt",
        str(this.attempt) if this.attempt.value else "0: no variable counts attempts",
    )
    yield (
        _FACT,
        "node",
        f"{this.node}; namespace: {this.namespace if this.namespace.value else 'none'}",
    )
    if not is_stored:
        return  # the row of the storage names the place that is used instead
    yield (
        _FACT,
        "fallback",
        f"{describe_fallback_folder()}, if the folder of the documents can't be written",
    )
    root = find_root_folder()
    run = name_run(this)
    condition = ""
    if is_named_by_start(root, this):
        run = "-".join(filter(None, (run, "<time>-<host>-<process>")))
        if this.run:
            condition = f": set {ATTEMPT_VARIABLE} for {join(root, name_run(this), this.number)}"
    elif is_remote(root):
        condition = ", whether or not an earlier run has left files there"
    else:
        condition = ", if no run before has this name"
    yield _FACT, "documents", f"{join(root, run, this.number)}{condition}"


def _check_versions() -> _Check:
    untested = find_untested_releases()
    versions = (
        f"firstfault was not tested with {', '.join(untested)}"
        if untested
        else "firstfault was tested with these releases"
    )
    return _FACT, "versions", versions


def _check_recorder() -> _Check:
    """Check that torch's flight recorder shows the collectives of the backend that a job here
    would use.
    """
    probe = partial(try_call, _probe_flight_recorder, Exception)
    seconds = DOCTOR_TIMEOUT_SECONDS
    counted, error = call_with_timeout(probe, seconds, "trying the recorder") or (None, None)
    return _FACT, "recorder", counted or f"couldn't call a collective: {error or 'timed out'}"


def _probe_flight_recorder() -> str:
    """Call a collective in a group of one rank; return whether it is in torch's flight recorder."""
    import torch  # noqa: PLC0415 - may not be installed
    import torch.distributed as dist  # noqa: PLC0415

    from firstfault_torch.worker.process_state import (  # noqa: PLC0415 - as above
        read_collective_progress,
    )

    name, device = ("nccl", "cuda") if torch.cuda.is_available() else ("gloo", "cpu")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(name, store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1, device=device))
        called = [progress.last_operation for progress in read_collective_progress()]
    finally:
        dist.destroy_process_group()
    if called:
        return f"collectives of {name} are found in torch's flight recorder ({called[0]})"
    return (
        f"no collective of {name} is found in this torch's flight recorder: hangs are explained by"
        " stacks only"
    )


def _check_switch() -> _Check:
    value = os.environ.get("FIRSTFAULT", "")
    if is_in_worker():
        return (
            _NO,
            "switch",
            (
                "this process is a worker of a job under firstfault; launchers inside it are"
                " torch's own"
            ),
        )
    if _JAX_VARIABLE in os.environ:
        return (
            _NO,
            "switch",
            f"{_JAX_VARIABLE} is set: Flyte 2's JaxRun starts no torchrun, so nothing is recorded",
        )
    if is_off():
        return _NO, "switch", f"FIRSTFAULT={value} turns firstfault off: nothing is recorded"
    if is_on():
        return _OK, "switch", f"FIRSTFAULT={value}: torchrun runs under firstfault"
    return (
        _FACT,
        "switch",
        f"FIRSTFAULT is {value or 'not set'}: only `firstfault torchrun` records",
    )


def _check_settings() -> Iterator[_Check]:
    """Report what the variables for decisions, exit codes, hangs and the port mean,
    and each invalid value of any variable.
    """
    from firstfault_torch.torchrun.settings_in_words import (  # noqa: PLC0415 - loads strategies
        describe_settings,
    )

    for is_valid, name, text in describe_settings():
        yield _FACT if is_valid else _NO, name, text


def _check_torch() -> _Check:
    if importlib.util.find_spec("torch") is None:
        return _NO, "torch", "not installed in this Python: in a clone, pip install '.[torch]'"
    missing, error = try_call(_missing_in_torch, Exception)
    if missing is None or missing:
        return (
            _NO,
            "torch",
            f"it lacks {' and '.join(missing)}" if missing else f"cannot be imported: {error}",
        )
    if _has_loaded_entry_point():
        return _OK, "torch", "supported, and loads firstfault's entry point"
    installed = importlib.metadata.entry_points(group="torchrun.handlers", name=_HANDLER_NAME)
    how = (
        "this torch loads no entry points"
        if installed
        else "firstfault's entry point is missing: reinstall it"
    )
    return (
        _FACT,
        "torch",
        f"supported by `firstfault torchrun`; FIRSTFAULT=1 has no effect, because {how}",
    )


def _missing_in_torch() -> list[str]:
    """Return what firstfault doesn't find in this torch,
    which loads the entry points when it is imported.
    """
    from firstfault_torch.compat.torch_agent import (  # noqa: PLC0415 - may not be installed
        find_missing_names,
    )

    launcher = importlib.import_module("torch.distributed.launcher.api")
    return [*find_missing_names(), *({"LocalElasticAgent"} - vars(launcher).keys())]


def _has_loaded_entry_point() -> bool:
    """Whether this torch has loaded firstfault's entry point,
    so that FIRSTFAULT=1 has an effect.
    """
    from firstfault_torch.compat.torch_agent import (  # noqa: PLC0415 - may not be installed
        has_handler,
    )

    return has_handler(_HANDLER_NAME)


def _check_workers() -> _Check:
    """Check that the Python of the workers reads firstfault.pth."""
    # torchrun starts workers with PYTHON_EXEC, which may be another Python than this one.
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    command = [python, "-u", "-c", "import sys; sys.exit('firstfault_start' not in sys.modules)"]
    environment = {**os.environ, WORKER_VARIABLE: "doctor"}
    start = partial(subprocess.run, command, env=environment, capture_output=True, check=True)
    _, error = try_call(partial(start, timeout=DOCTOR_TIMEOUT_SECONDS), Exception)
    if error is None:
        return _OK, "workers", f"{python} reads firstfault.pth"
    why = "" if isinstance(error, subprocess.CalledProcessError) else f" ({error})"
    advice = "install firstfault there, and don't use python -S"
    return _NO, "workers", f"{python} doesn't read firstfault.pth: {advice}{why}"


def _check_callbacks() -> Iterator[_Check]:
    """Check whether Ray Train can load its callbacks, because a wrong name fails the training."""
    for name in filter(
        None, os.environ.get(_RAY_CALLBACKS_VARIABLE, "").replace(" ", "").split(",")
    ):
        probe = partial(try_call, partial(resolve_name, name), Exception)
        kind, error = call_with_timeout(probe, DOCTOR_TIMEOUT_SECONDS, "loading a callback") or (
            None,
            TimeoutError(),
        )
        is_callback = "RayTrainCallback" in {base.__name__ for base in getattr(kind, "__mro__", ())}
        problem = (
            ""
            if is_callback
            else f" fails each training of Ray Train: {error or 'not a RayTrainCallback'!r}"
        )
        yield (
            _OK if is_callback else _FACT,
            "callback",
            f"{_RAY_CALLBACKS_VARIABLE}: {name}{problem}",
        )


def _check_storage() -> tuple[_Check, BaseException | None]:
    """Try the folder of the documents; return the row, and the error if it can't be used."""
    from firstfault.run_folder import describe_fallback_folder  # noqa: PLC0415 - as above
    from firstfault_torch.torchrun import job_folder, settings  # noqa: PLC0415 - as above

    folder = job_folder.find_root_folder()
    began = time.monotonic()
    probe = partial(
        try_call, partial(_try_remote if is_remote(folder) else _try_local, folder), Exception
    )
    _, error = call_with_timeout(probe, DOCTOR_TIMEOUT_SECONDS, "trying the storage") or (
        None,
        TimeoutError(),
    )
    name = (
        settings.FOLDER_VARIABLE
        if job_folder.get_given_folder()
        else f"{settings.FOLDER_VARIABLE} is not set"
    )
    if error is None:
        took = time.monotonic() - began
        return (_OK, "storage", f"wrote, listed and read {folder} in {took:.2f} s ({name})"), None
    why = (
        f"no answer within {DOCTOR_TIMEOUT_SECONDS:g} s"
        if isinstance(error, TimeoutError)
        else str(error)
    )
    text = f"{folder}: {why} ({name}); documents go to {describe_fallback_folder()} instead"
    return (_NO if job_folder.get_given_folder() else _FACT, "storage", text), error


def _try_local(folder: str) -> None:
    from firstfault.run_folder import find_foreign_folder  # noqa: PLC0415 - as above

    if foreign := find_foreign_folder(Path(folder)):
        raise OSError(f"{foreign} is a link, or belongs to another user")
    # The job makes missing folders itself; the doctor leaves none behind, so it tries the nearest
    # one that exists.
    place = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    with tempfile.NamedTemporaryFile(dir=place, prefix=_PROBE_NAME) as file:
        file.write(_PROBE_CONTENT)
        file.flush()
        os.fsync(file.fileno())
        if Path(file.name) not in place.iterdir() or Path(file.name).read_bytes() != _PROBE_CONTENT:
            raise OSError(f"{file.name} is missing after it was written")


def _try_remote(folder: str) -> None:
    async def look() -> None:
        # One attempt: repeated ones could take longer than the doctor waits, and hide the error.
        async with open_store(folder, attempts=1) as store:
            await store.put(f"{_PROBE_NAME}/probe", _PROBE_CONTENT)
            if (
                not await store.list(_PROBE_NAME)
                or await store.get(f"{_PROBE_NAME}/probe") != _PROBE_CONTENT
            ):
                raise StoreError(f"{folder}/{_PROBE_NAME}/probe is missing after it was written")

    run_sync(look())
