"""By which ranks the sums of a generation go."""

from __future__ import annotations

import random
from collections.abc import Sequence

from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol import sum_route
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import ACTIVE, SPARE, Record, Seat

CHANCE = random.Random(5)


def record_of(agents: Sequence[str], hosts: Sequence[str] = (), layout: ParallelLayout | None = None) -> Record:
    """`agents`: of each member. `hosts`: likewise; by default one for each agent."""
    layout = layout or ParallelLayout()
    hosts = hosts or agents
    members = [f"{agent}/{number}" for number, agent in enumerate(agents)]
    planned = plan([Member(member, host) for member, host in zip(members, hosts, strict=True)], layout)
    seats = [
        Seat(member, agent, host, number, "", ACTIVE if member in planned.ranks else SPARE)
        for number, (member, agent, host) in enumerate(zip(members, agents, hosts, strict=True))
    ]
    names = tuple(dict.fromkeys(agents))
    ordered = tuple(seat for name in names for seat in seats if seat.agent == name)
    return Record("job", 1, "", layout, planned, ordered, names, Attempt(0, 1))


def records() -> list[Record]:
    agents = [CHANCE.choices("abcde", k=CHANCE.randint(1, 20)) for _ in range(50)]
    return [record_of(each) for each in agents]


# ROUTE-1
def test_the_numbers_of_every_rank_are_in_the_sum_once() -> None:
    for record in records():
        size = record.plan.size
        routes = [sum_route.sum_route(record, rank) for rank in range(size)]
        exchanged = [rank for first in routes[0].firsts for rank in routes[first].local]
        assert sorted(exchanged) == list(range(size))
        assert all(route.firsts == routes[0].firsts for route in routes)
        assert all(
            rank in route.local and route.local == routes[route.local[0]].local for rank, route in enumerate(routes)
        )


# ROUTE-1
def test_a_rank_beyond_the_first_of_its_agent_sends_nothing() -> None:
    record = record_of(["a"] * 8 + ["b"] * 8 + ["c"] * 8 + ["d"] * 8)
    routes = [sum_route.sum_route(record, rank) for rank in range(32)]
    assert len(routes[0].firsts) == 4
    assert {len(route.local) for route in routes} == {8}
    assert sum_route.sum_route(record_of(["a"] * 32), 0).firsts == (0,)


# ROUTE-2
def test_two_agents_of_one_host_share_no_memory() -> None:
    """The host of a seat is a name: two containers of one machine, or two machines, may have the same."""
    record = record_of(["a", "a", "b", "b"], ["host"] * 4)
    routes = {member: sum_route.sum_route(record, rank) for member, rank in record.plan.ranks.items()}
    assert {len(route.local) for route in routes.values()} == {2}
    for member, rank in record.plan.ranks.items():
        mates = [other for other, at in record.plan.ranks.items() if at in routes[member].local]
        assert {other.partition("/")[0] for other in mates} == {member.partition("/")[0]}
        assert rank in routes[member].local


# ROUTE-2
def test_an_agent_and_its_ranks_agree_on_who_shares_memory() -> None:
    """The agent knows its own seats alone."""
    pairs = [
        record_of(CHANCE.choices("abc", k=CHANCE.randint(2, 9)), layout=ParallelLayout(tp=2, within_host=()))
        for _ in range(50)
    ]
    assert any(record.plan.spares for record in pairs)
    for record in [*records(), *pairs]:
        for agent in record.agents:
            shared = sum_route.sharing_members(record.seats_of(agent))
            ranks = tuple(sorted(record.plan.ranks[member] for member in shared))
            own = [record.plan.ranks[seat.member] for seat in record.seats_of(agent) if seat.status != SPARE]
            for rank in own:
                route = sum_route.sum_route(record, rank)
                assert route.has_block == bool(shared)
                assert not shared or route.local == ranks
