"""The next record: which members are in the next generation, in which seat, and which step is committed.

Pure: equal inputs give equal records on every host. `recovery.py` determines the committed state; `record.py` defines
the formats.

NEXT-1  A record is derived from its parent and one proposal; generations are numbered by this chain alone (RULE-2).
NEXT-2  An agent with another job, layout or protocol is refused, and so is one that the others cannot reach. A joiner
    with another number of steps, process group or model than the agents that take part is refused too; before the first
    record, or if none of them is left, the most common one applies.
NEXT-3  A draining member takes no other member's seat. While there are spares, one heals its part of the state beside
    it.
NEXT-4  The layout in force is the first of the job's layouts that the members fill, without those that drain; if they
    fill none, with those that drain. So the job goes back to an earlier layout as soon as members fill it.
NEXT-5  While ranks are being started that will fill the layout in force again, no later one is taken.
NEXT-6  If nobody holds some part of the committed state in the layout in force, the record names those that hold the
    parts of another layout, and all keep them for their peers.
NEXT-7  When the layout changes, members sit where as much as possible of the parts that they keep is in place (PLAN-8).
NEXT-8  A record names the newest checkpoint that an agent reports or its parent names, unless that is of a step later
    than the committed one.
NEXT-9  A record fits the messages that carry it. If it would not, joiners are refused, as many as are too much by the
    record's mean size of an agent, or all agents of a job that has no record.
NEXT-10  Of agents that do not reach each other, some are left out (CUT-1, CUT-2): their members are spares until they
    do. The first to stay are those that hold state or can load it, of these the ones that do not drain, and of these
    the ones with the most members.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from elasticgang.errors import LayoutError
from elasticgang.layout import Member, ModelCoordinates, ParallelLayout, Plan, is_filled, plan
from elasticgang.layout.overlap import Part
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.cut_off import find_cut_off
from elasticgang.protocol.record import (
    ACTIVE,
    MAX_RECORD_BYTES,
    PROTOCOL,
    SPARE,
    CheckpointRef,
    CutOff,
    Holder,
    Record,
    Report,
    Seat,
    Undecided,
    Unrecoverable,
)
from elasticgang.protocol.recovery import CommittedState, recover, without_witness

_MAX_PEERS = 4  # that are named


def next_record(
    record: Record | None,
    proposal: Sequence[Report],
    lost: Collection[str] = (),
    unreached: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Record | Undecided | Unrecoverable:
    """The record that follows `record` (None: the job has none yet) when the agents of `proposal` go on together.

    `proposal`: one report of each agent that is ready, at least one; each knows `record`, or is of a joiner that knows
    an ancestor of it or none (REPORT). `lost`: other agents of `record` that are not waited for.
    `unreached`: by agent, those that its host does not reach.
    """
    reports = sorted(proposal, key=lambda report: report.agent)
    undecided = _mismatched(record, reports) or without_witness(record, reports, lost) or _too_few(record, reports)
    if undecided is not None:
        return undecided
    known = {report.newest_commit for report in reports}
    state = recover(record, reports, [attempt for attempt in known if attempt is not None], lost)
    holders = state.holders(reports) if isinstance(state, CommittedState) else {}
    parts = {member: ModelCoordinates(*holder.model) for member, holder in holders.items()}
    checkpoint = state.checkpoint if isinstance(state, CommittedState) else ""
    cut_off = _cut_off(reports, unreached, parts, checkpoint)
    reaching = [report for report in reports if report.agent not in cut_off]
    waiting = _surplus_agents(record, reaching, parts)
    present = [report for report in reaching if report not in waiting]
    seatable = [Member(member.id, report.host) for report in present for member in report.members]
    number = _layout_in_force(record, present, seatable)
    if isinstance(number, Undecided):
        return number
    layouts = reports[0].layout.options
    layout = layouts[number]
    holds = state.holds(reports, number) if isinstance(state, CommittedState) else {}
    try:
        planned = plan(
            seatable,
            layout,
            record.plan if record is not None else None,
            max_replicas=_max_replicas(record, reports, layout),
            holds={member.id: holds[member.id] for member in seatable if member.id in holds},
            kept=_parts_kept(holders, holds, layouts, number) if len(layouts) > 1 else None,
        )
    except LayoutError as error:
        # CUT-2: without surplus agents, the others do not fill the layout.
        return next_record(record, proposal, lost) if cut_off else Undecided(str(error))
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
    following = Record(
        job=reports[0].job,
        generation=1 if record is None else record.generation + 1,  # NEXT-1
        parent="" if record is None else record.digest,
        layout=layout,
        plan=planned,
        seats=seats,
        agents=tuple(report.agent for report in reports),
        committed=state.committed,
        rolled_forward=state.rolled_forward,
        rolled_back=state.rolled_back,
        checkpoint=state.checkpoint,
        saved=_saved(record, reports, state.committed),
        ancestors=() if record is None else record.ancestor_digests(),
        dead_agents=() if record is None else tuple(agent for agent in record.agents if agent in lost),
        addresses=tuple(report.address for report in reports),
        draining_members=_draining_members(reports),
        layouts=layouts,
        holders=_kept(holders, planned, statuses, number) if len(layouts) > 1 else (),
        cut_off=tuple(CutOff(agent, peers[:_MAX_PEERS]) for agent, peers in cut_off.items()),
    )
    return _too_large(record, following) or following


def _too_large(record: Record | None, following: Record) -> Undecided | None:
    """NEXT-9."""
    size, num_agents = following.form.num_sent_bytes, len(following.agents)
    if size <= MAX_RECORD_BYTES:
        return None
    why = (
        f"the record of {num_agents} agents and {len(following.seats)} ranks would have {size} bytes, over the limit "
        f"of {MAX_RECORD_BYTES} for a message: run fewer hosts or ranks, with shorter host names or fewer "
        "--heal-interfaces"
    )
    if record is None:
        return _refuse(tuple((agent, why) for agent in following.agents))
    joining = [agent for agent in following.agents if not record.has_agent(agent)]
    num_refused = math.ceil((size - MAX_RECORD_BYTES) * num_agents / size)
    return _refuse(tuple((agent, why) for agent in joining[-num_refused:])) if joining else Undecided(why)


def _saved(record: Record | None, reports: Sequence[Report], committed: Attempt) -> CheckpointRef | None:
    """NEXT-8."""
    named = [*(report.checkpoint for report in reports), None if record is None else record.saved]
    return max((each for each in named if each is not None and each.attempt <= committed), default=None)


def _parts_kept(
    holders: Mapping[str, Holder],
    holds: Mapping[str, ModelCoordinates],
    layouts: Sequence[ParallelLayout],
    in_force: int,
) -> dict[str, Part]:
    """NEXT-7. What a member holds of the layout in force counts, not what it keeps aside."""
    kept = {member: Part.of(layouts[holder.layout], holder.model) for member, holder in holders.items()}
    return kept | {member: Part.of(layouts[in_force], model) for member, model in holds.items()}


def _kept(
    holders: Mapping[str, Holder], planned: Plan, statuses: Mapping[str, str], in_force: int
) -> tuple[Holder, ...]:
    """NEXT-6. An active member serves its part of the layout in force, and keeps nothing of that layout aside."""
    active = {member for member, status in statuses.items() if status == ACTIVE}
    if len({planned.part_of(member) for member in active}) == planned.size // planned.shape[1]:
        return ()
    return tuple(holder for holder in holders.values() if holder.layout != in_force or holder.member not in active)


def _layout_in_force(record: Record | None, reports: Sequence[Report], seatable: Sequence[Member]) -> int | Undecided:
    """The number of the layout to take, of those that the job declares (NEXT-4); the first if none is filled."""
    options = reports[0].layout.options if reports else ()
    if len(options) < 2:
        return 0
    draining = set(_draining_members(reports))
    everybody = Counter(member.host for member in seatable)
    staying = Counter(member.host for member in seatable if member.id not in draining)
    starting = Counter({report.host: 0 for report in reports})
    for report in reports:
        starting[report.host] += report.num_starting
    present = 0 if record is None else record.in_force
    for number, layout in enumerate(options):
        if is_filled(layout, staying):
            return number
        if number == present and is_filled(layout, staying + starting):  # NEXT-5
            if is_filled(layout, everybody):
                return number
            return Undecided(f"{starting.total()} ranks are being started, which the layout ({layout.sizes}) waits for")
    return next((number for number, layout in enumerate(options) if is_filled(layout, everybody)), 0)


def _draining_members(reports: Sequence[Report]) -> tuple[str, ...]:
    return tuple(member.id for report in reports for member in report.members if member.draining)


def _max_replicas(record: Record | None, reports: Sequence[Report], layout: ParallelLayout) -> int:
    """As many replica groups as the agents request seats for, and no fewer than before, so that spares replace a lost
    host. Groups with a draining member do not count (NEXT-3). Groups of another layout do not either."""
    asked = sum(len(report.members) if report.num_seats is None else report.num_seats for report in reports)
    if record is None or record.layout != layout:
        return asked // layout.unit
    were = record.plan.shape[1] - record.groups_of(record.draining_members)
    return max(asked // layout.unit, were) + record.groups_of(_draining_members(reports))


def _mismatched(record: Record | None, reports: Sequence[Report]) -> Undecided | None:
    """NEXT-2: the record's values apply, and before the first record the most common ones."""
    wanted: dict[str, object] = {"protocol": PROTOCOL}
    wanted["job"] = record.job if record is not None else _most_common(report.job for report in reports)
    wanted["layout"] = record.declared if record is not None else _most_common(report.layout for report in reports)
    refused = tuple((report.agent, why) for report in reports for why in _differences(report, wanted))
    refused = refused or _unlike(record, reports) or _unreachable(record, reports)
    return _refuse(refused) if refused else None


def mismatch(record: Record, report: Report) -> str | None:
    """What about `report` is not as the job is; None when it fits."""
    return next(_differences(report, {"protocol": PROTOCOL, "job": record.job, "layout": record.declared}), None)


def _differences(report: Report, wanted: Mapping[str, object]) -> Iterator[str]:
    for what, right in wanted.items():
        if getattr(report, what) != right:
            yield f"its {what} is {getattr(report, what)!r}, but the job's is {right!r}"


def _unlike(record: Record | None, reports: Sequence[Report]) -> tuple[tuple[str, str], ...]:
    """Refuse joiners with other settings than the job's."""
    members = set() if record is None else set(record.agents)
    joining = [report for report in reports if report.agent not in members]
    if not joining:
        return ()
    present = [report for report in reports if report.agent in members]
    settings = [dict(report.settings) for report in present or reports]
    refused = []
    for name in sorted({name for report in joining for name, _ in report.settings}):
        given = [of_report[name] for of_report in settings if name in of_report]
        right = _most_common(given) if given else None
        for report in joining:
            own = dict(report.settings).get(name, right)
            if own != right and right is not None:
                refused.append((report.agent, f"its {name} is {own!r}, but the job's is {right!r}"))
    return tuple(refused)


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


def _cut_off(
    reports: Sequence[Report],
    unreached: Mapping[str, Collection[str]],
    holds: Mapping[str, ModelCoordinates],
    checkpoint: str,
) -> dict[str, tuple[str, ...]]:
    """NEXT-10. `holds`: by member, a part of the state. `checkpoint`: as in `Record`; who can load it holds it."""
    if not unreached:
        return {}
    told = {report.agent: report for report in reports}
    parts: dict[str, set[Hashable]] = {}
    for agent, report in told.items():
        parts[agent] = {holds[member.id] for member in report.members if member.id in holds}
        if checkpoint and report.checkpoint is not None and report.checkpoint.digest == checkpoint:
            parts[agent].add(checkpoint)

    def begin() -> Callable[[str], bool]:
        num_holders = Counter(itertools.chain.from_iterable(parts.values()))
        on_host: Counter[str] = Counter()
        for report in reports:
            on_host[report.host] += len(report.members)

        def leave_out(agent: str) -> bool:
            report, own = told[agent], parts[agent]
            on_host[report.host] -= len(report.members)
            is_filled_yet = any(is_filled(layout, on_host) for layout in report.layout.options)
            if not is_filled_yet or any(num_holders[part] == 1 for part in own):
                on_host[report.host] += len(report.members)
                return False
            num_holders.subtract(own)
            return True

        return leave_out

    def turn(agent: str) -> tuple[bool, bool, int, str]:
        members = told[agent].members
        return not parts[agent], all(member.draining for member in members), -len(members), agent

    in_turn = sorted(told, key=turn)
    return find_cut_off(unreached, in_turn, begin)


def _refuse(agents: tuple[tuple[str, str], ...]) -> Undecided:
    return Undecided("refused " + "; ".join(f"{agent}: {why}" for agent, why in agents), agents)


def infeasible(layout: ParallelLayout, num_ranks: int) -> str | None:
    """Why `num_ranks` ranks can never fill `layout`, or one of its fallback; None when they can."""
    least = min(layout.options, key=lambda option: option.num_needed)
    if num_ranks >= least.num_needed:
        return None
    return (
        f"the layout needs {least.num_needed} ranks (min_replicas {least.min_replicas} x pp {least.pp} "
        f"x sdp {least.sdp} x tp {least.tp}), but the job has {num_ranks}"
    )
