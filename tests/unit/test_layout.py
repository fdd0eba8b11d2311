"""What a user may declare, and what the families of gangs are."""

from __future__ import annotations

import itertools
import json
import pickle
import re
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticgang.errors import LayoutError
from elasticgang.layout import AXES, FAMILIES, RUNTIME_GANGS, Axes, Member, ParallelLayout, plan
from elasticgang.protocol.record import layout_from_json, layout_to_json


def test_the_default_is_one_seat_to_a_replica_group() -> None:
    layout = ParallelLayout()
    sizes = {"pp": 1, "sdp": 1, "tp": 1, "min_replicas": 1}
    assert asdict(layout) == {**sizes, "within_host": ("tp",), "views": (), "fallback": ()}
    assert layout.unit == 1
    assert layout.further_axes == ()


# LAYOUT-2
def test_the_unit_is_the_product_of_the_model_axes() -> None:
    assert ParallelLayout(pp=2, sdp=3, tp=4, min_replicas=7).unit == 24


# LAYOUT-1
def test_a_layout_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ParallelLayout().tp = 2  # type: ignore[misc]


# LAYOUT-3
@pytest.mark.parametrize("given", [("tp", "pp"), ("pp", "tp"), ["tp", "pp"]])
def test_equal_declarations_are_equal(given: Any) -> None:
    layout = ParallelLayout(pp=2, tp=2, within_host=given)
    assert layout == ParallelLayout(pp=2, tp=2, within_host=("pp", "tp"))
    assert hash(layout) == hash(ParallelLayout(pp=2, tp=2, within_host=("pp", "tp")))
    assert layout.within_host == ("pp", "tp")


@pytest.mark.parametrize("name", ["pp", "sdp", "tp", "min_replicas"])
@pytest.mark.parametrize("size", [0, -1, 1.0, "2", None, True])
def test_a_size_that_is_none_is_refused(name: str, size: Any) -> None:
    with pytest.raises(LayoutError, match=rf"`{name}` must be an integer of at least 1, but is .* instead\."):
        ParallelLayout(**{name: size})


@pytest.mark.parametrize("given", ["tp", ("rdp",), ("cp",), ("tp", "tp"), ("",), None, 3, ([],)])
def test_within_host_names_model_axes(given: Any) -> None:
    with pytest.raises(LayoutError, match="`within_host` must be a tuple of some of pp, sdp, tp, each once, but is"):
        ParallelLayout(within_host=given)


def test_a_layout_error_is_a_value_error_and_pickles() -> None:
    with pytest.raises(ValueError, match="`tp` must be") as caught:
        ParallelLayout(tp=0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is LayoutError
    assert str(again) == str(caught.value)


def test_the_families() -> None:
    assert AXES == ("pp", "rdp", "sdp", "tp")
    assert list(FAMILIES) == ["root", "dp", "rdp", "sdp", "tp", "pp", "replica"]
    assert set(itertools.chain.from_iterable(FAMILIES.values())) == set(AXES)
    assert set(FAMILIES["replica"]) == set(AXES) - {"rdp"}


# -- further axes

CP = Axes((2, 2, 2), ("tp", "cp", "outer"))
EP = Axes((4, 2), ("ep", "rest"))


def test_further_axes_are_the_names_that_views_add() -> None:
    layout = ParallelLayout(sdp=4, tp=2, views=(CP, EP))
    assert layout.further_axes == ("cp", "outer", "ep", "rest")
    assert layout == ParallelLayout(sdp=4, tp=2, views=[CP, EP])  # type: ignore[arg-type]
    assert hash(layout) == hash(ParallelLayout(sdp=4, tp=2, views=(CP, EP)))
    assert layout != ParallelLayout(sdp=4, tp=2, views=(EP, CP))


def test_a_layout_travels() -> None:
    for layout in (ParallelLayout(), ParallelLayout(sdp=4, tp=2, within_host=("tp", "sdp"), views=(CP, EP))):
        assert layout_from_json(json.loads(json.dumps(layout_to_json(layout)))) == layout
        assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize(
    ("views", "complaint"),
    [
        ((Axes((2, 2), ("cp", "outer")),), r"'views\[0\]' of shape \[2, 2\] must have the grid's 8 ranks, but has 4"),
        ((CP, Axes((4, 2), ("ep", "cp"))), r"`views` must name each dim once, but is \['cp', 'outer', 'ep', 'cp'\]"),
        ((Axes((2, 4), ("cp", "tp")),), r"'tp' must have the same groups in the base and in view 'views\[0\]'"),
        ((Axes((2, 2, 2), ("tp", "cp", "sdp")),), "'sdp' must have the same groups"),
        ((Axes((8,), ("rdp",)),), "'rdp' is taken: it names a family of gangs"),
        ((Axes((8,), ("dp",)),), "'dp' is taken"),
        ((Axes((8,), ("root",)),), "'root' is taken"),
        ((Axes((8,), ("replica",)),), "'replica' is taken"),
        ((Axes((8,), ("control",)),), "'control' is taken"),
        ((Axes((8,), ("reduce",)),), "'reduce' is taken"),
        ((Axes((8,), ("cp",), 8),), "must be a tuple of Axes without an offset"),
        (CP, "must be a tuple of Axes"),
        (("cp",), r"must be a tuple of Axes without an offset, but is \('cp',\)"),
        (None, "must be a tuple of Axes"),
        ({"cp": 2}, "must be a tuple of Axes"),
    ],
)
def test_views_factorise_a_replica_group(views: Any, complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        ParallelLayout(sdp=4, tp=2, views=views)


def test_the_groups_of_further_axes_lie_within_replica_groups() -> None:
    """As torchtitan has them: `cp` pairs adjacent ranks of `sdp`, across `tp`; `ep` goes over both."""
    layout = ParallelLayout(sdp=4, tp=2, views=(CP, EP))
    planned = plan([Member(f"m{index:02}", "A") for index in range(16)], layout)
    assert planned.groups("cp") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert planned.groups("outer")[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert planned.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert planned.groups("tp")[:2] == ((0, 1), (2, 3))
    with pytest.raises(ValueError, match="replica, cp, outer, ep, rest, but is 'xp'"):
        planned.groups("xp")


def test_groups_across_pipeline_stages_are_in_rank_order() -> None:
    """With `pp` outermost, the ranks of a replica group are not adjacent: `rdp` is between its stages."""
    layout = ParallelLayout(pp=2, tp=2, views=(Axes((4,), ("ep",)), Axes((2, 2), ("a", "pp"))))
    planned = plan([Member(f"m{index}", "A") for index in range(8)], layout)
    assert planned.groups("replica") == planned.groups("ep") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert planned.groups("a") == planned.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(1, 3)] * 3), st.integers(1, 4), st.data())
def test_a_place_along_a_further_axis_follows_from_the_model_coordinates(
    sizes: tuple[int, int, int], num_replicas: int, data: st.DataObject
) -> None:
    """LAYOUT-4: and every rank is in one group of each axis."""
    pp, sdp, tp = sizes
    unit = pp * sdp * tp
    size = data.draw(st.sampled_from([number for number in range(1, unit + 1) if unit % number == 0]))
    view = Axes((size, unit // size), ("cp", "outer"))
    layout = ParallelLayout(pp, sdp, tp, within_host=(), views=(view,))
    planned = plan([Member(f"m{index:03}", "A") for index in range(unit * num_replicas)], layout)
    ids = list(planned.ranks)
    for axis, along in (("cp", size), ("outer", unit // size)):
        groups = planned.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(planned.size))
        assert {len(group) for group in groups} == {along}
        assert list(groups) == sorted(groups)
        places: dict[tuple[int, ...], int] = {}
        for group in groups:
            at = [planned.coordinates(ids[rank]) for rank in group]
            assert list(group) == sorted(group)
            assert len({coordinates["rdp"] for coordinates in at}) == 1
            for place, coordinates in enumerate(at):
                model = tuple(coordinates[name] for name in ("pp", "sdp", "tp"))
                assert places.setdefault(model, place) == place


def test_the_runtimes_own_gangs_have_names_that_no_family_has() -> None:
    assert not set(RUNTIME_GANGS) & set(FAMILIES)


# -- the notation of the commands

SIZES = st.integers(1, 8)


@st.composite
def layouts(draw: Any) -> ParallelLayout:
    sizes = draw(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=4, unique=True))
    first, *others = (
        ParallelLayout(
            pp=pp,
            sdp=sdp,
            tp=tp,
            min_replicas=draw(SIZES),
            within_host=tuple(draw(st.sets(st.sampled_from(["pp", "sdp", "tp"])))),
        )
        for pp, sdp, tp in sizes
    )
    return replace(first, fallback=tuple(others))


# LAYOUT-6
@given(layouts())
def test_the_text_of_a_layout_is_parsed_as_that_layout(layout: ParallelLayout) -> None:
    assert ParallelLayout.parse(layout.text) == layout


# LAYOUT-6
@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("sdp=1", ParallelLayout()),
        ("sdp=2,tp=4", ParallelLayout(sdp=2, tp=4)),
        (" tp = 4 , sdp = 2 ", ParallelLayout(sdp=2, tp=4)),
        ("sdp=4/sdp=2/sdp=1", ParallelLayout(sdp=4, fallback=(ParallelLayout(sdp=2), ParallelLayout()))),
        ("pp=4,tp=2/pp=2", ParallelLayout(pp=4, tp=2, fallback=(ParallelLayout(pp=2),))),
        ("tp=2,within_host=", ParallelLayout(tp=2, within_host=())),
        ("pp=2,min_replicas=3,within_host=tp+pp", ParallelLayout(pp=2, min_replicas=3, within_host=("pp", "tp"))),
    ],
)
def test_a_layout_is_written_in_one_line(text: str, layout: ParallelLayout) -> None:
    assert ParallelLayout.parse(text) == layout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "a layout must be like sdp=2,tp=2 with the names pp, sdp, tp, min_replicas, within_host, each once"),
        ("sdp=2,", "a layout must be like"),
        ("sdp=2,sdp=2", "a layout must be like"),
        ("cp=2", "a layout must be like"),
        ("sdp=two", "`sdp` must be an integer of at least 1, but is 'two' in the layout 'sdp=two'"),
        ("sdp=-1", "`sdp` must be an integer of at least 1"),
        ("sdp=0", "`sdp` must be an integer of at least 1"),
        ("within_host=rdp", "`within_host` must be a tuple of some of"),
        ("sdp=2/sdp=2", "two layouts have the same"),
    ],
)
def test_a_text_that_is_no_layout_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(complaint)):
        ParallelLayout.parse(text)
