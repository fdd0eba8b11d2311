"""What coordinators and agents promise each other, and the job: checked where they act.

LOST-1   An agent that a coordinator declares lost is dead, or its lease is over and its ranks have ended; or it has
         promised a higher term, and has a lease of another coordinator.
LOST-2   It was silent for `lost_after_s` of the time during which the coordinator ran.
OFFICE-1 A coordinator that decides holds its directory, founded the job, or was promised its term by every agent of the
         record, except those that were absent when the operator gave the word, and have not come since.
PRESENT-1 A record leaves out no agent of the record before, unless it says that the agent is lost.
REPORT-1 Every agent of a record has a session with the coordinator that decides it, and has promised its term.
ACCEPT-1 A joiner is sent a record without a directory only after an agent of the record before has accepted it, or when
         the ranks of all of these are dead, or when the operator's word is that all of these have exited.
FOUNDER  The operator founds a job without a directory anew only when no living host knows a record of it.
WORD-1   The operator grants an office only when no other coordinator lives, this one runs, whoever is absent is dead or
         fenced, and no living agent, and no state directory, knows a newer record.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from elasticgang.layout import is_filled
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.coordinator_messages import Decision, Push
from elasticgang.protocol.record import SPARE, Record, Report
from elasticgang.simulation.generation import Part, SimulatedGeneration
from elasticgang.simulation.held_runs import NUM_RUNS
from elasticgang.simulation.invariants import Model, Violation

if TYPE_CHECKING:
    from elasticgang.protocol.coordinator_state import CoordinatorState
    from elasticgang.simulation.cluster import Cluster
    from elasticgang.simulation.coordinator_process import CoordinatorProcess, SimulatedSession
    from elasticgang.simulation.host import Host


def may_found(cluster: Cluster, coordinator: CoordinatorProcess) -> bool:
    """FOUNDER"""
    if len(cluster.living()) > 1 or cluster.disk is not None:
        return False
    for host in cluster.hosts.values():
        pushes = () if host.connection is None else host.connection.to_agent
        if host.alive and (host.known_decision is not None or any(isinstance(m, Push) for m in pushes)):
            return False
    return True


def may_grant(cluster: Cluster, coordinator: CoordinatorProcess) -> bool:
    """WORD-1"""
    state = coordinator.state
    if (
        (state.in_office and not state.next_decision.awaits_word)
        or state.newest.decision is None
        or len(cluster.living()) > 1
    ):
        return False
    if coordinator.is_stopped:  # it reads the word only once it goes on
        return False
    kept = None if cluster.disk is None else cluster.disk.decision
    if kept is not None and _is_newer(kept, state.newest.decision):
        return False
    present = {session.host.name for number, session in coordinator.sessions.items() if number in state.sessions.begun}
    for host in cluster.hosts.values():
        if not host.alive or host.name in present:
            continue
        known = host.known_decision
        if known is not None and _is_newer(known, state.newest.decision):
            return False
        is_held = host.is_fenced or (host.session.is_ended and host.is_inert)
        if host.id in state.newest.decision.record.agents and not is_held:
            return False
    return True


def _is_newer(decision: Decision, than: Decision) -> bool:
    return decision.record.digest != than.record.digest and decision.ref.order > than.ref.order


def check_lost(cluster: Cluster, coordinator: CoordinatorProcess, lost: Collection[str], *, silent: bool) -> None:
    """`silent`: for no other reason."""
    for name in lost:
        silent_s = coordinator.silent_s(cluster, name)
        if silent and silent_s < coordinator.state.timeouts.lost_after_s:
            raise Violation(f"LOST-2: {coordinator.name} declares {name} lost after it has run for {silent_s:.1f} s")
        for host in cluster.hosts_of(name):
            _check_lost(cluster, coordinator, host)


def _check_lost(cluster: Cluster, coordinator: CoordinatorProcess, host: Host) -> None:
    if not host.alive:
        return
    cluster.seen.add("lost but alive")
    if host.is_frozen:
        host.kill_ranks()  # when it goes on, they end before they do anything
        return
    has_acted = host.lease_until_s is not None
    runs = any(rank.alive for rank in host.ranks) if has_acted else not host.is_inert
    if not runs and host.is_lease_over(cluster):
        return
    holder = host.lease_holder
    is_led_elsewhere = holder is not None and holder is not coordinator
    if not (is_led_elsewhere and host.session.promised > coordinator.state.office.term):
        raise Violation(
            f"LOST-1: {coordinator.name} declares {host.name} lost, whose lease "
            f"{'is over' if host.is_lease_over(cluster) else 'goes on'} and whose ranks "
            f"{'run' if runs else 'have ended'}"
        )


def check_decision(cluster: Cluster, coordinator: CoordinatorProcess, decision: Decision) -> None:
    """`coordinator` has decided it just now."""
    record = decision.record
    before = cluster.chain.decided.get(record.parent)
    left_out = {*(() if before is None else before.agents)}.difference(record.agents, record.dead_agents)
    if left_out:
        raise Violation(f"PRESENT-1: generation {record.generation} goes on without {sorted(left_out)}")
    present = [coordinator.sessions[n] for n in coordinator.state.sessions.begun if n in coordinator.sessions]
    promised = {session.agent for session in present if session.agent_session.promised >= decision.term}
    if not promised.issuperset(record.agents):
        raise Violation(f"REPORT-1: generation {record.generation} of {record.agents}, but only {promised} are here")
    needed = () if before is None else before.agents
    given = coordinator.promises | coordinator.excused
    if not coordinator.is_granted and not (needed and given.issuperset(needed)):
        raise Violation(f"OFFICE-1: {coordinator.name} decides, but only {sorted(given)} promised")
    if any(c is not coordinator and c.state.in_office for c in cluster.living()):
        cluster.seen.add("decided beside another in office")


def check_push(
    cluster: Cluster, coordinator: CoordinatorProcess, session: SimulatedSession, decision: Decision
) -> None:
    """`session.agent` was sent it: its host may have another id by now, and not have hung up yet."""
    record = decision.record
    before = cluster.chain.decided.get(record.parent)
    if coordinator.disk is not None or before is None or session.agent in before.agents:
        return
    if coordinator.excused.issuperset({*before.agents} & {*record.agents}):
        return
    wanted = {*before.agents} & {*record.agents}
    parents = [
        other for other in cluster.hosts.values() if wanted & {other.id, other.session.agent, other.session.former}
    ]
    for other in parents:
        known = other.known_decision
        if known is not None and not _is_newer(decision, known):
            cluster.seen.add("joiner waited")
            return
    if any(rank.alive for other in parents for rank in other.ranks):
        raise Violation(f"ACCEPT-1: {coordinator.name} sends {record.generation} to {session.agent} before its parents")


def check_size(cluster: Cluster, record: Record, proposal: Sequence[Report]) -> None:
    """PLAN-2: as many replica groups as possible, but no more than seats are requested or than before, not counting
    groups with a draining member."""
    layout, setting = record.layout, cluster.setting
    away = {each.agent for each in record.cut_off}
    num_members = {report.agent: len(report.members) for report in proposal}
    asked = {agent: cluster.agents[agent].num_seats for agent in num_members}
    num_asked = sum(num_members[agent] if num is None else num for agent, num in asked.items())
    before, num_going, present = 0, 0, cluster.chain.record
    if present is not None and present.layout == layout:
        draining = [member.id for report in proposal for member in report.members if member.draining]
        before = present.plan.shape[1] - present.groups_of(present.draining_members)
        num_going = present.groups_of(draining)
    most = max(max(num_asked // layout.unit, before) + num_going, layout.min_replicas)
    block = math.prod(getattr(layout, axis) for axis in layout.within_host)
    possible = sum(num // block for agent, num in num_members.items() if agent not in away) * block // layout.unit
    num_groups = record.plan.shape[1]
    if num_groups > most or (num_groups < min(most, possible) and not setting.max_hosts):
        raise Violation(
            f"PLAN-2: generation {record.generation} has {num_groups} replica groups of {possible}; {num_asked} "
            f"seats are requested, and there were {before}"
        )
    _check_layout(record, [report for report in proposal if report.agent not in away])


def check_cut_off(state: CoordinatorState, record: Record) -> None:
    """CUT-1, as far as the coordinator knows of paths when it decides `record`. Who is left out has no seat, and a
    broken path to one that takes part."""
    if not record.cut_off:
        return
    away = {each.agent for each in record.cut_off}
    unreached = state.facts.unreached
    pairs = {frozenset((agent, other)) for agent, others in unreached.items() for other in others}
    for one, other in map(tuple, pairs):
        if not away & {one, other} and record.has_agent(one) and record.has_agent(other):
            raise Violation(
                f"CUT-1: generation {record.generation} has {one} and {other}, which do not reach each other"
            )
    for agent in away:
        if any(seat.status != SPARE for seat in record.seats_of(agent)):
            raise Violation(f"CUT-1: generation {record.generation} leaves {agent} out, and has seats for it")
        if not any(agent in pair and pair - away for pair in pairs):
            raise Violation(f"CUT-1: generation {record.generation} leaves {agent} out, which reaches the others")


def _check_layout(record: Record, proposal: Sequence[Report]) -> None:
    """NEXT-4, NEXT-5: an earlier layout is left out only if the members that stay do not fill it."""
    staying = Counter(report.host for report in proposal for member in report.members if not member.draining)
    for earlier in record.layouts[: record.in_force]:
        if is_filled(earlier, staying):
            raise Violation(f"NEXT-4: generation {record.generation} takes {record.layout.sizes}, not {earlier.sizes}")


def check_step(cluster: Cluster, generation: SimulatedGeneration, parts: Sequence[Part]) -> None:
    """RULE-4 and RULE-5: the ranks reduce one step of one state, and each slot once."""
    first = parts[0]
    covered: Counter[int] = Counter()
    for part in parts:
        if part.attempt != first.attempt:
            raise Violation(f"RULE-4: {part.attempt} and {first.attempt} are reduced together")
        if part.active != first.active:
            raise Violation(f"RULE-5: ranks disagree on who is active: {part.active} and {first.active}")
        if part.share is not None:
            covered[part.share[0]] += 1
            if part.state is None:
                raise Violation(f"RULE-5: a rank without state has a share of {part.attempt}")
    states = {part.state for part in parts if part.state is not None}
    if len(states) > 1:
        raise Violation(f"RULE-4: {states} take {first.attempt} together")
    count = max((part.share[1] for part in parts if part.share is not None), default=0)
    if not count:
        raise Violation(f"RULE-5: nobody has a share of {first.attempt}")
    _check_runs(first.attempt, parts)
    layout = generation.record.layout
    if covered != Counter(dict.fromkeys(range(count), layout.pp * layout.tp)):
        raise Violation(f"RULE-5: the shares of {first.attempt} are {dict(covered)} of {count}")


def _check_runs(attempt: Attempt, parts: Sequence[Part]) -> None:
    """RULE-5 by slots: in each part of the model, every run is reduced once, computed on the state of the step."""
    of_model: dict[Model, Counter[int]] = {}
    for part in parts:
        for run, (state, model) in (part.runs or {}).items():
            of_model.setdefault(part.model, Counter())[run] += 1
            if state is not part.state or model != part.model:
                raise Violation(f"DIVISION-5: run {run} of {attempt} is of {state} at {model}, not {part.state}")
    for model, counted in of_model.items():
        if counted != Counter(range(NUM_RUNS)):
            raise Violation(f"RULE-5: the runs of {attempt} at {model} are {dict(counted)}")


def check_ended(host: Host, record: Record) -> None:
    """SIMHOST-4: after the agent was told that the exit of a rank has begun, which had a seat in `record`. Once the job
    has finished, an agent that ends on a signal ends its ranks alone: the others know by their connections."""
    if host.signal and host.agent_state.finished:
        return
    generation = record.generation
    for rank in host.ranks:
        runs = rank.alive and rank.generation is not None and rank.generation.record is record and not rank.poisoned
        if runs and ("abort", generation) not in rank.received:
            raise Violation(f"SIMHOST-4: {rank.name} runs on in generation {generation}, in which an exit has begun")
    if len(record.agents) > 1 and host.session.over < generation:
        raise Violation(f"SIMHOST-4: {host.name} notifies nobody of the end of generation {generation}")


def led_elsewhere(cluster: Cluster, host: Host) -> set[str]:
    """Hosts that have promised a higher term than that in which `host` was told that the state is lost: another
    coordinator led them when the state was given up (LOST-1). They may be back before `host` is told."""
    return {
        other.name for other in cluster.hosts.values() if other.alive and other.session.promised > host.session.promised
    }
