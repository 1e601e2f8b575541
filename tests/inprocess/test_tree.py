"""Tree replaces, backfills and shifts ranks by the topology of the job, and removes groups that are too small."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from firstfault_torch.inprocess.rank_assignment import (
    Layer,
    LayerFlag,
    RankAssignmentCtx,
    RankDiscarded,
    Tree,
)
from firstfault_torch.inprocess.state import Mode, State
from tests.inprocess.worlds import Exchanges, World

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL
BOTH = RESERVE | BACKFILL


def host(size: int) -> Callable[[State], str]:
    """Return the key of a host with this many ranks."""
    return lambda state: f"host {(state.rank or 0) // size}"


def two_layers(
    root: LayerFlag | None, hosts: LayerFlag | None, *, min_ranks: int = 1, max_ranks: int | None = None
) -> Callable[[], Tree]:
    """Return the tree of a job with hosts of four ranks."""
    layers = [Layer(key_or_fn="job", flag=root), Layer(min_ranks, max_ranks, host(4), hosts)]
    return lambda: Tree(layers)


# --- examples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "hosts", "expected"),
    [
        (None, None, [0, None, 1, 2, 3, 4, 5, 6]),
        (None, BACKFILL, [0, None, 2, 1, 3, 4, 5, 6]),
        (BACKFILL, BACKFILL, [0, None, 2, 3, 4, 5, 6, 1]),
        (BACKFILL, None, [0, None, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_backfill(root: LayerFlag | None, hosts: LayerFlag | None, expected: list[int | None]) -> None:
    """The highest rank of the outermost group that all layers allow takes the place of the terminated one."""
    world = World(8, two_layers(root, hosts))
    world.assign()
    assert world.active_ranks() == list(range(8))
    world.assign({1})
    assert world.active_ranks() == expected
    world.check()


def test_backfill_keeps_the_order() -> None:
    """The ranks that move fill the places in ascending order."""
    world = World(8, two_layers(BACKFILL, BACKFILL))
    world.assign()
    world.assign({2, 3})
    assert world.active_ranks() == [0, 1, None, None, 4, 5, 2, 3]


def test_reserve() -> None:
    """A reserve of the same host comes first, then one of another host, and then the ranks shift."""
    world = World(8, two_layers(RESERVE, RESERVE, max_ranks=3))
    world.assign()
    assert world.active_ranks() == [0, 1, 2, None, 3, 4, 5, None]
    world.assign({1})
    assert world.active_ranks() == [0, None, 2, 1, 3, 4, 5, None]
    world.assign({1})  # initial rank 2
    assert world.active_ranks() == [0, None, None, 1, 3, 4, 5, 2]
    world.assign({0})
    assert world.active_ranks() == [None, None, None, 0, 2, 3, 4, 1]
    world.check()


def test_reserve_of_the_same_host_only() -> None:
    """Without the flag on the root, a reserve of another host stays one."""
    world = World(8, two_layers(None, RESERVE, max_ranks=3))
    world.assign()
    world.assign({0, 1})
    assert world.active_ranks() == [None, None, 1, 0, 2, 3, 4, None]
    world.check()


def test_a_reserve_may_be_terminated() -> None:
    """If a reserve is terminated, the active ranks stay as they are."""
    world = World(8, two_layers(RESERVE, RESERVE, max_ranks=3))
    world.assign()
    world.assign({3})
    assert world.active_ranks() == [0, 1, 2, None, 3, 4, 5, None]
    assert world.states[4].rank == 3
    world.check()


def test_small_groups_leave() -> None:
    """All ranks of a host with too few healthy ones leave, and the message says why."""
    world = World(8, two_layers(None, None, min_ranks=3))
    world.assign()
    world.assign({0, 2})
    assert world.active_ranks() == [None, None, None, None, 0, 1, 2, 3]
    reason = "group 'host 0' has only 2 healthy ranks, at least 3 are needed"
    assert world.discarded == {
        0: "rank 0 is terminated",
        1: f"rank 1 is removed: {reason}",
        2: "rank 2 is terminated",
        3: f"rank 3 is removed: {reason}",
    }


def test_small_groups_make_the_job_too_small() -> None:
    """A host that leaves counts for the root's limit."""
    layers = [Layer(min_ranks=5), Layer(min_ranks=4, key_or_fn=host(4))]
    world = World(8, lambda: Tree(layers))
    world.assign()
    assert world.assign({7}) == {}
    assert world.discarded[0] == "rank 0 is removed: group '' has only 4 healthy ranks, at least 5 are needed"
    assert world.discarded[4] == "rank 4 is removed: group 'host 1' has only 3 healthy ranks, at least 4 are needed"


def test_all_steps_together() -> None:
    """Reserves of other hosts replace a lost host, even above their max_ranks; the highest rank takes what is left."""
    world = World(12, two_layers(BOTH, BOTH, min_ranks=2, max_ranks=3))
    world.assign()
    world.assign({0, 1, 2})
    assert world.active_ranks() == [None, None, None, None, 3, 4, 5, 1, 6, 7, 2, 0]


def test_world_size_filter() -> None:
    """Ranks that the function does not need become reserves, and replace others later."""
    world = World(8, lambda: Tree([Layer(flag=RESERVE)], lambda size: size // 3 * 3))
    world.assign()
    assert world.active_ranks() == [0, 1, 2, 3, 4, 5, None, None]
    world.assign({0})
    assert world.active_ranks() == [None, 1, 2, 3, 4, 5, None, 0]
    world.assign({0, 1, 2})
    assert world.active_ranks() == [None, None, None, None, 2, None, 1, 0]
    world.check()


def test_the_state_is_kept() -> None:
    """Iteration and exception stay, and the input is not changed."""
    tree = Tree([Layer()])
    state = State(0, 1, iteration=3, fn_exception=ValueError())
    terminated: set[int] = set()
    result = tree(RankAssignmentCtx(state, Exchanges(), terminated)).state
    assert (result.iteration, result.fn_exception, result.mode) == (3, state.fn_exception, Mode.ACTIVE)
    assert state.mode is Mode.INITIALIZED


def test_a_new_call_builds_a_new_tree() -> None:
    """When the wrapped function is called again, the ranks that are left are a whole world."""
    world = World(3, lambda: Tree([Layer()]))
    world.assign()
    world.assign({1})
    left = iter([world.assignments[0], world.assignments[2]])
    again = World(2, lambda: next(left))
    again.assign()
    assert again.active_ranks() == [0, 1]
    again.check()


# --- refusals -------------------------------------------------------------------------------------------------------


def test_limits_of_layers() -> None:
    """An error names the limit that is out of range, also if it was set later."""
    with pytest.raises(ValueError, match="min_ranks is -1; it must be at least 0"):
        Layer(min_ranks=-1)
    with pytest.raises(ValueError, match="max_ranks is 0; it must be at least 1"):
        Layer(max_ranks=0)
    layer = Layer()
    layer.max_ranks = -3
    with pytest.raises(ValueError, match="max_ranks is -3"):
        Tree([layer])
    with pytest.raises(ValueError, match="at least one layer"):
        Tree([])


def test_different_roots() -> None:
    """All ranks need the same key in the first layer."""
    world = World(8, lambda: Tree([Layer(key_or_fn=lambda state: str(state.rank))]))
    with pytest.raises(RuntimeError, match=r"same key in the first layer, but there are 8: '0', '1', '2', \.\.\."):
        world.assign()


def test_different_numbers_of_layers() -> None:
    """All ranks need the same number of layers."""
    layers = itertools.cycle([1, 2])
    world = World(3, lambda: Tree([Layer()] * next(layers)))
    with pytest.raises(RuntimeError, match="must have as many layers as rank 2, but these have not: 1"):
        world.assign()


def test_ranks_that_do_not_follow_the_topology() -> None:
    """The ranks of a group get successive numbers, and a warning names the first that changes."""
    layers = [Layer(), Layer(key_or_fn=lambda state: "odd" if (state.rank or 0) % 2 else "even")]
    world = World(4, lambda: Tree(layers))
    with pytest.warns(UserWarning, match="do not follow the topology: rank 2 gets the number 1"):
        world.assign()
    assert world.active_ranks() == [0, 2, 1, 3]
    world.check()


@pytest.mark.parametrize("returned", [-1, 3])
def test_world_size_filter_out_of_range(returned: int) -> None:
    """The filter cannot ask for more ranks than there are."""
    world = World(2, lambda: Tree([Layer()], lambda _: returned))
    with pytest.raises(ValueError, match=f"world_size_filter returned {returned} for 2 active ranks; .* 0 to 2"):
        world.assign()


# --- many trees -----------------------------------------------------------------------------------------------------


class RandomTree:
    """A random topology, the limits of its layers, and a job on it."""

    def __init__(self, seed: int) -> None:
        numbers = random.Random(seed)
        self.size = numbers.randint(1, 24)
        counts = [1, *(numbers.randint(1, 4) for _ in range(numbers.randint(0, 2)))]
        # groups within groups, and each a block of successive ranks
        self.keys = [[str(rank * count // self.size) for count in counts] for rank in range(self.size)]
        self.layers = [
            Layer(
                min_ranks=numbers.randint(0, 3),
                max_ranks=numbers.choice([None, numbers.randint(1, self.size)]),
                key_or_fn=lambda state, depth=depth: self.keys[state.initial_rank or 0][depth],
                flag=numbers.choice([None, RESERVE, BACKFILL, BOTH]),
            )
            for depth in range(len(counts))
        ]
        wanted = numbers.choice([None, lambda size: size // 2 * 2])
        self.world = World(self.size, lambda: Tree(self.layers, wanted))
        self.numbers = numbers

    def groups(self, initial_ranks: Collection[int]) -> dict[tuple[str, ...], int]:
        """Count the given ranks in each group."""
        counts: dict[tuple[str, ...], int] = {}
        for rank in initial_ranks:
            for depth in range(len(self.layers)):
                path = tuple(self.keys[rank][: depth + 1])
                counts[path] = counts.get(path, 0) + 1
        return counts


@pytest.mark.parametrize("seed", range(120))
def test_random_trees(seed: int) -> None:
    """All ranks agree; no group is smaller than min_ranks; at first none has more active ranks than max_ranks."""
    tree = RandomTree(seed)
    terminated: set[int] = set()
    for iteration in range(4):
        before = tree.world.states
        states = tree.world.assign(terminated)
        tree.world.check()
        for path, count in tree.groups(states).items():
            # at the first call a world that is too small leaves as well
            assert count >= tree.layers[len(path) - 1].min_ranks
        if iteration == 0:
            active = [initial for initial, state in states.items() if state.mode is Mode.ACTIVE]
            for path, count in tree.groups(active).items():
                assert count <= (tree.layers[len(path) - 1].max_ranks or tree.size)
        # who was neither terminated nor in a small group stays
        left = {initial for initial, state in before.items() if state.rank not in terminated}
        assert left - set(states) == {initial for initial in tree.world.discarded if initial in left}
        if not states:
            break
        terminated = set(tree.numbers.sample(range(len(states)), tree.numbers.randint(0, min(4, len(states)))))


@pytest.mark.parametrize("flag", [RESERVE, BACKFILL, BOTH, None])
def test_large_tree(flag: LayerFlag | None) -> None:
    """A process of 10,000 builds its tree and replaces 1,000 ranks within seconds."""
    size = 10_240
    texts = {number: json.dumps(["job", f"rack {number // 64}", f"host {number // 8}"]) for number in range(size)}
    store = Mock(exchange=Mock(return_value=texts))

    layers = [
        Layer(key_or_fn="job", flag=flag),
        Layer(32, 60, lambda _: "rack 0", flag),
        Layer(2, 7, lambda _: "host 0", flag),
    ]
    tree, numbers = Tree(layers), random.Random(1)
    start = time.process_time()
    ctx = tree(RankAssignmentCtx(State(0, size), store, set()))
    ctx.terminated_ranks = set(numbers.sample(range(1, size), 1_000))
    try:
        ctx = tree(ctx)
    except RankDiscarded:
        pytest.fail("rank 0 left")
    assert ctx.state.world_size <= size - 1_000
    assert time.process_time() - start < 5
