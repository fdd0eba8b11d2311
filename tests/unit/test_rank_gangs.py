"""The gangs of one rank, and the names of their process groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import pytest
import torch

from elasticgang.gang.elastic import Binding, ElasticGang, Group
from elasticgang.layout import FAMILIES, Axes, Member, ParallelLayout, Plan, plan, text_of_ranks
from elasticgang.layout.rank_gangs import (
    CONTROL,
    REDUCE,
    REDUCE_RDP,
    group_name,
    ranks_of_gang,
    reduction_gangs,
    user_gangs,
)

LAYOUT = ParallelLayout(pp=2, sdp=2, tp=2, views=(Axes((4, 2), ("ep", "rest")), Axes((2, 2, 2), ("a", "cp", "b"))))
RUNTIME = {CONTROL: "root", REDUCE: "dp", REDUCE_RDP: "rdp"}


@pytest.fixture
def planned() -> Plan:
    return plan([Member(f"m{index:02}", "A") for index in range(24)], LAYOUT)


def test_a_sharded_layout_or_fallback_has_two_gangs_for_gradients() -> None:
    assert reduction_gangs(ParallelLayout(tp=2)) == (REDUCE,)
    assert reduction_gangs(ParallelLayout(tp=2, fallback=(ParallelLayout(sdp=2),))) == (REDUCE, REDUCE_RDP)


def test_the_gang_of_a_rank_is_the_one_with_it_among_all(planned: Plan) -> None:
    names = [*user_gangs(LAYOUT), *reduction_gangs(LAYOUT), CONTROL]
    assert set(names) >= {"root", "tp", "ep", "cp", *RUNTIME}
    for name, rank in itertools.product(names, range(planned.size)):
        groups = planned.groups(RUNTIME.get(name, name))
        assert [ranks_of_gang(planned, rank, name)] == [ranks for ranks in groups if rank in ranks]
    with pytest.raises(ValueError, match="must be one of root, dp"):
        ranks_of_gang(planned, 0, "ring")


def test_groups_of_other_ranks_have_other_names(planned: Plan) -> None:
    """They rendezvous under their names: the gradients' groups of two tp places, both "reduce", met each other's ranks,
    and one of them waited for ever."""
    families = {name: name for name in (*FAMILIES, *LAYOUT.further_axes)} | RUNTIME
    ranks_of: dict[str, tuple[int, ...]] = {}
    for name, family in families.items():
        for ranks in planned.groups(family):
            group = group_name(ranks, name)
            assert ranks_of.setdefault(group, ranks) == ranks
            assert (name in group) == (name in RUNTIME)


def test_any_two_sequences_of_ranks_have_different_texts() -> None:
    sequences = [
        order
        for num in range(6)
        for chosen in itertools.combinations(range(7), num)
        for order in (chosen, chosen[::-1])
    ]
    assert len({text_of_ranks(ranks) for ranks in sequences}) == len(set(sequences))


def test_the_text_of_many_ranks_is_short() -> None:
    assert text_of_ranks(range(100_000)) == "0..99999"
    assert text_of_ranks(list(range(3, 100_000, 8))) == "3..99995by8"
    assert text_of_ranks((1, 2, 4)) == "1-2-4"
    assert text_of_ranks((4, 5)) == "4-5"


def test_groups_of_gangs_out_of_several_gangs_of_the_same_ranks_have_different_names() -> None:
    """Two ranks of two gangs, which were each the first of its ranks and so had one name, made a gang out of each:
    both had the name "root.1.1:0-1", and no rank connected to the second one."""
    names: list[str] = []

    def make(name: str, ranks: Sequence[int]) -> Group:
        names.append(name)
        return cast(Group, object())

    root = ElasticGang("root", torch.device("cpu"))
    for _ in range(2):
        names.clear()
        root.bind(Binding(0, (0, 1, 2), cast(Group, object()), make))
        for ranks in ([0, 1, 2], [0, 1], [0, 1]):
            outer = root.create_gang(ranks)
            assert outer is not None
            inner = outer.create_gang([0, 1])
            assert inner is not None
            inner.create_gang([0, 1])
        assert len(set(names)) == len(names) == 9
