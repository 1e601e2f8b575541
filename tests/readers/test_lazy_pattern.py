"""Regular expressions that are compiled on first use."""

from firstfault.utils.lazy_pattern import LazyPattern


def test_a_pattern_is_compiled_on_first_use() -> None:
    """A pattern is compiled by its first search, or before; then it searches as `re` does."""
    pattern = LazyPattern(
        r"""(?i)
        step [ ] (?P<step>\d+)  # of a training
        """
    )
    assert not pattern.is_compiled
    assert [found["step"] for found in pattern.finditer("step 1, STEP 22")] == ["1", "22"]
    assert pattern.is_compiled
    assert pattern.sub("#", "at step 3") == "at #"
    assert not hasattr(pattern, "split")
    early = LazyPattern("a|b")
    early.compile()
    assert early.is_compiled
    assert early.fullmatch("b") is not None
