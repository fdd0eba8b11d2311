"""Groups of ranks along axes: the examples of the issue, the rules of the module, and every error."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticgang.errors import LayoutError
from elasticgang.layout import AXES, FAMILIES, Axes, Grid, groups_over

ABC = Axes((2, 2, 2), ("a", "b", "c"))


def by_coordinates(shape: Sequence[int], names: Sequence[str], along: Sequence[str]) -> list[list[int]]:
    """Ranks that differ only along `along`, found by comparing coordinates. `shape` is slowest-varying first."""
    buckets: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, coordinates in enumerate(itertools.product(*map(range, shape))):
        fixed = (at for name, at in zip(names, coordinates, strict=True) if name not in along)
        buckets[tuple(fixed)].append(rank)
    return list(buckets.values())


@st.composite
def axes_and_dims(draw: st.DrawFn) -> tuple[Axes, list[str]]:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    names = draw(st.permutations([f"axis{index}" for index in range(len(shape))]))
    dims = draw(st.lists(st.sampled_from(names), min_size=1, max_size=len(names), unique=True))
    return Axes(tuple(shape), tuple(names), draw(st.integers(0, 9))), dims


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("root", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("dp", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("rdp", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("sdp", ((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,))),
        ("tp", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("pp", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_the_families_of_two_by_two_by_two(family: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert groups_over((2, 2, 1, 2), FAMILIES[family]) == groups


@settings(max_examples=100, deadline=None)
@given(st.tuples(*[st.integers(1, 4)] * 4), st.lists(st.sampled_from(AXES), unique=True))
def test_a_group_differs_only_along_its_axes(shape: tuple[int, ...], along: list[str]) -> None:
    assert [list(group) for group in groups_over(shape, along)] == by_coordinates(shape, AXES, along)


def test_groups_over_needs_a_size_for_each_axis() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        groups_over((2, 2), ("tp",))


# AXES-2
@pytest.mark.parametrize("dims", [["a", "b"], ["b", "a"], ("b", "a")])
def test_the_order_of_dims_does_not_count(dims: Sequence[str]) -> None:
    assert ABC.rank_groups(dims) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_ordered_as_given_is_the_enumeration_of_hyper_comm_grid() -> None:
    assert ABC.rank_groups(["a", "b"], ordered_as_given=True) == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert ABC.rank_groups(["b", "a"], ordered_as_given=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ABC.rank_groups(["a", "c"], ordered_as_given=True) == [[0, 4, 1, 5], [2, 6, 3, 7]]


def test_one_name_is_a_list_of_one() -> None:
    assert ABC.rank_groups("a") == ABC.rank_groups(["a"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ABC.rank_groups("c") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert Axes((3,), ("long name",)).rank_groups("long name") == [[0, 1, 2]]


def test_the_offset_shifts_all() -> None:
    shifted = Axes((2, 2, 2), ("a", "b", "c"), rank_offset=8)
    assert shifted.rank_groups("c") == [[8, 12], [9, 13], [10, 14], [11, 15]]
    assert shifted.rank_groups(["a", "b"], ordered_as_given=True) == [[8, 10, 9, 11], [12, 14, 13, 15]]


# AXES-1
@settings(max_examples=100, deadline=None)
@given(axes_and_dims())
def test_groups_of_any_grid(case: tuple[Axes, list[str]]) -> None:
    axes, dims = case
    expected = by_coordinates(axes.shape[::-1], axes.dim_names[::-1], dims)
    groups = axes.rank_groups(dims)
    assert groups == [[axes.rank_offset + rank for rank in group] for group in expected]
    assert sorted(itertools.chain(*groups)) == list(range(axes.rank_offset, axes.rank_offset + axes.size))
    given_order = axes.rank_groups(dims, ordered_as_given=True)
    assert [sorted(group) for group in given_order] == groups
    sizes = [axes.shape[axes.dim_names.index(name)] for name in dims]
    strides = [axes.rank_groups(name)[0] for name in dims]
    for place, at in enumerate(itertools.product(*map(range, sizes))):  # the last of dims varies fastest
        offset = sum(stride[index] - axes.rank_offset for stride, index in zip(strides, at, strict=True))
        assert given_order[0][place] == axes.rank_offset + offset


@settings(max_examples=50, deadline=None)
@given(axes_and_dims())
def test_axes_travel(case: tuple[Axes, list[str]]) -> None:
    axes, _ = case
    assert Axes.from_json(json.loads(json.dumps(axes.to_json()))) == axes
    for key in ("shape", "dim_names", "rank_offset"):
        with pytest.raises(KeyError, match=key):
            Axes.from_json({name: value for name, value in axes.to_json().items() if name != key})


# AXES-3
def test_the_key_is_in_reversed_order_of_the_names() -> None:
    axes = Axes((2, 3, 4, 5), ("tp", "cp", "pp", "dp"))
    assert axes.key("dp") == "dp"
    assert axes.key(["cp", "dp"]) == axes.key(["dp", "cp"]) == "dp-cp"
    assert axes.key(["tp", "dp", "cp", "pp"]) == "dp-pp-cp-tp"


def test_lists_are_taken_and_kept_as_tuples() -> None:
    axes = Axes([2, 3], ["a", "b"])  # type: ignore[arg-type]
    assert axes == Axes((2, 3), ("a", "b"))
    assert axes.size == 6


@pytest.mark.parametrize(
    ("shape", "names", "offset", "complaint"),
    [
        ((2, 2), ("a",), 0, r"\[2, 2\] has 2 and \['a'\] has 1 instead"),
        ((2,), ("a", "b"), 0, r"\[2\] has 1 and \['a', 'b'\] has 2 instead"),
        ((2, 2), ("a", "a"), 0, r"`dim_names` must name each dim once, but is \['a', 'a'\]"),
        ((2, 0), ("a", "b"), 0, r"`shape` must hold integers of at least 1, but is \[2, 0\]"),
        ((2, -1), ("a", "b"), 0, r"`shape` must hold integers of at least 1, but is \[2, -1\]"),
        ((2, 1.5), ("a", "b"), 0, r"`shape` must hold integers of at least 1, but is \[2, 1.5\]"),
        ((2, True), ("a", "b"), 0, "`shape` must hold integers of at least 1"),
        ((2,), ("a",), -1, "`rank_offset` must be an integer of at least 0, but is -1"),
        ((2,), ("a",), None, "`rank_offset` must be an integer of at least 0, but is None"),
        ((2,), ("",), 0, "must not be empty"),
        ((2,), ("a-b",), 0, "must not be empty or contain"),
        ((2,), ("a/b",), 0, "must not be empty or contain"),
        ((2,), (1,), 0, r"`dim_names` must hold strings, but is \[1\] instead"),
    ],
)
def test_axes_that_are_none_are_refused(shape: Any, names: Any, offset: Any, complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        Axes(shape, names, offset)


@pytest.mark.parametrize(
    ("dims", "complaint"),
    [
        ("d", r"`dims` must be among \['a', 'b', 'c'\], but names 'd'"),
        (["a", "d"], "but names 'd'"),
        (["a", "a"], r"`dims` must name each dim once, but is \['a', 'a'\]"),
        ([], "`dims` must name at least one dim"),
        (None, r"`dims` must be one or several of .*, but is None instead"),
        (3, r"`dims` must be one or several of .*, but is 3 instead"),
        ([["tp"]], r"`dims` must be among .*, but names \['tp'\] instead"),
    ],
)
@pytest.mark.parametrize("use", [Axes.rank_groups, Axes.key])
def test_dims_that_are_none_are_refused(use: Any, dims: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        use(ABC, dims)


def test_a_grid_fits_into_the_world() -> None:
    Grid(ABC, world_size=8)
    Grid(Axes(ABC.shape, ABC.dim_names, 4), world_size=12)
    with pytest.raises(LayoutError, match=r"at rank 1 must fit .* has 8 ranks, and a world of 8 has 7 from there"):
        Grid(Axes(ABC.shape, ABC.dim_names, 1), world_size=8)
    with pytest.raises(LayoutError, match="a world of 4 has 0 from there"):
        Grid(Axes((1,), ("a",), 5), world_size=4)


@pytest.fixture
def dense() -> Grid:
    """16 ranks as tp x cp x dp x pp, with experts as a second factorisation of each pipeline stage."""
    grid = Grid(Axes((2, 2, 2, 2), ("tp", "cp", "dp", "pp"), rank_offset=16))
    grid.register_view("expert", [1, 4, 2, 2], ["expt_tp", "ep", "expt_dp", "pp"], shared_dims=["pp"])
    return grid


def test_a_view_enumerates_the_same_ranks_otherwise(dense: Grid) -> None:
    assert dense.rank_groups("ep", view="expert") == [
        [16, 17, 18, 19],
        [20, 21, 22, 23],
        [24, 25, 26, 27],
        [28, 29, 30, 31],
    ]
    assert dense.rank_groups(["pp", "ep"], view="expert", ordered_as_given=True)[0] == [
        *(16, 17, 18, 19),
        *(24, 25, 26, 27),
    ]
    assert dense.rank_groups("pp", view="expert") == dense.rank_groups("pp")
    assert dense.rank_groups(["tp", "cp"]) == dense.rank_groups("ep", view="expert")


def test_what_a_view_shares_has_the_key_of_the_base(dense: Grid) -> None:
    assert dense.key("pp", view="expert") == dense.key("pp") == "pp"
    assert dense.key(["ep", "pp"], view="expert") == "expert/pp-ep"
    assert dense.key(["pp", "tp"]) == "pp-tp"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("expert", [16], ["ep"]), "`name` must be new"),
        (("", [16], ["ep"]), "`name` must be new, not empty"),
        (("a/b", [16], ["ep"]), '`name` must be new, not empty and without "/"'),
        (("other", [8], ["ep"]), "must have the grid's 16 ranks, but has 8"),
        (("other", [4, 4], ["ep"]), "has 2 and .* has 1"),
        (("other", [4, 4], ["ep", "ep"]), "`dim_names` must name each dim once"),
        (("other", [16, 0], ["ep", "x"]), "`shape` must hold integers of at least 1"),
        (("other", [8, 2], ["ep", "pp"], ["pp", "pp"]), "`shared_dims` must name each dim once"),
        (("other", [8, 2], ["ep", "pp"], ["ep"]), r"'ep' of view 'other' must be a dim of both, .*\['tp', 'cp'"),
        (("other", [8, 2], ["ep", "pp"], ["tp"]), r"'tp' of view 'other' must be a dim of both, .*\['ep', 'pp'\]"),
        (("other", [2, 8], ["pp", "ep"], ["pp"]), r"'pp' must have the same groups .* \[\[16, 24\], .*\[16, 17\]"),
        (("other", [4, 4], ["ep", "pp"], ["pp"]), "'pp' must have the same groups"),
        (("other", [2, 2, 2, 2], ["cp", "tp", "dp", "pp"], ["pp", "cp"]), "'cp' must have the same groups"),
    ],
)
def test_views_that_are_none_are_refused_and_leave_the_grid(dense: Grid, arguments: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dense.register_view(*arguments)
    assert list(dense.views) == ["expert"]


def test_a_view_that_is_not_registered_is_named(dense: Grid) -> None:
    with pytest.raises(LayoutError, match=r"`view` must be one of \['expert'\], but is 'experts'"):
        dense.rank_groups("pp", view="experts")
    with pytest.raises(LayoutError, match="`dims` must be among"):
        dense.key("ep")


def test_dims_that_are_shared_one_by_one_are_shared_together() -> None:
    """Why no combination of shared dims needs a check of its own."""
    grid = Grid(Axes((2, 2, 3), ("a", "b", "c")))
    grid.register_view("split", (2, 2, 1, 3), ("a", "b", "x", "c"), shared_dims=("c", "a", "b"))
    for count in (1, 2, 3):
        for dims in itertools.combinations("abc", count):
            assert grid.rank_groups(dims, view="split") == grid.rank_groups(dims)
