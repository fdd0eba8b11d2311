"""Compares the training state of ranks with the same part of the model, at boundaries between steps.

Pure: a routine of the member, as those of `member_lifecycle.py`, with digests in and instructions out.

COMPARE-1  All ranks of a generation compare at the same boundaries: after every `every` steps, where a save is due, and
    after the last step. Each knows that from what is alike on all of them.
COMPARE-2  Ranks are compared with those of their own part of the model, and only those that have a state. What more
    than half of these have is right, and the others are damaged. If there is no such state, nobody can say who is.
COMPARE-3  A boundary at which a comparison is due is passed, and its state saved, only once that has found nothing.
COMPARE-4  A rank that knows of a difference acts on it after a second sum, even if that fails: then others may not know
    it, and be the only ones left to show it. If it succeeds, all know it before any of them ends.
COMPARE-5  A damaged rank has no state any more, and raises an error that leaves the loop over steps; if nobody can say
    who is damaged, every rank does. The others end the generation, before anything begins in it.
COMPARE-6  Ranks are said to have been alike at an earlier step only if each of them took part in that comparison.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from elasticgang.errors import DamagedStateError, GangError, PeerLostError
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_instructions import Do, Instruction
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import Record
from elasticgang.protocol.shortened import shortened

_NUM_SHOWN = 8  # ranks, in a message
_NUM_EACH = 2  # numbers of a rank in the first sum

_T = TypeVar("_T")
Routine: TypeAlias = Generator[Instruction, Any, _T]


class Finding(NamedTuple):
    """The ranks of one part of the model differ. `sides`: ranks that are alike, the most first, each in order.
    `num_tensors`: how many digests tell where."""

    sides: tuple[tuple[int, ...], ...]
    num_tensors: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(itertools.chain(*self.sides)))

    @property
    def right(self) -> tuple[int, ...]:
        """COMPARE-2. Empty: nobody can say which are."""
        return self.sides[0] if 2 * len(self.sides[0]) > len(self.ranks) else ()

    @property
    def damaged(self) -> tuple[int, ...]:
        """Those that are not right."""
        return tuple(rank for rank in self.ranks if rank not in self.right)


def first_numbers(digests: Sequence[int], rank: int, num_ranks: int) -> list[float]:
    """What `rank` adds to the first sum: a digest of the digests of its tensors, and how many there are, in numbers of
    its own. Without `digests` it has no state to compare."""
    values = [0.0] * (_NUM_EACH * num_ranks)
    if digests:
        whole = hashlib.blake2b(array("Q", digests).tobytes(), digest_size=6).digest()
        values[_NUM_EACH * rank : _NUM_EACH * (rank + 1)] = 1.0 + int.from_bytes(whole, "little"), float(len(digests))
    return values


def find(sums: Sequence[float], parts: Sequence[Sequence[int]]) -> list[Finding]:
    """What differs, from the first sum. `parts`: the ranks that have each part of the model (COMPARE-2)."""
    found = []
    for part in parts:
        sides: dict[float, list[int]] = defaultdict(list)
        for rank in part:
            if digest := sums[_NUM_EACH * rank]:
                sides[digest].append(rank)
        if len(sides) > 1:
            ordered = sorted((tuple(sorted(side)) for side in sides.values()), key=lambda side: (-len(side), side))
            sizes = [int(sums[_NUM_EACH * side[0] + 1]) for side in ordered[:2]]
            found.append(Finding(tuple(ordered), max(sizes)))
    return found


def second_numbers(found: Sequence[Finding], digests: Sequence[int], rank: int) -> list[float]:
    """What `rank` adds to the second sum. Where that is not 0, the first two sides of a finding have other tensors."""
    values: list[float] = []
    for finding in found:
        signs = {side[0]: sign for side, sign in zip(finding.sides[:2], (1, -1), strict=True)}
        own = [float(signs[rank] * digest) for digest in digests] if rank in signs else []
        values += [*own, *([0.0] * (finding.num_tensors - len(own)))]
    return values


class StateComparison:
    """Of one rank. `every`: of `--compare-state`; 0: nothing is compared."""

    def __init__(self, state: MemberState) -> None:
        self.every = 0
        self._state = state
        self._passed: tuple[Attempt, int] | None = None  # what was compared, and in which generation
        self._alike: tuple[int, frozenset[str]] = 0, frozenset()  # the step, and the members (COMPARE-6)

    @property
    def has_passed(self) -> bool:
        """COMPARE-3. Whether the state that this rank has now was compared in this generation, or need not be."""
        state = self._state
        return not self.every or state.committed.step == 0 or self._passed == (state.committed, state.entered)

    def state_loaded(self) -> None:
        """This rank has loaded its state from a checkpoint, or from ranks with another layout."""
        self._alike = 0, frozenset()

    def compare(self, num_steps: int, *, saves: bool = False) -> Routine[None]:
        """Compare the state, if that is due and not done. Nothing has passed if the generation ends meanwhile.
        `saves`: the state is saved at this boundary, which is known without IS_SAVE_DUE.

        Raises:
            DamagedStateError: COMPARE-5.
        """
        state, step = self._state, self._state.committed.step
        if self.has_passed:
            return
        if step < num_steps and step % self.every and not (saves or (yield Do.IS_SAVE_DUE)):  # COMPARE-1
            return
        parts = state.comparing()
        if any(len(part) > 1 for part in parts):
            try:
                if not (yield from self._compare(parts)):
                    return
            except GangError:
                return
        self._passed = state.committed, state.entered

    def _compare(self, parts: Sequence[Sequence[str]]) -> Routine[bool]:
        """Returns whether nothing differs. Raises GangError, DamagedStateError."""
        state, record = self._state, self._state.record
        assert record is not None
        ranks = record.plan.ranks
        rank, own = ranks[state.member], next((part for part in parts if state.member in part), ())
        digests: list[int] = []
        if len(own) > 1 and state.tip is not None:
            digests, in_words = yield Do.DIGEST_STATE
        sums = yield do.SumState(tuple(first_numbers(digests, rank, len(ranks))))
        found = find(sums, [[ranks[member] for member in part] for part in parts])
        if not found:
            if digests and all(sums[_NUM_EACH * ranks[member]] for member in own):
                self._alike = state.committed.step, frozenset(own)
            return True
        undecided = any(not finding.right for finding in found)
        differences: Sequence[float] | None = None
        lost = None
        try:
            differences = yield do.SumState(tuple(second_numbers(found, digests, rank)))
        except GangError as error:  # COMPARE-4
            lost = error
        texts, start = [], 0
        for finding in found:
            where = ""
            if differences is not None and rank in itertools.chain(*finding.sides[:2]):
                where = in_words([at for at in range(finding.num_tensors) if differences[start + at]])
            texts.append(self._text(finding, record, where))
            start += finding.num_tensors
        text = f"of the training states after step {state.committed.step}, {'; and '.join(texts)}"
        if undecided:
            text += (
                "; nobody can say which is right: the job ends. When it is started again, it continues at its newest "
                "checkpoint, if there is one"
            )
        if undecided or any(rank in finding.ranks for finding in found):
            yield do.ReportDifference(state.committed.step, state.entered, text, ends_job=undecided)
        if undecided or any(rank in finding.damaged for finding in found):  # COMPARE-5
            state.damaged()
            whose = "nobody can say whose" if undecided else "this rank's"
            why = f"{whose} training state is {'right' if undecided else 'not that of its replicas'}"
            raise DamagedStateError(why, heals=not undecided) from None
        yield do.Poison(lost or PeerLostError(text))
        return False

    def _text(self, finding: Finding, record: Record, where: str) -> str:
        """What there is to say of `finding`. `where`: the tensors that differ; empty: this rank cannot tell."""
        members = {rank: member for member, rank in record.plan.ranks.items()}
        sides = [finding.right, finding.damaged] if finding.right else finding.sides
        named = [_in_words([members[rank] for rank in side], record) for side in sides]
        since, alike = self._alike
        text = f"those of {' and of '.join(named)} differ"
        if finding.right:
            text = f"that of {named[1]} differs from that of {named[0]}"
        text += f"{where and f' in {where}'}"
        if since and alike.issuperset(members[rank] for rank in finding.ranks):  # COMPARE-6
            text += f"; after step {since} they were alike"
        return text


def _in_words(members: Sequence[str], record: Record) -> str:
    """With the numbers that ranks have on their hosts, as elsewhere."""
    seats = [seat for seat in map(record.seat, members) if seat is not None]
    return shortened([f"rank {seat.local_rank} on {seat.host}" for seat in seats], _NUM_SHOWN)
