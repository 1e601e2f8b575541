"""Raises exceptions of other processes, in the ways in which programs do."""

import concurrent.futures
import multiprocessing
import traceback
from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset


class LineError(Exception):
    """An exception that cannot be made from its text alone."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}:{line} has no label\nsecond line")


class _Records(Dataset[Any]):
    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return parse(index, self._error)


def parse(index: int, error: type[BaseException] = ValueError) -> Any:
    try:
        return {}["label"]
    except KeyError as missing:
        if error is KeyError:
            raise
        if error is LineError:
            raise LineError("shard-3", index) from missing
        raise ValueError("record 0 has no label") from missing


def _spawned(rank: int) -> None:
    parse(rank)


def of_data_loader() -> None:
    """As torch raises it again: the same type."""
    list(DataLoader(_Records(KeyError), num_workers=1))


def of_data_loader_as_runtime_error() -> None:
    """As torch raises an exception that it cannot make again."""
    list(DataLoader(_Records(LineError), num_workers=1))


def of_process_pool() -> None:
    """As `concurrent.futures` raises it: with the text as its cause."""
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        list(pool.map(parse, [1]))


def of_pool() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(parse, [1])


def of_torch_spawn() -> None:
    torch.multiprocessing.start_processes(_spawned, nprocs=1, start_method="fork")  # type: ignore[no-untyped-call]


def of_the_program() -> None:
    try:
        parse(1)
    except ValueError:
        text = traceback.format_exc()
    raise RuntimeError(f"worker 7 failed:\n{text}")


def nested() -> None:
    """A data loader in a process of a pool."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            pool.apply(of_the_program)
        except RuntimeError as error:
            raise RuntimeError(f"giving up: {error}") from None


WAYS = {
    "data loader": (of_data_loader, "KeyError", "'label'", "in parse"),
    "data loader, RuntimeError": (
        of_data_loader_as_runtime_error,
        "LineError",
        "shard-3:0 has no label",
        "in parse",
    ),
    "process pool": (of_process_pool, "ValueError", "record 0 has no label", "in parse"),
    "pool": (of_pool, "ValueError", "record 0 has no label", "in parse"),
    "torch spawn": (of_torch_spawn, "ValueError", "record 0 has no label", "in parse"),
    "by hand": (of_the_program, "ValueError", "record 0 has no label", "in parse"),
    "nested": (nested, "ValueError", "record 0 has no label", "in parse"),
}
