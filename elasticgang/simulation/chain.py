"""The chain of records of a simulated job: what was decided, what of it counts, and what the job has forgotten.

A record counts once it has an effect: once an agent has it, or a state directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from elasticgang.protocol.coordinator_messages import Decision
from elasticgang.protocol.record import ACTIVE, LEARNER, SPARE, Record, Report
from elasticgang.simulation.invariants import Invariants, Violation, format_attempt
from elasticgang.simulation.promises import check_size
from elasticgang.simulation.rank import Rank

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster


class Chain:
    """`decided`: every record, by digest; `written`: the digests of those that count. `declared_lost`: hosts, each with
    the id that its agent had."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.record: Record | None = None
        self.records: list[Record] = []
        self.decided: dict[str, Record] = {}
        self.written: set[str] = set()
        self.declared_lost: set[tuple[str, str]] = set()
        self.num_forgotten = 0
        self._tentative: dict[str, tuple[Decision, list[Report]]] = {}
        self.invariants = Invariants(cluster.layout.options)

    def note_decision(self, decision: Decision, proposal: Sequence[Report]) -> None:
        digest = decision.record.digest
        if digest not in self._tentative and digest not in self.written:
            self._tentative[digest] = (decision, list(proposal))
            self.decided[digest] = decision.record

    def make_effective(self, decision: Decision) -> None:
        """An agent has the record, or a directory: from now on it counts."""
        record = decision.record
        if record.digest in self.written:
            return
        if record.parent and record.parent not in self.written and record.parent in self._tentative:
            self.make_effective(self._tentative[record.parent][0])  # only joiners knew it, and its parent's agents died
        self._forget_unknown(record)
        present = self.record
        expected = (1, "") if present is None else (present.generation + 1, present.digest)
        if (record.generation, record.parent) != expected:
            raise Violation(
                f"RULE-1: generation {record.generation} of {record.parent or 'nothing'} (term {decision.term.number} "
                f"of {decision.term.name}) does not follow {expected}"
            )
        _, proposal = self._tentative[record.digest]
        self._cluster.log.append(f"{decision.term.name}: {describe(record)}")
        check_size(self._cluster, record, proposal)
        self.invariants.write(record, present, proposal, self.counting())
        self.declared_lost.update(self._lives_of(record))
        self.declared_lost.difference_update(self._lives_in(record))
        self.record = record
        self.records.append(record)
        self.written.add(record.digest)

    def _lives_of(self, record: Record) -> set[tuple[str, str]]:
        """The hosts that `record` declares lost, with their ids."""
        return {
            (host.name, agent)
            for agent in record.dead_agents
            for host in (self._cluster.agents[agent], *self._cluster.hosts_of(agent))
        }

    def _lives_in(self, record: Record) -> set[tuple[str, str]]:
        """Those whose agents take part: of several with one id, that whose ranks have seats."""
        members = [self._cluster.ranks[seat.member] for seat in record.seats]
        seated = {(rank.host, rank.agent) for rank in members}
        taken = {agent for _, agent in seated}
        return seated | {(self._cluster.agents[agent].name, agent) for agent in record.agents if agent not in taken}

    def counting(self) -> list[Rank]:
        """The ranks of agents that no record has declared lost."""
        return [rank for rank in self._cluster.ranks.values() if (rank.host, rank.agent) not in self.declared_lost]

    def begin_anew(self) -> None:
        self.record = None
        self.records.clear()
        self.invariants.give_up_all()
        self.declared_lost.clear()
        for host in [host for host in self._cluster.hosts.values() if host.alive and host.mismatch]:
            self._cluster.end_host(host)

    def _forget_unknown(self, record: Record) -> None:
        """Without a directory, records that no living agent knows never were, except to agents declared lost."""
        known = {
            host.session.decision.record.digest
            for host in self._cluster.hosts.values()
            if host.alive
            and host.session.decision is not None
            and (host.name, host.session.agent) not in self.declared_lost
        }
        back = list(self.records)
        while back and back[-1].digest != record.parent:
            if back[-1].digest in known or (self._cluster.disk is not None and self._cluster.disk.decision is not None):
                return
            back.pop()
        if len(back) == len(self.records) or (record.parent and not back):
            return
        self.num_forgotten += 1
        self._cluster.log.append(
            f"generation {self.records[-1].generation} is forgotten: every agent that knew it is gone"
        )
        for forgotten in self.records[len(back) :]:
            self.declared_lost.difference_update(self._lives_of(forgotten))
        self.records = back
        self.record = back[-1] if back else None
        base = self.invariants.of[self.record.digest] if self.record is not None else None
        _, proposal = self._tentative[record.digest]
        told = {member.id for report in proposal for member in report.members}  # they may have died since
        ranks = [rank for rank in self._cluster.ranks.values() if rank.name in told]
        ranks += [rank for rank in self.counting() if rank.alive]
        held = [state for rank in ranks for state in (rank.state, rank.prepared) if state is not None]
        self.invariants.forget(base, held)


def describe(record: Record) -> str:
    """A record in one line."""
    active, learners, spares = (" ".join(record.members(status)) for status in (ACTIVE, LEARNER, SPARE))
    words = [f"generation {record.generation}  {{{active}}}"]
    words += [f"learn {learners}"] if learners else []
    words += [f"wait {spares}"] if spares else []
    words += [f"without {', '.join(each.agent for each in record.cut_off)}"] if record.cut_off else []
    words += [f" ({record.layout.sizes})"] if len(record.layouts) > 1 else []
    words += [f" {format_attempt(record.committed)}"]
    words += [" rolled forward"] if record.rolled_forward else []
    words += [f" moved from {' '.join(holder.member for holder in record.holders)}"] if record.holders else []
    words += [" goes back"] if record.rolled_back else []
    words += [f" lost {', '.join(record.dead_agents)}"] if record.dead_agents else []
    return " ".join(words)
