"""What agents must know of each other besides records: each one's facts, and what its coordinator gathers of them.

Pure. Of facts, only `unreached` decides about a record (NEXT-10).

FACTS-WHOLE  An agent sends its facts as a whole: when they change, and first in each session. They replace all earlier
             facts of that agent, and hold until it is lost, has left, or another record follows without it.
FACTS-ABSENT Of an agent that is not in the record and has lost its session, only its successors count. They do for
             `lost_after_s`: it may be back in a moment, and the last holder of a shard would have left (MEMBER-6).
FACTS-JOB    The coordinator sends a job's facts as a whole: to each new session, and to all when they change. Neither
             their size nor the number of changes grows with the number of agents that say the same: of a step, they
             have the first two failures, none of which is taken back; of members that wait, the furthest in each
             group; of successors, whether there are any.
FACTS-TICK   The coordinator sends waits on a tick alone. They change often where steps are long.
FACTS-ALONE  An agent that takes part alone tells no facts but that it stops. Nobody needs them, and its own ranks would
             wait for successors that have their seats by now.
FACTS-RECENT An agent that loses its session counts the successors that it knew for `RECENT_S` more. It may open another
             one in a moment, and so may others whose coordinator was started again; until then the last holder of a
             shard would leave (MEMBER-6).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from elasticgang.protocol.values import value

MAX_FAILURES = 32  # of one agent: the newest
MAX_WAITS = 1024  # of one agent, and of a job
RECENT_S = 12.5  # as long as the coordinator has patience with a silent agent
_MAX_STEPS = 64  # of a job's facts: the last ones in which a script has failed


@value(frozen=True)
class Wait:
    """Members wait for all others that are less far. `group` None: they have requested the generation after
    `generation`. Otherwise they have submitted `reached` collectives to the group; `reached` None: they wait for a
    message from any member. `agent`: the only one whose members do; empty if several agents' do, and in `AgentFacts`.
    """

    generation: int
    group: int | None = None
    reached: int | None = None
    agent: str = ""


@value(frozen=True)
class ScriptFailure:
    """The script of `member`, a process of the rank `local_rank`, has failed in `step`. `agent`: empty in
    `AgentFacts`."""

    member: str
    local_rank: int
    step: int
    agent: str = ""


@value(frozen=True)
class AgentFacts:
    """`has_successors`: ranks of the agent without a seat could get one. `waits`: those that last. `failures`: the
    newest. The coordinator alone learns the rest. `unreached`: agents whose hosts this one does not reach (REACH-1).
    `is_stopping`: a signal has asked the agent to end (SERVE-LEAVE)."""

    has_successors: bool = False
    waits: tuple[Wait, ...] = ()
    failures: tuple[ScriptFailure, ...] = ()
    unreached: tuple[str, ...] = ()
    is_stopping: bool = False

    def alone(self) -> AgentFacts:
        """FACTS-ALONE."""
        return AgentFacts(is_stopping=self.is_stopping)


@value(frozen=True)
class JobFacts:
    """Of all agents, the receiver among them."""

    have_successors: bool = False
    waits: tuple[Wait, ...] = ()
    failures: tuple[ScriptFailure, ...] = ()


NO_FACTS = AgentFacts()

_Place = tuple[int, "int | None", bool]  # a generation, a group, and whether it has collectives there


def furthest(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """Of the waits at each place, the one that implies the others."""
    found: dict[_Place, Wait] = {}
    for wait in waits:
        place = _place(wait)
        before = found.get(place)
        if before is None or (before.reached or 0) < (wait.reached or 0):
            found[place] = wait
    return tuple(itertools.islice(found.values(), MAX_WAITS))


@dataclass
class KnownSuccessors:
    """Whether other agents have successors, as far as one agent knows (FACTS-RECENT)."""

    _has: bool = False
    _until_s: float = 0.0

    def hear(self, has: bool) -> None:
        self._has = has

    def lose_session(self, now_s: float) -> None:
        if self._has:
            self._has, self._until_s = False, now_s + RECENT_S

    def any(self, now_s: float) -> bool:
        return self._has or now_s < self._until_s


@dataclass
class GatheredFacts:
    """Of one job, in its coordinator. `sent`: what all sessions know, and a new one is to be sent."""

    sent: JobFacts = field(default_factory=JobFacts)
    _of: dict[str, AgentFacts] = field(default_factory=dict)  # by agent; without those that have none
    _waiting: dict[_Place, dict[str, int]] = field(default_factory=dict)  # by agent: how far
    _failed: dict[int, dict[ScriptFailure, None]] = field(default_factory=dict)  # by step, in the order in which known
    _num_with_successors: int = 0
    _has_new_waits: bool = False
    _has_new_failures: bool = False

    def replace(self, agent: str, facts: AgentFacts) -> None:
        """FACTS-WHOLE."""
        facts = replace(facts, waits=furthest(facts.waits))
        before = self._of.pop(agent, NO_FACTS)
        if facts != NO_FACTS:
            self._of[agent] = facts
        self._num_with_successors += facts.has_successors - before.has_successors
        if facts.waits != before.waits:
            self._replace_waits(agent, before.waits, facts.waits)
        if facts.failures != before.failures:
            self._replace_failures(agent, before.failures, facts.failures)

    def drop(self, agents: Iterable[str]) -> None:
        for agent in agents:
            self.replace(agent, NO_FACTS)

    def keep_successors(self, agent: str) -> None:
        """FACTS-ABSENT: the agent has lost its session."""
        self.replace(agent, AgentFacts(self._of.get(agent, NO_FACTS).has_successors))

    @property
    def by_agent(self) -> Mapping[str, AgentFacts]:
        """Of those that have any."""
        return self._of

    @property
    def unreached(self) -> dict[str, tuple[str, ...]]:
        """By agent: those that its host does not reach. Without those that reach all."""
        return {agent: facts.unreached for agent, facts in self._of.items() if facts.unreached}

    def unreached_by(self, agent: str) -> tuple[str, ...]:
        return self._of.get(agent, NO_FACTS).unreached

    def changed(self, *, on_tick: bool = False) -> JobFacts | None:
        """What to send to all sessions now; None: they know it (FACTS-JOB, FACTS-TICK)."""
        facts = self.sent
        has_successors = self._num_with_successors > 0
        if has_successors != facts.have_successors:
            facts = replace(facts, have_successors=has_successors)
        if self._has_new_failures:
            self._has_new_failures = False
            facts = replace(facts, failures=self._first_failures())
        if self._has_new_waits and on_tick:
            self._has_new_waits = False
            facts = replace(facts, waits=self._furthest_waits())
        if facts == self.sent:
            return None
        self.sent = facts
        return facts

    def _replace_waits(self, agent: str, before: tuple[Wait, ...], waits: tuple[Wait, ...]) -> None:
        self._has_new_waits = True
        for wait in before:
            agents = self._waiting[_place(wait)]
            agents.pop(agent, None)
            if not agents:
                del self._waiting[_place(wait)]
        for wait in waits:
            self._waiting.setdefault(_place(wait), {})[agent] = wait.reached or 0

    def _replace_failures(
        self, agent: str, before: tuple[ScriptFailure, ...], failures: tuple[ScriptFailure, ...]
    ) -> None:
        old, new = ([replace(each, agent=agent) for each in some] for some in (before, failures))
        dropped = set(old).difference(new)
        for failure in dropped:
            del self._failed[failure.step][failure]
            if not self._failed[failure.step]:
                del self._failed[failure.step]
        if dropped.intersection(self.sent.failures):  # a new session is not sent them; whoever knows them may
            self.sent = replace(self.sent, failures=tuple(f for f in self.sent.failures if f not in dropped))
        for failure in new:
            at_step = self._failed.setdefault(failure.step, {})
            self._has_new_failures |= failure not in at_step and len(at_step) < 2
            at_step[failure] = None

    def _first_failures(self) -> tuple[ScriptFailure, ...]:
        newest = sorted(heapq.nlargest(_MAX_STEPS, self._failed))
        return tuple(failure for step in newest for failure in itertools.islice(self._failed[step], 2))

    def _furthest_waits(self) -> tuple[Wait, ...]:
        waits = []
        for (generation, group, counts), agents in itertools.islice(self._waiting.items(), MAX_WAITS):
            reached = max(agents.values())
            furthest_agents = [agent for agent, num in agents.items() if num == reached]
            only = furthest_agents[0] if len(furthest_agents) == 1 else ""
            waits.append(Wait(generation, group, reached if counts else None, only))
        return tuple(waits)


def _place(wait: Wait) -> _Place:
    return wait.generation, wait.group, wait.reached is not None
