"""Loads a task from a file: its serialized command and its inputs."""

from __future__ import annotations

import dataclasses
import datetime as dt
import difflib
import importlib
import json
import re
import sys
import traceback
import types
import typing
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.interaction.click_types import FlyteLiteralConverter
from flytekit.tools.translator import get_serializable

from firstfault.errors import UsageError
from firstfault.store import join
from firstfault.utils.text import parse_json
from flytekitplugins.firstfault.config import Elastic, PyTorch
from flytekitplugins.firstfault.task import ElasticFunctionTask, PyTorchFunctionTask

TrainingTask = ElasticFunctionTask | PyTorchFunctionTask

_PLAIN: dict[type, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    str: (str,),
    bool: (bool,),
}
_UNKNOWN_ARGUMENT = re.compile(
    r"(?P<type>\w+)\.__init__\(\) got an unexpected keyword argument '(?P<name>\w+)'"
)
_PROJECT, _DOMAIN, _VERSION = "local", "development", "local"


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a pod, from the task's template."""

    arguments: tuple[str, ...]
    """The command's arguments, with the backend's placeholders."""
    environment: dict[str, str]

    def filled(self, *, inputs: str, prefix: str, raw: str, previous_raw: str = "") -> list[str]:
        """Return the arguments of one attempt: the URIs of its inputs, outputs and raw outputs,
        and of those before.
        """
        values = {
            "{{.input}}": inputs,
            "{{.outputPrefix}}": prefix,
            "{{.rawOutputDataPrefix}}": raw,
            "{{.checkpointOutputPrefix}}": join(raw, "checkpoints"),
            "{{.prevCheckpointPrefix}}": (
                join(previous_raw, "checkpoints") if previous_raw else '""'
            ),
        }
        return [values.get(argument, argument) for argument in self.arguments]


def load_task(file: Path, name: str) -> tuple[TrainingTask, Path]:
    """Return the task and the folder that must be on the pods' Python path.

    Raises:
        UsageError: the file can't be imported, or it has no Elastic or PyTorch task with this name.
    """
    file = file.resolve()
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").exists():
        parts.insert(0, root.name)
        root = root.parent
    # The same root and module name as in the pods, where PYTHONPATH begins with this root: Flyte's
    # resolver imports the task by its dotted module name.
    sys.path.insert(0, str(root))
    try:
        module = importlib.import_module(".".join(parts))
    except (Exception, SystemExit) as error:  # a script without a __main__ guard may call sys.exit
        text = f"{type(error).__name__}: {error}{_suggest_option(error)}{_locate(error, root)}"
        raise UsageError(f"{file} cannot be imported: {text}") from error
    # import_module returns a module that is already loaded, such as the standard library's, if the
    # file has its name.
    module_file = getattr(module, "__file__", None)
    if module_file is None or Path(module_file).resolve() != file:
        raise UsageError(
            f"{file.name} cannot be imported: another module has its name,"
            f" {module_file or 'a built-in one'}"
        )
    task = getattr(module, name, None)
    if isinstance(task, ElasticFunctionTask | PyTorchFunctionTask):
        return task, root
    known = sorted(key for key, value in vars(module).items() if isinstance(value, TrainingTask))
    listed = ", ".join(known) if known else "none"
    if task is None:
        raise UsageError(
            f"{file.name} has no task {name!r}; its Elastic and PyTorch tasks are: {listed}"
        )
    raise UsageError(
        f"{name} in {file.name} is not a task with task_config=Elastic(...) or PyTorch(...) of "
        f"flytekitplugins.firstfault; those are: {listed}"
    )


def _locate(error: BaseException, root: Path) -> str:
    """Return where the user's code raised an error: " (at train.py:4 in load)", or ""."""
    if isinstance(error, SyntaxError):
        return ""  # its text has the line
    frames = traceback.extract_tb(error.__traceback__)
    # what is installed below the root, such as a virtual environment, isn't the user's
    own = [
        frame
        for frame in frames
        if Path(frame.filename).is_relative_to(root) and "site-packages" not in frame.filename
    ]
    if not own:
        return ""
    name = Path(own[-1].filename).relative_to(root)
    function = "" if own[-1].name == "<module>" else f" in {own[-1].name}"
    return f" (at {name}:{own[-1].lineno}{function})"


def _suggest_option(error: BaseException) -> str:
    """Return the field of `Elastic` or `PyTorch` that a misspelled argument means, or ""."""
    unknown = _UNKNOWN_ARGUMENT.match(str(error)) if isinstance(error, TypeError) else None
    if unknown is None:
        return ""
    config = {kind.__name__: kind for kind in (Elastic, PyTorch)}.get(unknown["type"])
    if config is None:
        return ""
    names = [field.name for field in dataclasses.fields(config)]
    close = difflib.get_close_matches(unknown["name"], names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def serialized_command(task: TrainingTask) -> Command:
    """Return the command and the environment in the task's own template.

    With a shared-memory volume the task has a pod template, otherwise a plain container.
    """
    images = ImageConfig.auto_default_image()
    settings = SerializationSettings(
        project=_PROJECT,
        domain=_DOMAIN,
        version=_VERSION,
        image_config=images,
    )
    image = task.container_image
    if not isinstance(image, str | None):
        # an ImageSpec would be built and pushed, which local pods don't need
        task._container_image = None  # noqa: SLF001
    try:
        template = get_serializable(OrderedDict(), settings, task).template
    finally:
        task._container_image = image  # noqa: SLF001
    if template.k8s_pod is not None:
        # The user's pod template may have sidecars; flytekit puts the command into the primary
        # container.
        containers = template.k8s_pod.pod_spec["containers"]
        primary = (template.config or {}).get("primary_container_name", "primary")
        container = next(
            (item for item in containers if item.get("name") == primary), containers[0]
        )
        environment = {item["name"]: item.get("value") or "" for item in container.get("env") or []}
        return Command(tuple(container["args"]), environment)
    return Command(tuple(template.container.args), dict(template.container.env or {}))


def read_inputs(task: TrainingTask, text: str | None) -> Any:
    """Return the task's inputs as a flyteidl LiteralMap, from a JSON object;
    missing ones take their defaults.

    Raises:
        UsageError: `text` isn't a JSON object, a name is unknown or missing, or a value has the
            wrong type.
    """
    form = """--inputs must be a JSON object like '{"epochs": 3}'"""
    try:
        given = parse_json("{}" if text is None else text)
    except ValueError as error:
        raise UsageError(f"{form}; {error}") from error
    if not isinstance(given, dict):
        raise UsageError(f"{form}, not {type(given).__name__}")
    interface = task.python_interface
    types, defaults = interface.inputs, interface.default_inputs_as_kwargs
    unknown = sorted(set(given) - set(types))
    if unknown:
        raise UsageError(
            f"--inputs names {', '.join(unknown)}; the task takes {', '.join(types) or 'no inputs'}"
        )
    missing = sorted(name for name in types if name not in given and name not in defaults)
    if missing:
        raise UsageError(f"the task needs inputs that --inputs does not give: {', '.join(missing)}")
    context = FlyteContextManager.current_context()
    native = dict(defaults)
    for name, value in given.items():
        native[name] = _to_native(name, value, types[name], task.interface.inputs[name].type)
    try:
        literals = TypeEngine.dict_to_literal_map(context, native, types)
    except Exception as error:
        raise UsageError(f"--inputs cannot be converted to the task's types: {error}") from error
    return literals.to_flyte_idl()


def show_outputs(task: TrainingTask, outputs: Any) -> dict[str, Any]:
    """Return the outputs as JSON values; others are converted to text."""
    from flytekit.models.literals import (  # noqa: PLC0415 - only a successful run needs it
        LiteralMap,
    )

    context = FlyteContextManager.current_context()
    literals = LiteralMap.from_flyte_idl(outputs)
    values = TypeEngine.literal_map_to_kwargs(context, literals, task.python_interface.outputs)
    return {name: _to_showable(value) for name, value in values.items()}


def _to_native(name: str, value: Any, python_type: Any, literal_type: Any = None) -> Any:
    """Return the task's value for a JSON value;
    flytekit's converter handles types that JSON doesn't have.
    """
    if python_type is Any:
        return value
    if typing.get_origin(python_type) in {typing.Union, types.UnionType}:
        return _parse_union(name, value, python_type, literal_type)
    if python_type in _PLAIN:
        # JSON has one kind of number, so an int is accepted for a float; a bool is an int in Python
        # and must not be.
        wanted = _PLAIN[python_type]
        if not isinstance(value, wanted) or (isinstance(value, bool) and python_type is not bool):
            raise UsageError(
                f"input {name} must be {python_type.__name__}, not {type(value).__name__}"
                f" ({value!r})"
            )
        try:
            return python_type(value)
        except OverflowError as error:
            raise UsageError(f"input {name} is too large for {python_type.__name__}") from error
    if python_type in {dt.datetime, dt.date} and isinstance(value, str):
        return _to_moment(name, value, python_type)
    arguments = typing.get_args(python_type)
    if arguments and typing.get_origin(python_type) is list and isinstance(value, list):
        return [
            _to_native(f"{name}[{index}]", item, arguments[0]) for index, item in enumerate(value)
        ]
    if arguments and typing.get_origin(python_type) is dict and isinstance(value, dict):
        return {
            key: _to_native(f"{name}[{key!r}]", item, arguments[1]) for key, item in value.items()
        }
    return _convert(name, value, python_type, literal_type)


def _parse_union(name: str, value: Any, python_type: Any, literal_type: Any) -> Any:
    members = [member for member in typing.get_args(python_type) if member is not type(None)]
    if value is None and len(members) < len(typing.get_args(python_type)):
        return None
    if len(members) == 1:
        return _to_native(name, value, members[0])
    return _convert(name, value, python_type, literal_type)


def _to_moment(name: str, value: str, python_type: type) -> dt.datetime | dt.date:
    try:
        # Python 3.10 doesn't parse Z
        moment = dt.datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError as error:
        raise UsageError(
            f"input {name} must be a time like 2026-01-31T12:00:00Z, not {value!r}"
        ) from error
    return moment if python_type is dt.datetime else moment.date()


def _convert(name: str, value: Any, python_type: Any, literal_type: Any) -> Any:
    command = click.get_current_context(silent=True) or click.Context(
        click.Command("run"), obj=None
    )
    context = FlyteContextManager.current_context()
    try:
        literal_type = literal_type or TypeEngine.to_literal_type(python_type)
        converter = FlyteLiteralConverter(context, literal_type, python_type, is_remote=False)
        text = value if isinstance(value, str) else json.dumps(value)
        return converter.click_type.convert(text, None, command)
    except Exception as error:
        raise UsageError(f"input {name} cannot be converted to {python_type}: {error}") from error


def _to_showable(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value
