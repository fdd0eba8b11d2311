"""Invariants of a simulated job: the rules of the design, checked at every event against the real history.

A `State` is the whole history of a training state. Members name states by attempts; the invariants check that a name
means the same state to all of them.

RULE-1: records form one chain, and only members with the same record run together
RULE-2: generations only increase
RULE-3: while an agent's request is open, none of its ranks runs
RULE-4: no two survivors apply different steps, and ranks reduce together only one step of one state
RULE-5: the ranks of a step agree on the active members, so that their shares cover it once, each computed on a whole
     state; a step in which no rank has a share commits nothing
RULE-6: a healed state, and a state that a rank reports, is the record's, for the rank's own part of the model
RULE-7: after the last fault the job goes on
RULE-9: a rank that has requested a record adds nothing to an older generation
RULE-10: a torn state does not count as state
COMMIT-1: a committed attempt with a whole copy stays committed; a record that drops a reported one says `rolled_back`
COMMIT-4: an attempt that was rolled back is never committed again
RECOVERY-2: every active member holds the state, and each part of the model has one, or the record names those that keep
     all parts of another layout
MANAGER-15: all ranks that apply a step have the same sums of the script's numbers, of all ranks
SIMHOST-1: an agent exits once, with the code that its members' exits imply
SIMHOST-2: an agent whose ranks cannot be started fails
PLAN-2: spares wait only while there are as many replica groups as seats are requested
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import ACTIVE, Record, Report

if TYPE_CHECKING:
    from elasticgang.simulation.rank import Rank

Gradient = tuple[str, int]  # the digest of the record under which it was reduced, and the round
Model = tuple[int, int, int]


def format_attempt(attempt: Attempt) -> str:
    return f"{attempt.step}@{attempt.generation}"


class Violation(Exception):
    """A rule is violated. The text begins with the rule's label."""


def is_broken(text: str) -> bool:
    """Whether `text` is that of a violation."""
    return re.match(r"[A-Z]+-\d+: ", text) is not None


class State:
    """A training state: `parent` with `gradient` applied. Each state has one object."""

    __slots__ = ("_children", "attempt", "depth", "gradient", "parent")

    def __init__(self, parent: State | None, attempt: Attempt, gradient: Gradient) -> None:
        self.parent = parent
        self.attempt = attempt
        self.gradient = gradient
        self.depth: int = 0 if parent is None else parent.depth + 1
        self._children: dict[tuple[Attempt, Gradient], State] = {}

    def after(self, attempt: Attempt, gradient: Gradient) -> State:
        key = (attempt, gradient)
        if key not in self._children:
            self._children[key] = State(self, attempt, gradient)
        return self._children[key]

    def at(self, depth: int) -> State | None:
        """The state after `depth` steps: an ancestor, or this one."""
        state: State | None = self
        while state is not None and state.depth > depth:
            state = state.parent
        return state if state is not None and state.depth == depth else None

    def holds(self, other: State) -> bool:
        return self.at(other.depth) is other

    def __str__(self) -> str:
        return format_attempt(self.attempt)


class Invariants:
    """`of`: the committed state of each record, by its digest."""

    def __init__(self, layouts: Sequence[ParallelLayout]) -> None:
        """`layouts`: those of the job, in order."""
        self.of: dict[str, State] = {}
        self.reduced: dict[str, dict[Attempt, State]] = {}  # by record digest: the state after each reduced attempt
        self.given_up: set[State] = set()
        self._known: dict[str, State] = {}
        self._models = [
            frozenset(itertools.product(range(layout.pp), range(layout.sdp), range(layout.tp))) for layout in layouts
        ]
        self._applied: dict[int, dict[State, dict[Rank, None]]] = {}
        self._newest: dict[State, None] = {}  # committed states without a committed successor
        self._sums: dict[State, tuple[float, ...]] = {}  # of the script's numbers, in the last step of the state

    def reduce(self, record: Record, base: State, attempt: Attempt, number: int) -> None:
        """The reduction of `attempt` is complete. A dropped step is tried again under the same name."""
        self.reduced.setdefault(record.digest, {})[attempt] = base.after(attempt, (record.digest, number))

    def apply(self, rank: Rank, state: State, sums: tuple[float, ...]) -> None:
        """`rank` has applied the last step of `state`, with these sums: RULE-4, MANAGER-15."""
        if not sums or self._sums.setdefault(state, sums) != sums:
            raise Violation(f"MANAGER-15: {rank.name} applies {state} with {sums}, not {self._sums.get(state)}")
        same_step = self._applied.setdefault(state.depth, {})
        for other, ranks in same_step.items():
            if other is not state and other not in self.given_up:
                for peer in ranks:
                    if peer.alive:
                        raise Violation(f"RULE-4: {rank.name} applies {state}, but {peer.name} has applied {other}")
        same_step.setdefault(state, {})[rank] = None
        if state.parent is not None:
            self._newest.pop(state.parent, None)
        self._newest[state] = None

    def write(self, record: Record, parent: Record | None, proposal: Sequence[Report], ranks: Collection[Rank]) -> None:
        """`record`, which follows from `proposal`, is agreed."""
        state = self._state_of(record, parent)
        seated = {record.model_coordinates(member) for member in record.members(ACTIVE)}
        kept = {(holder.layout, holder.model) for holder in record.holders}
        if (lacking := sorted(self._models[record.in_force] - seated)) and not (
            record.checkpoint or self.is_whole(kept | {(record.in_force, model) for model in seated})
        ):
            raise Violation(f"RECOVERY-2: nobody sits at {lacking[0]} with the state of generation {record.generation}")
        if parent is not None and record.committed.step and not state.holds(self.of[parent.digest]):
            raise Violation(f"RULE-1: {record.committed} does not build on {parent.committed}")
        for ancestor in self._past(state):
            if ancestor in self.given_up:
                raise Violation(f"COMMIT-4: {ancestor} was given up, and comes back in generation {record.generation}")
        told = {report.newest_commit for report in proposal} | {m.tip for report in proposal for m in report.members}
        for newest in list(self._newest):
            dropped = [past for past in self._past(newest) if not state.holds(past) and past not in self.given_up]
            if not record.rolled_back and (len(dropped) > 1 or any(lost.attempt in told for lost in dropped)):
                raise Violation(f"COMMIT-1: {newest} is dropped for {record.committed} without a word")
            for lost in dropped:
                self._give_up(lost, record, ranks)
        self.of[record.digest] = state

    def _state_of(self, record: Record, parent: Record | None) -> State:
        """A record has one state, also when it is looked up before the record has an effect."""
        if record.digest not in self._known:
            self._known[record.digest] = self._find_state(record, parent)
        return self._known[record.digest]

    def _find_state(self, record: Record, parent: Record | None) -> State:
        if record.committed == Attempt(0, record.generation):
            return State(None, record.committed, (record.digest, 0))
        if parent is not None and record.committed == parent.committed:
            return self.of[parent.digest]
        reduced = self.reduced.get(parent.digest, {}) if parent is not None else {}
        if record.committed not in reduced:
            raise Violation(
                f"RULE-1: generation {record.generation} commits {record.committed}, which nobody has reduced"
            )
        return reduced[record.committed]

    def _give_up(self, lost: State, record: Record, ranks: Iterable[Rank]) -> None:
        """COMMIT-1: a state may be given up only if no whole copy of it is left."""
        for state, holders in self._whole(ranks):
            if state.holds(lost):
                names = ", ".join(holders)
                raise Violation(
                    f"COMMIT-1: {lost} was committed, and {names} hold it, but the truth is {record.committed}"
                )
        self.given_up.add(lost)
        self._newest.pop(lost, None)

    def give_up_all(self) -> None:
        """The job is founded anew."""
        for state in self._newest:
            self.given_up.update(self._past(state))
        self._newest.clear()

    def forget(self, base: State | None, held: Collection[State]) -> None:
        """What builds on no more than `base` stays, and what somebody holds; the rest never happened."""
        for newest in list(self._newest):
            for past in list(self._past(newest)):
                if (base is None or not base.holds(past)) and not any(state.holds(past) for state in held):
                    self.given_up.add(past)
            if newest in self.given_up:
                self._newest.pop(newest, None)

    def lose(self, record: Record, ranks: Iterable[Rank]) -> None:
        """An agent ends the job because the state of `record` and of later steps is lost."""
        for state, holders in self._whole(ranks):
            if state.holds(self.of[record.digest]):
                raise Violation(f"COMMIT-1: the job is given up, but {', '.join(holders)} hold {state}")

    def _whole(self, ranks: Iterable[Rank]) -> Iterator[tuple[State, list[str]]]:
        """Every state with a whole copy, applied or prepared, and the names of its holders."""
        holders: dict[tuple[State, int], dict[Model, str]] = {}
        for rank in ranks:
            for state in (rank.state, rank.prepared):
                if rank.alive and rank.model is not None and state is not None:
                    holders.setdefault((state, rank.layout), {})[rank.model] = rank.name
            if rank.alive and rank.former is not None:
                state, (_, layout, model) = rank.former
                holders.setdefault((state, layout), {})[model] = rank.name
        for (state, layout), by_model in holders.items():
            if self._models[layout] <= by_model.keys():
                yield state, sorted(by_model.values())

    def is_whole(self, held: Collection[tuple[int, Model]]) -> bool:
        """Whether `held`, parts with the numbers of their layouts, are all parts of some layout."""
        return any(all((number, model) in held for model in models) for number, models in enumerate(self._models))

    @staticmethod
    def _past(state: State) -> Iterator[State]:
        """The state and all its ancestors, newest first, without the state before the first step."""
        at: State | None = state
        while at is not None and at.depth:
            yield at
            at = at.parent
