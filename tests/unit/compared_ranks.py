"""Ranks of one generation that pass a boundary together, with digests in the place of their states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elasticgang.errors import ElasticGangError, PeerLostError
from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_instructions import Do, Instruction, Observed
from elasticgang.protocol.member_lifecycle import MemberLifecycle, Next
from elasticgang.protocol.record import ACTIVE, LEARNER, Record, Seat

NUM_STEPS = 100
FLAT = ParallelLayout()


class ComparedRanks:
    """`digests`: of the tensors of each member's state. `lost`: the members that get an error instead of a sum, with
    its number, from 1 on. `saves`: whether a save is due. `done`: what each was to do at the last boundary."""

    def __init__(
        self, members: Iterable[str], layout: ParallelLayout = FLAT, *, every: int = 5, step: int = 10
    ) -> None:
        self.layout, self.step, self.generation = layout, step, 0
        self.ranks = {name: MemberLifecycle(name, 0, "") for name in members}
        for rank in self.ranks.values():
            rank.comparison.every = every
            rank.state.tip = Attempt(step, 1) if step else None
        self.digests: dict[str, list[int]] = {name: [7, 8, 9] for name in self.ranks}
        self.lost: set[tuple[str, int]] = set()
        self.saves = False
        self.done: dict[str, list[Instruction]] = {}
        self.enter()

    def enter(self, *members: str, learners: Iterable[str] = ()) -> None:
        """The next generation, of `members`, or of all; `learners` come to it."""
        self.ranks = {name: rank for name, rank in self.ranks.items() if not members or name in members}
        every = max((rank.comparison.every for rank in self.ranks.values()), default=0)
        for name in learners:
            self.ranks[name] = MemberLifecycle(name, 0, "")
            self.ranks[name].comparison.every = every
        self.generation += 1
        status = {name: LEARNER if name in learners else ACTIVE for name in self.ranks}
        seats = tuple(Seat(name, name[0], name[0], int(name[1:]), "", status[name]) for name in self.ranks)
        planned = plan([Member(name, name[0]) for name in self.ranks], self.layout)
        hosts = tuple(sorted({name[0] for name in self.ranks}))
        committed = Attempt(self.step, 1)
        self._record = Record("job", self.generation, "", self.layout, planned, seats, hosts, committed)
        for rank in self.ranks.values():
            if self.generation > 1 and rank.observed.error is None:
                rank.observed = Observed(PeerLostError("the generation has ended"))
        assert set(self.boundary().values()) == {Next.REGROUP}

    def commit(self, num: int = 1) -> None:
        """All have applied so many steps."""
        self.step += num
        for rank in self.ranks.values():
            rank.state.committed = Attempt(self.step, self.generation)
            rank.state.tip = rank.state.committed if rank.state.is_active else None

    def boundary(self, num_steps: int = NUM_STEPS) -> Mapping[str, Next | ElasticGangError]:
        """What each rank does at the boundary, or the error that it raises."""
        routines = {name: rank.pass_boundary(num_steps) for name, rank in self.ranks.items()}
        outcomes: dict[str, Any] = dict.fromkeys(routines)
        found: dict[str, Next | ElasticGangError] = {}
        self.done = {name: [] for name in routines}
        number = 0
        while len(found) < len(routines):
            sums: dict[str, tuple[float, ...]] = {}
            for name in [name for name in routines if name not in found]:
                rank, outcome = self.ranks[name], outcomes[name]
                try:
                    while True:
                        routine = routines[name]
                        is_error = isinstance(outcome, Exception)
                        instruction = routine.throw(outcome) if is_error else routine.send(outcome)
                        self.done[name].append(instruction)
                        if isinstance(instruction, do.SumState):
                            sums[name] = instruction.values
                            break
                        outcome = self._outcome(rank, instruction)
                except StopIteration as end:
                    found[name] = end.value
                except ElasticGangError as error:
                    found[name] = error
            number += 1
            total = [sum(column) for column in zip(*sums.values(), strict=True)]
            for name in sums:
                outcomes[name] = total
                if (name, number) in self.lost or len(sums) < len(self.ranks):
                    outcomes[name] = PeerLostError("a peer is lost")
                    self.ranks[name].observed = Observed(outcomes[name])
        return found

    def _outcome(self, rank: MemberLifecycle, instruction: Instruction) -> Any:
        match instruction:
            case Do.DIGEST_STATE:
                digests = self.digests[rank.state.member]
                return digests, lambda numbers: " and ".join(f"tensor {number}" for number in numbers)
            case Do.IS_SAVE_DUE:
                return self.saves
            case do.Poison(error):
                rank.observed = Observed(error)
            case Do.LEAVE_GENERATION:
                rank.observed = Observed()
            case Do.AWAIT_RECORD:
                return self._record
            case Do.SAVE_LAST:
                return False, False
            case Do.AWAIT_SUMS:
                return [0.0, 0.0]
            case _:
                return None
        return None

    def compared(self) -> set[str]:
        """The members that have digested their state at the last boundary."""
        return {name for name, done in self.done.items() if Do.DIGEST_STATE in done}

    def told(self, name: str) -> list[do.ReportDifference]:
        return [each for each in self.done[name] if isinstance(each, do.ReportDifference)]
