"""The next record: which members are in the next generation, in which seat, and which step is committed.

Pure: equal inputs give equal records on every host. `recovery.py` determines the committed state; `record.py` defines
the formats.

NEXT-1  A record is derived from its parent and one proposal; generations are numbered by this chain alone (RULE-2).
NEXT-2  An agent with another job, layout or protocol is refused, and so is one that the others cannot reach.
NEXT-3  A draining member takes no other member's seat. While there are spares, one heals its part of the state beside
    it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from elasticgang.errors import LayoutError
from elasticgang.layout import Member, ModelCoordinates, ParallelLayout, plan
from elasticgang.protocol.record import (
    PROTOCOL,
    SPARE,
    Record,
    Report,
    Seat,
    Undecided,
    Unrecoverable,
)
from elasticgang.protocol.recovery import CommittedState, recover, without_witness


def next_record(
    record: Record | None, proposal: Sequence[Report], lost: Collection[str] = ()
) -> Record | Undecided | Unrecoverable:
    """The record that follows `record` (None: the job has none yet) when the agents of `proposal` go on together.

    `proposal`: one report of each agent that is ready, at least one; each knows `record`, or is of a joiner that knows
    an ancestor of it or none (REPORT). `lost`: other agents of `record` that are not waited for.
    """
    reports = sorted(proposal, key=lambda report: report.agent)
    undecided = _mismatched(record, reports) or without_witness(record, reports, lost) or _too_few(record, reports)
    if undecided is not None:
        return undecided
    known = {report.newest_commit for report in reports}
    state = recover(record, reports, [attempt for attempt in known if attempt is not None], lost)
    holds = state.holds(reports) if isinstance(state, CommittedState) else {}
    waiting = _surplus_agents(record, reports, holds)
    seatable = [
        Member(member.id, report.host) for report in reports for member in report.members if report not in waiting
    ]
    try:
        planned = plan(
            seatable,
            reports[0].layout,
            record.plan if record is not None else None,
            max_replicas=_max_replicas(record, reports),
            holds={member.id: holds[member.id] for member in seatable if member.id in holds},
        )
    except LayoutError as error:
        return Undecided(str(error))
    if not isinstance(state, CommittedState):
        return state
    statuses = state.statuses(planned, holds)
    seats = tuple(
        [
            Seat(
                member.id,
                report.agent,
                report.host,
                member.local_rank,
                member.address,
                statuses.get(member.id, SPARE),
            )
            for report in reports
            for member in report.members
        ]
    )
    return Record(
        job=reports[0].job,
        generation=1 if record is None else record.generation + 1,  # NEXT-1
        parent="" if record is None else record.digest,
        layout=reports[0].layout,
        plan=planned,
        seats=seats,
        agents=tuple(report.agent for report in reports),
        committed=state.committed,
        rolled_forward=state.rolled_forward,
        rolled_back=state.rolled_back,
        checkpoint=state.checkpoint,
        ancestors=() if record is None else record.ancestor_digests(),
        dead_agents=() if record is None else tuple(agent for agent in record.agents if agent in lost),
        addresses=tuple(report.address for report in reports),
        draining_members=_draining_members(reports),
    )


def _draining_members(reports: Sequence[Report]) -> tuple[str, ...]:
    return tuple(member.id for report in reports for member in report.members if member.draining)


def _max_replicas(record: Record | None, reports: Sequence[Report]) -> int:
    """As many replica groups as the agents request seats for, and no fewer than before, so that spares replace a lost
    host. Groups with a draining member do not count (NEXT-3)."""
    asked = sum(len(report.members) if report.num_seats is None else report.num_seats for report in reports)
    if record is None:
        return asked // reports[0].layout.unit
    were = record.plan.shape[1] - record.groups_of(record.draining_members)
    return max(asked // reports[0].layout.unit, were) + record.groups_of(_draining_members(reports))


def _mismatched(record: Record | None, reports: Sequence[Report]) -> Undecided | None:
    """NEXT-2: the record's values apply, and before the first record the most common ones."""
    wanted: dict[str, object] = {"protocol": PROTOCOL}
    wanted["job"] = record.job if record is not None else _most_common(report.job for report in reports)
    wanted["layout"] = record.layout if record is not None else _most_common(report.layout for report in reports)
    refused = tuple((report.agent, why) for report in reports for why in _differences(report, wanted))
    refused = refused or _unreachable(record, reports)
    return _refuse(refused) if refused else None


def mismatch(record: Record, report: Report) -> str | None:
    """What about `report` is not as the job is; None when it fits."""
    return next(_differences(report, {"protocol": PROTOCOL, "job": record.job, "layout": record.layout}), None)


def _differences(report: Report, wanted: Mapping[str, object]) -> Iterator[str]:
    for what, right in wanted.items():
        if getattr(report, what) != right:
            yield f"its {what} is {getattr(report, what)!r}, but the job's is {right!r}"


def _unreachable(record: Record | None, reports: Sequence[Report]) -> tuple[tuple[str, str], ...]:
    """Refuse either the agents with a loopback address or those of other machines, which cannot reach them. The agents
    that take part already stay; in a new job those with a reachable address do."""
    local = {report.agent for report in reports if report.host.startswith("127.") or report.host == "::1"}
    if not local or len(local) == len(reports):
        return ()
    members = set() if record is None else set(record.agents)
    if members & local:
        why = "the job's agents are known by a loopback address: give them the coordinator's address as others see it"
        return tuple((report.agent, why) for report in reports if report.agent not in local | members)
    why = "it is known by a loopback address, where other machines do not reach it: its --coordinator must be as theirs"
    return tuple((report.agent, why) for report in reports if report.agent in local)


def _most_common(values: Iterable[Hashable]) -> Any:
    return min(Counter(values).items(), key=lambda item: (-item[1], repr(item[0])))[0]


def _too_few(record: Record | None, reports: Sequence[Report]) -> Undecided | None:
    """The first generation waits for `min_agents`; later ones go on with the present agents. If `max_agents` are
    present, their ranks must fill the layout."""
    if record is not None:
        return None
    needed = max(report.min_agents for report in reports)
    if len(reports) < needed:
        return Undecided(f"{len(reports)} of at least {needed} agents are here")
    most = max(report.max_agents for report in reports)
    counts = [report.num_ranks for report in reports]
    lack = infeasible(reports[0].layout, sum(counts)) if 0 < most <= len(reports) and all(counts) else None
    if lack is None:
        return None
    why = f"{lack}, {' + '.join(map(str, counts))} on its {len(counts)} hosts"
    return _refuse(tuple((report.agent, why) for report in reports))


def _surplus_agents(
    record: Record | None, reports: Sequence[Report], holds: Mapping[str, ModelCoordinates]
) -> list[Report]:
    """Agents beyond `max_agents`, whose members wait as spares. Agents with seats keep them; the only holder of a part
    of the state is never surplus; agents whose members all drain do not count (NEXT-3)."""
    most = max(report.max_agents for report in reports)
    if not most:
        return []
    most += sum(bool(report.members) and all(member.draining for member in report.members) for report in reports)
    seated = set() if record is None else {seat.agent for seat in record.seats if seat.status != SPARE}
    in_turn = sorted(reports, key=lambda report: (not report.members, report.agent not in seated, report.agent))
    held = {holds.get(member.id) for report in in_turn[:most] for member in report.members}
    waiting = []
    for report in in_turn[most:]:
        own = {holds[member.id] for member in report.members if member.id in holds}
        if own <= held:
            waiting.append(report)
        held |= own
    return waiting


def _refuse(agents: tuple[tuple[str, str], ...]) -> Undecided:
    return Undecided("refused " + "; ".join(f"{agent}: {why}" for agent, why in agents), agents)


def infeasible(layout: ParallelLayout, num_ranks: int) -> str | None:
    """Why `num_ranks` ranks can never fill `layout`; None when they can."""
    needed = layout.unit * layout.min_replicas
    if num_ranks >= needed:
        return None
    return (
        f"the layout needs {needed} ranks (min_replicas {layout.min_replicas} x pp {layout.pp} x sdp {layout.sdp} "
        f"x tp {layout.tp}), but the job has {num_ranks}"
    )
