"""Classify exceptions by the library function that raised them: an unreadable checkpoint,
a bad configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import Classification
from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.first_cause import (
    find_causes,
    iter_exceptions,
    join_frames,
)
from firstfault.exceptions.source_files import is_library_file
from firstfault.model import ExceptionInfo
from firstfault.utils.lazy_pattern import LazyPattern

DATA_LOADER_FOLDER = "torch/utils/data/"
_LOADER_SIGNAL_HANDLER = f"{DATA_LOADER_FOLDER}_utils/signal_handling.py"
_MAX_LOADER_FRAMES = 12
"""From the innermost one: reading from a process goes through multiprocessing."""
_MAX_LIBRARY_FRAMES = 8
"""Maximum number of library frames to search. Farther out, a library may call the training."""

# Functions of libraries that read a checkpoint: file and function
_CHECKPOINT_LOADER = LazyPattern(r"""
  (?:torch/serialization|/safetensors/\w+|torch/distributed/checkpoint/\w+)\.py[ ]\w*(?:load|read)\w*$
  |-packages/\S*[ ]_?(?:load|restore|resume)_?\w*(?:state|checkpoint|weights|ckpt)\w*$
  |-packages/\S*checkpoint\S*[ ]_?(?:load|read|restore|resume)\w*$
""")


def classify_by_library_call(
    exception: ExceptionInfo, classification: Classification
) -> Classification:
    """Classify an exception with an unspecific text by the library function that raised it."""
    is_cut = (
        classification.signature == "bare-timeout"
        and get_short_name(find_causes(exception).first) == "EOFError"
    )
    # a data loader may read its samples with a checkpoint loader: that isn't the job's checkpoint
    is_data = any(
        DATA_LOADER_FOLDER in frame.file
        for link in iter_exceptions(exception)
        for frame in link.frames
    )
    if is_data or not (
        is_cut or (classification.role is Role.PRIMARY and not classification.is_specific)
    ):
        return classification
    called = _list_innermost_library_calls(exception)[:_MAX_LIBRARY_FRAMES]
    if any(map(_CHECKPOINT_LOADER.search, called)):
        return replace(classification, role=Role.PRIMARY, category="checkpoint")
    return (
        replace(classification, role=Role.PRIMARY, category="config")
        if _is_parser_called(called)
        else classification
    )


def is_about_loader_process(exception: ExceptionInfo) -> bool:
    """Whether an exception is about a process of the rank's data loader: it was raised in torch's
    code for these.
    """
    return any(DATA_LOADER_FOLDER in frame.file for frame in exception.frames[-_MAX_LOADER_FRAMES:])


def is_raised_by_loader_signal(exception: ExceptionInfo) -> bool:
    """Whether torch's handler of SIGCHLD raised because a loader's process has died:
    at any line of the program.
    """
    frame = exception.frames[-1] if exception.frames else None
    return frame is not None and _LOADER_SIGNAL_HANDLER in frame.file


def was_raised_by_config_parser(exception: ExceptionInfo) -> bool:
    """Whether a command line or configuration parser raised,
    directly or in a function that it called.
    """
    return _is_parser_called(_list_innermost_library_calls(exception))


def _list_innermost_library_calls(exception: ExceptionInfo) -> list[str]:
    """Return "file function" of the library frames below the program's last frame on the
    way to the first cause.
    """
    causes = find_causes(exception)
    frames = join_frames([*causes.wrappers, causes.first])[::-1]
    inner = itertools.takewhile(lambda frame: is_library_file(frame.file), frames)
    return [f"{frame.file} {frame.function}" for frame in inner]


# Functions of libraries that read a command line or a configuration
_CONFIG_PARSER = LazyPattern(r"""
  /argparse\.py[ ]
  |-packages/(?:absl|click|draccus|fire|hydra|jsonargparse|omegaconf|transformers/hf_arg|typer|tyro)
""")

# Functions that these parsers call; skipped to find the parser itself
_PARSER_INTERNALS = LazyPattern(r"/lib/python\d[\d.]*/(?!argparse)\w+\.py[ ]|/pydantic")


def _is_parser_called(called: Iterable[str]) -> bool:
    name = next((name for name in called if not _PARSER_INTERNALS.search(name)), "")
    return _CONFIG_PARSER.search(name) is not None
